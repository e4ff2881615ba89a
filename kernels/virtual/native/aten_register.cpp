// Puts the boxed kernel on PrivateUse1 for every operation that a CPU kernel can serve.
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <memory>
#include <unordered_set>

#include "aten_call.h"
#include "aten_fast.h"
#include "aten_format.h"
#include "vnpu.h"

extern "C" int vnpu_waiting();

namespace vnpu {

namespace {

using c10::DispatchKey;

// Operations that only touch metadata, or manage npu memory: torch_npu's own are right as they are (but
// for zeros, see below).
const std::unordered_set<std::string>& kept() {
  static const std::unordered_set<std::string> names = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty_strided",
      "aten::as_strided", "aten::as_strided_", "aten::view", "aten::view.dtype", "aten::_reshape_alias", "aten::set_",
      "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
      "aten::resize_", "aten::unfold", "aten::alias", "aten::detach", "aten::record_stream", "aten::is_pinned",
      "aten::_pin_memory", "aten::view_as_real", "aten::view_as_complex", "aten::_lazy_clone", "aten::zeros",
      "npu::empty_with_format", "npu::unsafe_empty_with_format", "npu::get_npu_format", "npu::npu_format_cast",
      "npu::npu_format_cast.acl_format", "npu::npu_format_cast_", "npu::npu_format_cast_.acl_format",
      "npu::_npu_format_cast", "npu::_npu_format_cast.aclnn", "npu::copy_memory_", "npu::get_storage_size",
      "npu::_npu_storage_resize", "npu::npu_prefetch", "npu::set_op_timeout_ms", "npu::npu_change_data_ptr",
  };
  return names;
}

bool one_of(const std::string& name, std::initializer_list<const char*> list) {
  for (const char* item : list)
    if (name == item) return true;
  return false;
}

std::deque<OpInfo>& infos() {
  static std::deque<OpInfo> list;
  return list;
}

struct Boxed final : c10::OperatorKernel {
  explicit Boxed(OpInfo* info) : info(info) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    info->calls.fetch_add(1, std::memory_order_relaxed);
    if (stack->size() == info->inputs) return call(*stack);
    // A caller's own values lie below the arguments: leave them alone.
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(info->inputs);
    Stack own(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
    call(own);
    for (IValue& value : own) stack->push_back(std::move(value));
  }
  void call(Stack& stack) const {
    if (vnpu_waiting() != 0) refuse_behind_waiting_replay(*info);
    if (vnpu_capturing())
      run_recorded(*info, stack);
    else if (!vnpu_null_mode() || !run_null(*info, stack))
      run(*info, stack);
  }
  OpInfo* info;
};

class Quiet : public c10::WarningHandler {  // "overriding a previously registered kernel": that is the purpose
  void process(const c10::Warning&) override {}
};

// torch_npu's own asks for a format that no device has; ours also lets a large piece stay uncommitted.
at::Tensor zeros(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return at::empty_symint(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

bool wanted(const c10::OperatorHandle& op, const std::string& ns) {
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1)) return true;
  return ns == "aten" && op.hasKernelForDispatchKey(DispatchKey::CPU);
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) : op(op), name(toString(op.operator_name())) {
  const c10::FunctionSchema& schema = op.schema();
  inputs = schema.arguments().size();
  reference = name.rfind("aten::", 0) != 0;
  for (size_t i = 0; i < inputs; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) written.push_back(i);
    const std::string type = argument.type()->str();
    if (type.rfind("Generator", 0) == 0) generator = static_cast<int>(i);
    if (reference && argument.name() == "out" && type == "Tensor[]") out_list = static_cast<int>(i);
  }
  mutates = !written.empty();
  only_writes = mutates;
  for (const c10::Argument& result : schema.returns()) {
    only_writes &= result.alias_info() != nullptr && result.alias_info()->isWrite();
    view |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
  }
  if (out_list >= 0) {
    mutates = only_writes = true;
    written.push_back(static_cast<size_t>(out_list));
  }
  fast = fast::find(name);
  if (name == "aten::linear") product = Multiply::kLinear;
  if (one_of(name, {"aten::mm", "aten::matmul"})) product = Multiply::kMatmul;
  if (name == "aten::addmm") product = Multiply::kAddMm;
  copy = one_of(name, {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"});
  waits = one_of(name, {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select",
                        "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                        "aten::is_nonzero", "aten::item", "aten::repeat_interleave.Tensor"});
  zero = name == "aten::zero_";
  index = name == "aten::index.Tensor";
  pointwise = op.hasTag(at::Tag::pointwise) && schema.returns().size() == 1;
  const std::string stem = name.substr(0, name.find('.'));
  predicate = one_of(stem, {"aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::isnan",
                            "aten::isinf", "aten::isposinf", "aten::isneginf", "aten::signbit", "aten::logical_and",
                            "aten::logical_or", "aten::logical_xor", "aten::logical_not"});
}

}  // namespace vnpu

extern "C" {

// Registers everything; called once by boot.py when torch_npu is loaded. Returns the number of operations.
int vnpu_install_kernels() {
  using namespace vnpu;
  static std::deque<torch::Library> libraries;
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard silence(&quiet);
  install_allocator();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const char* ns : {"aten", "npu", "atb"}) {
    libraries.emplace_back(torch::Library::IMPL, ns, DispatchKey::PrivateUse1, __FILE__, __LINE__);
    torch::Library& library = libraries.back();
    libraries.emplace_back(torch::Library::IMPL, ns, DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
    torch::Library& autograd = libraries.back();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != ns) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value()) continue;
      const std::string full = toString(name);
      const std::string local = full.substr(strlen(ns) + 2);
      // torch_npu answers these on its autograd key by calling its own C++ directly; let them come down here.
      if (strcmp(ns, "aten") == 0 && op->hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1))
        autograd.impl(local.c_str(), torch::CppFunction::makeFallthrough());
      if (!wanted(*op, ns) || kept().count(full) != 0) continue;
      infos().emplace_back(*op);
      library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Boxed>(&infos().back())));
    }
  }
  libraries.emplace_back(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  libraries.back().impl("zeros", TORCH_FN(zeros));
  libraries.emplace_back(torch::Library::IMPL, "npu", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  libraries.back().impl("npu_format_cast", TORCH_FN(format_cast));
  return static_cast<int>(infos().size());
}

// Counts by operation, for counters.py.
size_t vnpu_op_count() { return vnpu::infos().size(); }
const char* vnpu_op_name(size_t index) { return vnpu::infos()[index].name.c_str(); }
uint64_t vnpu_op_calls(size_t index) { return vnpu::infos()[index].calls.load(); }
uint64_t vnpu_op_fast_runs(size_t index) { return vnpu::infos()[index].fast_runs.load(); }
void vnpu_reset_op_calls() {
  for (vnpu::OpInfo& info : vnpu::infos()) {
    info.calls.store(0);
    info.fast_runs.store(0);
  }
}

}  // extern "C"
