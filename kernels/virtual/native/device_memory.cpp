// "Device" memory is anonymous host memory, committed when first written. Each device counts what this
// process took from it, so that running out of HBM is a true out-of-memory error.
#include <acl/acl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "state.h"
#include "written.h"

namespace {

struct Block {
  size_t bytes;
  int device;          // -1: pinned host memory
  bool capture = false;  // allocated inside a graph capture, so it belongs to a graph's private pool
};

std::mutex mutex;
std::map<uintptr_t, Block> blocks;  // by start address
uint64_t used[vnpu::kMaxDevices];

const Block* find_block(const void* ptr) {  // with the mutex held
  auto it = blocks.upper_bound(reinterpret_cast<uintptr_t>(ptr));
  if (it == blocks.begin()) return nullptr;
  --it;
  return reinterpret_cast<uintptr_t>(ptr) < it->first + it->second.bytes ? &it->second : nullptr;
}

bool is_device(const void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  const Block* block = find_block(ptr);
  return block != nullptr && block->device >= 0;
}

int allocate(void** ptr, size_t bytes) {
  const int device = vnpu_device();
  std::lock_guard<std::mutex> lock(mutex);
  if (bytes == 0) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: cannot allocate 0 bytes");
  if (used[device] + bytes > vnpu::config().hbm_bytes)
    return vnpu_fail(VNPU_OUT_OF_MEMORY, "virtual NPU: %zu bytes asked, %llu of %llu bytes of device %d in use", bytes,
                     static_cast<unsigned long long>(used[device]),
                     static_cast<unsigned long long>(vnpu::config().hbm_bytes), device);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    return vnpu_fail(VNPU_OUT_OF_MEMORY, "virtual NPU: the host has no %zu bytes left", bytes);
  blocks[reinterpret_cast<uintptr_t>(memory)] = {bytes, device, vnpu_capturing()};
  used[device] += bytes;
  *ptr = memory;
  return ACL_SUCCESS;
}

void set(void* ptr, int value, size_t bytes) {
  memset(ptr, value, bytes);
  vnpu::written(ptr, bytes);
}

int copy(void* dst, size_t dst_bytes, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > dst_bytes)
    return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: copy of %zu bytes into %zu bytes", bytes, dst_bytes);
  const bool to_host = kind == ACL_MEMCPY_DEVICE_TO_HOST || (kind == ACL_MEMCPY_DEFAULT && !is_device(dst));
  if (to_host) vnpu::count_sync(vnpu::Sync::kCopyToHost);
  if (vnpu_capturing()) {
    if (to_host || kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_HOST)
      return vnpu::refuse_in_capture("a copy between host and device");
    const auto move = [=] {
      memmove(dst, src, bytes);
      vnpu::written(dst, bytes);
    };
    vnpu_record(move, "aclrtMemcpyAsync");
    return ACL_SUCCESS;
  }
  memmove(dst, src, bytes);
  vnpu::written(dst, bytes);
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

int vnpu_is_device_memory(const void* ptr) { return is_device(ptr) ? 1 : 0; }

// True for memory of a graph's private pool: its content means nothing outside the graph, and it stays
// allocated for as long as the graph can be replayed.
int vnpu_is_capture_memory(const void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  const Block* block = find_block(ptr);
  return block != nullptr && block->capture ? 1 : 0;
}

// Zeroes memory of a device without committing it: whole pages are given back to the kernel, which hands
// out zero pages on the next touch. This lets a KV cache be larger than the host's memory until it is used.
int vnpu_zero(void* ptr, size_t bytes) {
  vnpu::written(ptr, bytes);
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(ptr), end = begin + bytes;
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (!is_device(ptr) || last <= first || madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) != 0) {
    memset(ptr, 0, bytes);
    return ACL_SUCCESS;
  }
  memset(ptr, 0, first - begin);
  memset(reinterpret_cast<void*>(last), 0, end - last);
  return ACL_SUCCESS;
}

aclError aclrtMalloc(void** ptr, size_t bytes, aclrtMemMallocPolicy) { return allocate(ptr, bytes); }
aclError aclrtMallocAlign32(void** ptr, size_t bytes, aclrtMemMallocPolicy) { return allocate(ptr, bytes); }

aclError aclrtFree(void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = blocks.find(reinterpret_cast<uintptr_t>(ptr));
  if (it == blocks.end() || it->second.device < 0)
    return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: %p is not the start of device memory", ptr);
  used[it->second.device] -= it->second.bytes;
  vnpu::written(ptr, it->second.bytes);
  munmap(ptr, it->second.bytes);
  blocks.erase(it);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** ptr, size_t bytes) {
  if (posix_memalign(ptr, 64, bytes) != 0) return vnpu_fail(VNPU_OUT_OF_MEMORY, "virtual NPU: the host has no %zu bytes left", bytes);
  std::lock_guard<std::mutex> lock(mutex);
  blocks[reinterpret_cast<uintptr_t>(*ptr)] = {bytes, -1};
  return ACL_SUCCESS;
}
aclError aclrtMallocHostWithCfg(void** ptr, uint64_t bytes, aclrtMallocConfig*) { return aclrtMallocHost(ptr, bytes); }

aclError aclrtFreeHost(void* ptr) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(reinterpret_cast<uintptr_t>(ptr));
  }
  free(ptr);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* ptr, aclrtPtrAttributes* out) {
  memset(out, 0, sizeof *out);
  std::lock_guard<std::mutex> lock(mutex);
  const Block* block = find_block(ptr);
  out->location.type = block == nullptr      ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                       : block->device < 0 ? ACL_MEM_LOCATION_TYPE_HOST
                                           : ACL_MEM_LOCATION_TYPE_DEVICE;
  out->location.id = block != nullptr && block->device >= 0 ? static_cast<uint32_t>(block->device) : 0;
  out->pageSize = 4096;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = vnpu::config().hbm_bytes;
  *free = *total - used[vnpu_device()];
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* dst, size_t dst_bytes, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (vnpu_capturing()) return vnpu::refuse_in_capture("a synchronous copy");
  return copy(dst, dst_bytes, src, bytes, kind);
}

aclError aclrtMemcpyAsync(void* dst, size_t dst_bytes, const void* src, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
  return copy(dst, dst_bytes, src, bytes, kind);
}

aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t dst_bytes, const void* src, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream) {
  return copy(dst, dst_bytes, src, bytes, kind);
}

aclError aclrtMemset(void* ptr, size_t, int32_t value, size_t bytes) {
  if (vnpu_capturing()) return vnpu::refuse_in_capture("a synchronous memset");
  if (value == 0) return vnpu_zero(ptr, bytes);
  set(ptr, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* ptr, size_t, int32_t value, size_t bytes, aclrtStream) {
  if (vnpu_capturing()) vnpu_record([=] { set(ptr, value, bytes); }, "aclrtMemsetAsync");
  set(ptr, value, bytes);
  return ACL_SUCCESS;
}

}  // extern "C"
