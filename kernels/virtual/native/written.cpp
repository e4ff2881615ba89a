// Which ranges of device memory have changed since somebody began to watch them. Everything that writes to
// device memory says so: the boxed kernel for its results and written arguments, copies, memsets, freeing,
// and collectives.
#include "written.h"

#include <map>
#include <memory>
#include <mutex>

namespace {

struct Watch {
  uintptr_t end;
  std::atomic<bool> changed{false};
};

std::mutex mutex;
std::multimap<uintptr_t, std::unique_ptr<Watch>> watches;  // by start address
size_t longest = 0;

}  // namespace

namespace vnpu {

std::atomic<int> watching{0};

std::atomic<bool>* watch(const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  std::lock_guard<std::mutex> lock(mutex);
  auto made = std::make_unique<Watch>();
  made->end = begin + bytes;
  longest = std::max(longest, bytes);
  auto at = watches.emplace(begin, std::move(made));
  ++watching;
  return &at->second->changed;
}

void unwatch(std::atomic<bool>* changed) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto at = watches.begin(); at != watches.end(); ++at) {
    if (&at->second->changed != changed) continue;
    watches.erase(at);
    --watching;
    return;
  }
}

void mark_written(const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory), end = begin + bytes;
  std::lock_guard<std::mutex> lock(mutex);
  // A watch that reaches into the range begins less than the longest watch before it.
  for (auto at = watches.lower_bound(begin > longest ? begin - longest : 0); at != watches.end() && at->first < end; ++at)
    if (at->second->end > begin) at->second->changed = true;
}

}  // namespace vnpu
