// State of the virtual devices, shared by the runtime's own files (HCCL needs only vnpu.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "order.h"
#include "vnpu.h"

namespace vnpu {

constexpr int kMaxDevices = 64;

// Filled once by vnpu_configure before torch_npu is imported (values from settings.py).
struct Config {
  std::string soc = "Ascend910B3";
  int count = 8;
  uint64_t hbm_bytes = 64ull << 30;
  int64_t cube_cores = 20;
  int64_t vector_cores = 40;
  int64_t l2_bytes = 192ll << 20;
  bool null_mode = false;
};
Config& config();

// Physical device numbers this process may use, in order (ASCEND_RT_VISIBLE_DEVICES).
const std::vector<int>& visible_devices();

struct Graph;

struct Stream {
  int id;
  int device;
  Graph* capture = nullptr;  // the open capture that this stream takes part in
  Behind behind;
};

struct Event {
  uint32_t flags = 0;
  std::atomic<bool> recorded{false};
  std::atomic<int64_t> nanoseconds{0};
  Graph* capture = nullptr;  // recorded inside this open capture
  Behind behind;
};

int64_t now_ns();
Stream* stream_of(void* handle);  // null means the default stream of this thread's device

// Counts what would make the host wait for the device; see counters.py.
enum class Sync { kStream, kDevice, kEvent, kCopyToHost, kCount };
void count_sync(Sync kind);

// Refuses a call that a device refuses while a capture is open on this thread. Returns an ACL code.
int refuse_in_capture(const char* what);

}  // namespace vnpu
