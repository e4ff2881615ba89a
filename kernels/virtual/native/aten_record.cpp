// Graph capture: an operation runs once, which makes its result tensors, and is recorded with its CPU
// arguments and results. A replay runs the CPU kernel again and copies results into the same memory.
#include <ATen/ATen.h>

#include <memory>
#include <unordered_set>

#include "aten_call.h"
#include "graph.h"
#include "vnpu.h"

namespace vnpu {

namespace {

struct Recorded {
  const OpInfo* info;
  Stack inputs;   // CPU arguments, except generators, which are drawn anew at each replay
  Stack outputs;  // CPU tensors over the result tensors' memory
  at::Generator generator;
  c10::DeviceIndex device;
};

void copy_result(const IValue& from, const IValue& to) {
  if (from.isTensor()) {
    const at::Tensor &source = from.toTensor(), &target = to.toTensor();
    if (!source.defined() || source.data_ptr() == target.data_ptr()) return;
    TORCH_CHECK(source.sizes() == target.sizes(), "a replay gave shape ", source.sizes(), ", captured was ", target.sizes());
    target.copy_(source);
  } else if (from.isTensorList()) {
    const auto sources = from.toTensorVector(), targets = to.toTensorVector();
    for (size_t i = 0; i < sources.size(); ++i) copy_result(sources[i], targets[i]);
  }
}

void replay(const Recorded& call) {
  Stack stack = call.inputs;
  if (call.info->generator >= 0)
    stack[static_cast<size_t>(call.info->generator)] = cpu_generator(call.generator, call.device);
  c10::InferenceMode inference;
  DeviceMemory memory(true);
  run_cpu(*call.info, stack);
  for (size_t i = 0; i < stack.size(); ++i) copy_result(stack[i], call.outputs[i]);
}

}  // namespace

void run_recorded(const OpInfo& info, Stack& stack) {
  run(info, stack);
}

bool run_null(const OpInfo&, Stack&) { return false; }

}  // namespace vnpu
