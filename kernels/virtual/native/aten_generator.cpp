// Random numbers. An npu generator is a seed and an offset, as on the device; the numbers come from a CPU
// generator seeded from both. So the state of a generator can be saved and restored, and a graph's replay
// draws new numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/GeneratorImpl.h>

#include "aten_call.h"

namespace vnpu {

namespace {

constexpr uint64_t kStep = 4;  // philox offsets advance in fours

uint64_t mix(uint64_t seed, uint64_t offset) {
  if (offset == 0) return seed;  // the first draw after manual_seed equals the CPU's
  uint64_t value = seed ^ (offset * 0x9e3779b97f4a7c15ull);  // splitmix64's increment and finalizer
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator cpu_generator(const at::Generator& given, c10::DeviceIndex device) {
  // During a capture torch_npu lends no random state; what is drawn now is never seen, replays draw again.
  if (on_captured_stream()) return at::detail::createCPUGenerator(0);
  at::Generator npu = given.defined()
                          ? given
                          : at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::PrivateUse1, device));
  std::lock_guard<std::mutex> lock(npu.mutex());
  const uint64_t offset = npu.get_offset();
  at::Generator cpu = at::detail::createCPUGenerator(mix(npu.current_seed(), offset));
  npu.set_offset(offset + kStep);
  return cpu;
}

}  // namespace vnpu
