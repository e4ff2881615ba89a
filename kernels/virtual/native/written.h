// See written.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace vnpu {

extern std::atomic<int> watching;  // number of watches

// Returns a flag that becomes true when anything in the range is written (or freed) from now on.
std::atomic<bool>* watch(const void* memory, size_t bytes);
void unwatch(std::atomic<bool>* changed);

void mark_written(const void* memory, size_t bytes);
// For everyone who writes to device memory, before or after the fact.
inline void written(const void* memory, size_t bytes) {
  if (watching.load(std::memory_order_relaxed) != 0 && bytes != 0) mark_written(memory, bytes);
}

}  // namespace vnpu
