// The order of replays, kept as vector clocks (L. Lamport 1978, C. Fidge 1988) that only replays advance: a stream comes
// after its own replays and after those behind which an event lay that it waited for, and the host's next call comes after
// all that the host has waited for.
#include "order.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "state.h"

namespace {

using vnpu::Behind;

std::mutex order_mutex;
std::atomic<uint64_t> replays{0};  // so far, on all streams
Behind host;
Behind newest;  // of all streams

int64_t key_of(const vnpu::Stream* stream) {  // default streams have the number 0 on each device
  return static_cast<int64_t>(stream->device) << 32 | stream->id;
}

void merge(Behind& into, const Behind& from) {
  for (const auto& [stream, number] : from) {
    uint64_t& known = into[stream];
    known = std::max(known, number);
  }
}

bool holds(const Behind& behind, const vnpu::Replay& replay) {
  const auto found = behind.find(replay.stream);
  return found != behind.end() && found->second >= replay.number;
}

}  // namespace

namespace vnpu {

Replay replay_on(Stream* stream) {
  std::lock_guard<std::mutex> lock(order_mutex);
  const Replay made{key_of(stream), ++replays};
  stream->behind[made.stream] = newest[made.stream] = made.number;
  return made;
}

void record_order(Event* event, const Stream* stream) {
  if (replays == 0) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  event->behind = stream->behind;
  merge(event->behind, host);
}

void wait_order(Stream* stream, const Event* event) {
  if (replays == 0) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  merge(stream->behind, event->behind);
}

void host_waited(const Stream* stream) {
  if (replays == 0) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  merge(host, stream->behind);
}

void host_waited(const Event* event) {
  if (replays == 0) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  merge(host, event->behind);
}

void host_waited_for_device(int device) {
  std::lock_guard<std::mutex> lock(order_mutex);
  for (const auto& [stream, number] : newest)
    if (stream >> 32 == device) host[stream] = number;
}

bool comes_after(const Stream* stream, const Replay& replay) {
  std::lock_guard<std::mutex> lock(order_mutex);
  return holds(stream->behind, replay) || holds(host, replay);
}

}  // namespace vnpu
