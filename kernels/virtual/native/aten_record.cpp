// Graph capture. An operation that makes results runs once, so that they exist, and is recorded with its
// CPU arguments; a replay runs the CPU kernel again and copies the results into the same memory. One that
// only writes into existing memory is recorded and not run: capturing must not change what a user can see.
#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "aten_call.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "vnpu.h"

extern "C" int vnpu_updating();
extern "C" int vnpu_refuse(const char* what);
extern "C" int vnpu_refuse_waiting(const void* stream, const char* what);

namespace vnpu {

namespace {

struct Recorded {
  const OpInfo* info;
  Stack inputs;             // CPU arguments
  Stack outputs;            // CPU tensors over the memory of the results; empty when nothing is allocated
  at::Generator generator;  // random numbers are drawn anew at each replay
  c10::DeviceIndex device;
};

[[noreturn]] void refuse(const OpInfo& info, const char* why) {
  const int code = vnpu_refuse((info.name + " " + why).c_str());
  TORCH_CHECK(false, "virtual NPU: ", info.name, " ", why,
              " while a graph is being captured, which is not permitted (a device refuses it too), error code is ", code);
}

// A copy between host and device may be captured only when it is asynchronous and the host side is pinned.
void check_copy(const OpInfo& info, const Stack& stack) {
  bool pageable = false, host = false, non_blocking = false;
  for (const IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().is_cpu()) {
      host = true;
      pageable |= !value.toTensor().is_pinned();
    }
    if (value.isDevice() && value.toDevice().is_cpu()) pageable = host = true;
  }
  const auto& arguments = info.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "non_blocking") non_blocking = stack[i].toBool();
  if (host && (pageable || !non_blocking)) refuse(info, "copies between host and device");
}

bool writes_outside_pool(const OpInfo& info, const Stack& stack) {
  const auto& arguments = info.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool marked = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (!marked && static_cast<int>(i) != info.out_list) continue;
    const auto outside = [](const at::Tensor& tensor) { return tensor.defined() && !in_graph_pool(tensor.storage()); };
    if (stack[i].isTensor() && outside(stack[i].toTensor())) return true;
    if (stack[i].isTensorList())
      for (const at::Tensor& tensor : stack[i].toTensorVector())
        if (outside(tensor)) return true;
  }
  return false;
}

void add_storages(const IValue& value, std::vector<const void*>& storages) {
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) add_storages(tensor, storages);
  if (value.isTensor() && value.toTensor().defined())
    storages.push_back(value.toTensor().storage().unsafeGetStorageImpl());
}

bool only_views(const Stack& inputs, const Stack& results) {
  std::vector<const void*> known, made;
  for (const IValue& value : inputs) add_storages(value, known);
  for (const IValue& value : results) add_storages(value, made);
  for (const void* storage : made)
    if (std::find(known.begin(), known.end(), storage) == known.end()) return false;
  return true;
}

IValue graph_alias(const IValue& value) {
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(graph_alias(tensor).toTensor());
    return list;
  }
  if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().device().is_cpu()) return value;
  const at::Tensor& tensor = value.toTensor();
  return cpu_alias(tensor, cpu_storage(tensor.storage(), !in_graph_pool(tensor.storage())));
}

void copy_result(const IValue& from, const IValue& to) {
  if (from.isTensorList()) {
    const auto sources = from.toTensorVector(), targets = to.toTensorVector();
    TORCH_CHECK(sources.size() == targets.size(), "a replay gave ", sources.size(), " tensors, captured were ", targets.size());
    for (size_t i = 0; i < sources.size(); ++i) copy_result(sources[i], targets[i]);
  }
  if (!from.isTensor() || !from.toTensor().defined()) return;
  const at::Tensor &source = from.toTensor(), &target = to.toTensor();
  TORCH_CHECK(source.sizes() == target.sizes(), "a replay gave shape ", source.sizes(), ", captured was ", target.sizes());
  if (source.data_ptr() == target.data_ptr()) return;
  if (source.is_contiguous() && target.is_contiguous() && source.dtype() == target.dtype())
    memcpy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  else
    target.copy_(source);
}

void replay(const Recorded& call) {
  Stack stack = call.inputs;
  if (call.info->generator >= 0)
    stack[static_cast<size_t>(call.info->generator)] = cpu_generator(call.generator, call.device);
  c10::InferenceMode inference;
  DeviceMemory memory(true);
  try {
    run_cpu(*call.info, stack);
    for (size_t i = 0; i < call.outputs.size(); ++i) {
      copy_result(stack[i], call.outputs[i]);
      note_written(call.outputs[i]);
    }
  } catch (const c10::Error& error) {
    throw VnpuError(VNPU_INTERNAL, error.what_without_backtrace());
  }
}

}  // namespace

void return_written(const OpInfo& info, Stack& stack) {
  Stack results;
  if (info.out_list >= 0) {
    for (const at::Tensor& tensor : stack[static_cast<size_t>(info.out_list)].toTensorVector()) results.emplace_back(tensor);
    stack.swap(results);
    return;
  }
  const auto& arguments = info.op.schema().arguments();
  for (const c10::Argument& result : info.op.schema().returns())
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].alias_info() != nullptr && *arguments[i].alias_info() == *result.alias_info())
        results.push_back(stack[i]);
  stack.swap(results);
}

const void* current_stream() {
  return c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(vnpu_device())).stream(false);
}

bool on_captured_stream() { return vnpu_capturing() && vnpu_stream_capturing(current_stream()); }

void refuse_behind_waiting_replay(const OpInfo& info) {
  if (vnpu_updating() != 0) return;
  const int code = vnpu_refuse_waiting(current_stream(), info.name.c_str());
  TORCH_CHECK(code == 0, "virtual NPU: ", info.name, " comes after a graph replay that waits for an external event nobody ",
              "recorded yet: record it (graph update) first, error code is ", code);
}

void run_recorded(const OpInfo& info, Stack& stack) {
  const bool updating = vnpu_updating() != 0;
  if (!updating && !on_captured_stream()) return run(info, stack);
  if (!info.copy && leaves_device(info, stack)) refuse(info, "makes the host wait for the device");
  if (info.copy) check_copy(info, stack);
  if (vnpu_null_mode() && run_null(info, stack)) return vnpu_record([] {}, info.name.c_str());

  auto call = std::make_shared<Recorded>();
  call->info = &info;
  call->inputs = stack;
  if (info.generator >= 0 && !stack[static_cast<size_t>(info.generator)].isNone())
    call->generator = stack[static_cast<size_t>(info.generator)].toGenerator();
  Aliases aliases;
  aliases.for_graph = true;
  aliases.replace_inputs(info, call->inputs);
  call->device = aliases.device();

  if (info.only_writes && (updating || writes_outside_pool(info, stack))) {
    return_written(info, stack);
  } else if (info.view && !info.mutates) {
    const Stack before = stack;
    run(info, stack);
    if (only_views(before, stack)) return;  // no work for the device
    TORCH_CHECK(!updating, "virtual NPU: ", info.name, " copies, so it cannot be part of a task update");
    for (const IValue& result : stack) call->outputs.push_back(graph_alias(result));
  } else {
    TORCH_CHECK(!updating, "virtual NPU: ", info.name, " allocates its results, so it cannot update a captured task: "
                "the graph would not see the new memory. Use the form with out= arguments");
    run(info, stack);
    if (!info.only_writes)
      for (const IValue& result : stack) call->outputs.push_back(graph_alias(result));
  }
  vnpu_record([call] { replay(*call); }, info.name.c_str());
}

}  // namespace vnpu
