// Storage formats of weights: an NZ weight keeps its elements row by row here and is marked, so that an operator
// that reads it in NZ can refuse one that nobody cast.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "aten_format.h"
#include "torch_npu/csrc/core/NPUStorageImpl.h"

namespace vnpu {

namespace {

std::mutex mutex;
// Every storage that was cast, by its memory. A storage that is gone has left its place to another one.
std::unordered_map<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>> casts;

at::Tensor empty_like_in(const at::Tensor& x, int64_t format) {
  // torch_npu decides: without torch.npu.config.allow_internal_format it makes ND, with a warning.
  static const auto empty = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("npu::unsafe_empty_with_format", "")
                                .typed<at::Tensor(at::IntArrayRef, std::optional<at::ScalarType>, std::optional<at::Layout>,
                                                  std::optional<at::Device>, std::optional<bool>, int64_t, bool)>();
  return empty.call(x.sizes(), x.scalar_type(), std::nullopt, x.device(), std::nullopt, format, false);
}

}  // namespace

at::Tensor format_cast(const at::Tensor& x, int64_t format, std::optional<int64_t> customize_dtype,
                       std::optional<int64_t> input_dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(format == ACL_FORMAT_ND || format == ACL_FORMAT_FRACTAL_NZ,
                              "virtual NPU: npu_format_cast to format ", format, ", only ND (2) and FRACTAL_NZ (29)");
  TORCH_CHECK_NOT_IMPLEMENTED(!customize_dtype.has_value() && !input_dtype.has_value(),
                              "virtual NPU: npu_format_cast with a dtype of its own");
  TORCH_CHECK(x.is_contiguous(), "virtual NPU: npu_format_cast of a tensor that is not contiguous");
  at::Tensor out = empty_like_in(x, format);
  out.copy_(x);
  c10::StorageImpl* storage = out.storage().unsafeGetStorageImpl();
  std::lock_guard<std::mutex> lock(mutex);
  casts.insert_or_assign(storage->data(), c10::weak_intrusive_ptr<c10::StorageImpl>(out.storage().getWeakStorageImpl()));
  return out;
}

}  // namespace vnpu

extern "C" {

// The format of npu memory that begins here.
int vnpu_format_of(const void* memory) {
  std::lock_guard<std::mutex> lock(vnpu::mutex);
  const auto found = vnpu::casts.find(memory);
  if (found == vnpu::casts.end()) return ACL_FORMAT_ND;
  const auto storage = found->second.lock();
  if (!storage || storage->data() != memory) {
    vnpu::casts.erase(found);
    return ACL_FORMAT_ND;
  }
  return static_cast<torch_npu::NPUStorageImpl*>(storage.get())->npu_desc_.npu_format_;
}

}  // extern "C"
