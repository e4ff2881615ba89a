// Lets CPU kernels take their memory from torch_npu's caching allocator while they work for the virtual
// NPU, so that torch.npu's memory statistics and out-of-memory errors are those of a device.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include "aten_call.h"

namespace vnpu {

namespace {

constexpr size_t kScalarBytes = 16;
thread_local bool active = false;

c10::Allocator* device_allocator() {
  static c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return allocator;
}

void free_device(void* memory) { device_allocator()->raw_deallocate(memory); }

class BorrowingAllocator final : public c10::Allocator {
 public:
  explicit BorrowingAllocator(c10::Allocator* host) : host_(host) {}

  c10::DataPtr allocate(size_t bytes) override {
    // A scalar that a kernel wraps into a tensor is no device memory.
    if (!active || bytes <= kScalarBytes) return host_->allocate(bytes);
    void* memory = device_allocator()->raw_allocate(bytes);
    return {memory, memory, &free_device, c10::kCPU};
  }

  // Frees what raw_allocate handed out as a plain pointer, whoever it came from.
  c10::DeleterFnPtr raw_deleter() const override { return &raw_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { host_->copy_data(to, from, bytes); }

  c10::Allocator* host() const { return host_; }
  static void raw_free(void* memory);

 private:
  c10::Allocator* host_;
};

BorrowingAllocator* installed = nullptr;

}  // namespace

extern "C" int vnpu_is_device_memory(const void* memory);

void BorrowingAllocator::raw_free(void* memory) {
  if (vnpu_is_device_memory(memory) != 0)
    free_device(memory);
  else
    installed->host()->raw_deallocate(memory);
}

void install_allocator() {
  installed = new BorrowingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(installed, /*priority=*/1);
}

bool on_device_memory(const c10::StorageImpl& storage) { return storage.data_ptr().get_deleter() == &free_device; }

DeviceMemory::DeviceMemory(bool on) : before_(active) { active = on; }
DeviceMemory::~DeviceMemory() { active = before_; }

}  // namespace vnpu
