// Which replays of graphs a stream, an event or the host comes after. All work is done when its call returns, so nobody
// waits here: this finds what on a device would be a race.
#pragma once

#include <cstdint>
#include <map>

namespace vnpu {

struct Stream;
struct Event;

struct Replay {
  int64_t stream = 0;
  uint64_t number = 0;  // 0: there was none
};

using Behind = std::map<int64_t, uint64_t>;  // by stream, the newest replay on it that is over by then

Replay replay_on(Stream* stream);
void record_order(Event* event, const Stream* stream);
void wait_order(Stream* stream, const Event* event);
void host_waited(const Stream* stream);
void host_waited(const Event* event);
void host_waited_for_device(int device);
// Whether what is put on the stream now runs after that replay.
bool comes_after(const Stream* stream, const Replay& replay);

}  // namespace vnpu
