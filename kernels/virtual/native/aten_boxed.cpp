// One call of the boxed kernel.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "aten_call.h"
#include "vnpu.h"
#include "written.h"

extern "C" void vnpu_copied_to_host(const void* stream);
extern "C" int vnpu_zero(void* memory, size_t bytes);

namespace vnpu {

namespace {

// torch.device("npu") as a context manager and torch function modes must not reach into a reference.
class NoTorchFunction {
 public:
  NoTorchFunction() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~NoTorchFunction() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

 private:
  at::impl::TorchFunctionDisabledState before_;
};

void run_kernel(const OpInfo& info, Stack& stack) {
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  // Composite CPU kernels call further operations, which must not reach autograd or Python modes again.
  static const c10::DispatchKeySet above =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  c10::impl::ExcludeDispatchKeyGuard guard(above);
  const bool done = info.fast != nullptr              ? info.fast(info, stack)
                    : info.product != Multiply::kNone && run_packed(info, stack);
  if (done) {
    info.fast_runs.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (info.reference) {
    TORCH_CHECK_NOT_IMPLEMENTED(info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                                "virtual NPU: no reference kernel for ", info.name);
    NoTorchFunction plain;
    info.op.redispatchBoxed(cpu, &stack);
    return;
  }
  info.op.redispatchBoxed(cpu, &stack);
}

// Whether the host goes on while aten::_to_copy brings a tensor to it: torch_npu puts the result of a copy that
// need not block into pinned memory (its _to_copy).
bool to_goes_on(const OpInfo& info, const Stack& stack) {
  constexpr size_t kInputs = 7, kNonBlocking = 5;
  return info.inputs == kInputs && stack[stack.size() - kInputs + kNonBlocking].toBool();
}

}  // namespace

bool leaves_device(const OpInfo& info, const Stack& stack) {
  if (info.waits) return true;
  if (info.index) {  // a mask is turned into positions, whose number only the device knows
    for (const IValue& item : stack.back().toListRef())
      if (item.isTensor() && item.toTensor().defined() &&
          (item.toTensor().scalar_type() == c10::kBool || item.toTensor().scalar_type() == c10::kByte))
        return true;
    return false;
  }
  if (!info.copy) return false;
  const IValue& to = stack[stack.size() - info.inputs];
  if (!to.isTensor() || !to.toTensor().device().is_cpu()) return false;
  // copy_ into a CPU tensor: the host goes on at once only if it asked for that and the memory is pinned
  return !(stack.back().isBool() && stack.back().toBool() && to.toTensor().is_pinned());
}

void note_written(const IValue& value) {
  if (watching.load(std::memory_order_relaxed) == 0) return;
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) note_written(tensor);
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& tensor = value.toTensor();
  if (tensor.numel() == 0 || !tensor.is_cpu() || !tensor.has_storage()) return;
  // From its first element to the end of its memory: more than it writes does no harm.
  const size_t before = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  written(tensor.const_data_ptr(), tensor.storage().nbytes() - before);
}

void run_cpu(const OpInfo& info, Stack& stack) {
  for (size_t i : info.written) note_written(stack[i]);
  run_kernel(info, stack);
  if (!info.view)
    for (const IValue& value : stack) note_written(value);
}

// Zeroing a large piece of memory gives its pages back instead of touching them: a KV cache may then be
// larger than the memory of this machine until it is really filled.
bool zero_pages(const Stack& stack) {
  constexpr size_t kWorthIt = 1 << 20;
  const at::Tensor& tensor = stack.back().toTensor();
  if (tensor.nbytes() < kWorthIt || !tensor.is_non_overlapping_and_dense()) return false;
  return vnpu_zero(tensor.mutable_data_ptr(), tensor.nbytes()) == 0;
}

void run(const OpInfo& info, Stack& stack) {
  if (info.zero && zero_pages(stack)) return;
  if (leaves_device(info, stack)) vnpu_copied_to_host(current_stream());
  Aliases aliases;
  aliases.replace_inputs(info, stack);
  if (aliases.results_stay_on_cpu() && info.copy && !to_goes_on(info, stack)) vnpu_copied_to_host(current_stream());
  {
    c10::OptionalDeviceGuard guard;
    if (aliases.device() != vnpu_device()) guard.reset_device(c10::Device(c10::DeviceType::PrivateUse1, aliases.device()));
    DeviceMemory memory(!aliases.results_stay_on_cpu());
    run_cpu(info, stack);
  }
  if (info.mutates) aliases.write_back();  // before results are given memory that arguments do not have
  aliases.replace_outputs(stack);
}

}  // namespace vnpu
