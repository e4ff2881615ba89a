// CPU tensors over npu memory, and npu tensors over memory that CPU kernels made.
#include <ATen/core/TensorBody.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "aten_call.h"
#include "torch_npu/csrc/core/NPUStorageImpl.h"
#include "vnpu.h"

extern "C" int vnpu_is_capture_memory(const void* memory);

namespace vnpu {

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

void drop_storage(void* context) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context)); }

c10::DataPtr borrowed(const c10::Storage& storage, c10::Device device) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  return {impl->mutable_data(), impl, &drop_storage, device};
}

// torch_npu reads shape, format and dtype of a tensor's memory from its storage.
void describe(c10::StorageImpl* storage, const at::Tensor& tensor) {
  auto& desc = static_cast<torch_npu::NPUStorageImpl*>(storage)->npu_desc_;
  desc.base_sizes_.assign(tensor.sizes().begin(), tensor.sizes().end());
  desc.storage_sizes_ = desc.base_sizes_;
  desc.base_strides_.assign(tensor.strides().begin(), tensor.strides().end());
  desc.origin_format_ = desc.npu_format_ = ACL_FORMAT_ND;
  desc.data_type_ = tensor.dtype();
}

at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKeySet keys) {
  const c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys | (like.key_set() & lazy), like.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

// A view is an inference tensor exactly when its base is one, whatever mode the thread is in (a normal one in
// inference mode shares its base's version counter), so it takes the base's dispatch keys as they are.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  const c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         (base.key_set() - lazy) | (like.key_set() & lazy), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

}  // namespace

c10::Storage cpu_storage(const c10::Storage& npu, bool owns) {
  auto data = owns ? borrowed(npu, c10::kCPU) : c10::DataPtr(npu.mutable_data(), c10::kCPU);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), npu.nbytes(), std::move(data),
                                               c10::GetCPUAllocator(), /*resizable=*/true);
}

bool in_graph_pool(const c10::Storage& npu) { return vnpu_is_capture_memory(npu.data()) != 0; }

at::Tensor cpu_alias(const at::Tensor& npu, const c10::Storage& storage) {
  return tensor_over(storage, npu, c10::DispatchKeySet(c10::DispatchKey::CPU));
}

c10::DeviceIndex Aliases::device() const {
  return device_ >= 0 ? device_ : static_cast<c10::DeviceIndex>(vnpu_device());
}

at::Tensor Aliases::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().type() != kNpu) {
    cpu_inputs_.push_back(tensor.unsafeGetTensorImpl());
    return tensor;
  }
  for (const Alias& alias : list_)
    if (alias.npu.is_same(tensor)) return alias.cpu;
  if (device_ < 0) device_ = tensor.device().index();
  const c10::Storage& original = tensor.storage();
  const c10::Storage* storage = nullptr;
  for (const auto& [cpu, npu] : storages_)
    if (npu.unsafeGetStorageImpl() == original.unsafeGetStorageImpl()) storage = &cpu;
  if (storage == nullptr) {
    storages_.emplace_back(cpu_storage(original, !for_graph || !in_graph_pool(original)), original);
    storage = &storages_.back().first;
  }
  list_.push_back({tensor, cpu_alias(tensor, *storage)});
  return list_.back().cpu;
}

IValue Aliases::to_cpu(const IValue& value) {
  if (value.isTensor()) return to_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(value.toListRef().size());
    for (const IValue& item : value.toListRef()) list.push_back(to_cpu(item.toTensor()));
    return list;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList() && !value.isSymIntList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const IValue item = list.get(i);
      if (item.isTensor()) list.set(i, to_cpu(item.toTensor()));
    }
    return list;
  }
  if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    if (device.type() == kNpu) {
      if (device.has_index()) device_ = device.index();
      return c10::Device(c10::kCPU);
    }
    explicit_cpu_ |= device.is_cpu();
  }
  return value;
}

void Aliases::replace_inputs(const OpInfo& info, Stack& stack) {
  const size_t first = stack.size() - info.inputs;
  for (size_t i = first; i < stack.size(); ++i) {
    IValue& value = stack[i];
    if (value.isTensor() || value.isList() || value.isDevice()) value = to_cpu(value);
  }
  if (info.generator >= 0 && !for_graph) {
    IValue& value = stack[first + static_cast<size_t>(info.generator)];
    const at::Generator given = value.isNone() ? at::Generator() : value.toGenerator();
    if (!given.defined() || given.device().type() == kNpu) value = cpu_generator(given, device());
  }
}

c10::Storage Aliases::npu_storage(const at::Tensor& result) {
  const c10::Storage& cpu = result.storage();
  for (const auto& [known, npu] : storages_)
    if (known.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return npu;
  const c10::Device target(kNpu, device());
  c10::StorageImpl* impl = cpu.unsafeGetStorageImpl();
  c10::DataPtr data;
  if (cpu.use_count() == 1 && on_device_memory(*impl)) {
    // Nobody else sees this memory: hand the block itself over, with torch_npu's own deleter.
    c10::DataPtr old = impl->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU));
    void* memory = old.release_context();
    data = {memory, memory, c10::GetAllocator(kNpu)->raw_deleter(), target};
  } else {
    data = borrowed(cpu, target);
  }
  auto storage = c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(cpu.nbytes()),
                                        std::move(data), c10::GetAllocator(kNpu), /*resizable=*/true, target);
  describe(storage.get(), result);
  c10::Storage wrapped(std::move(storage));
  storages_.emplace_back(cpu, wrapped);
  return wrapped;
}

at::Tensor Aliases::to_npu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  for (const Alias& alias : list_)
    if (alias.cpu.unsafeGetTensorImpl() == impl) return alias.npu;
  for (const c10::TensorImpl* input : cpu_inputs_)
    if (input == impl) return tensor;
  TORCH_CHECK(tensor.layout() == c10::kStrided, "virtual NPU: results with layout ", tensor.layout(), " are not supported");
  const c10::Storage storage = npu_storage(tensor);
  for (const Alias& alias : list_)
    if (alias.npu.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return view_of(alias.npu, tensor);
  return tensor_over(storage, tensor, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
}

IValue Aliases::to_npu(IValue value) {
  if (value.isTensor()) return to_npu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, to_npu(list.get(i)));
  }
  return value;
}

void Aliases::replace_outputs(Stack& stack) {
  if (explicit_cpu_) return;
  for (IValue& value : stack) value = to_npu(std::move(value));
}

void Aliases::write_back() {
  for (const auto& [cpu, npu] : storages_) {
    if (cpu.data() == npu.data() && cpu.nbytes() == npu.nbytes()) continue;
    c10::StorageImpl* to = npu.unsafeGetStorageImpl();
    to->set_data_ptr_noswap(borrowed(cpu, npu.device()));
    to->set_nbytes(cpu.nbytes());
  }
  for (const Alias& alias : list_) {
    if (alias.npu.sizes() == alias.cpu.sizes() && alias.npu.strides() == alias.cpu.strides() &&
        alias.npu.storage_offset() == alias.cpu.storage_offset())
      continue;
    alias.npu.unsafeGetTensorImpl()->set_sizes_and_strides(alias.cpu.sizes(), alias.cpu.strides(),
                                                           alias.cpu.storage_offset());
    describe(alias.npu.storage().unsafeGetStorageImpl(), alias.npu);
  }
}

}  // namespace vnpu
