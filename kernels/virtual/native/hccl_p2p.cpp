#include "hccl_p2p.h"

#include <string.h>

#include <algorithm>

#include "hccl_reduce.h"
#include "vnpu.h"
#include "written.h"

namespace {

// What stands in front of each message in the ring.
struct Announcement {
  uint64_t count;
  uint32_t type;
  uint32_t unused[13];
};
static_assert(sizeof(Announcement) == 64, "messages start at multiples of 64");

uint64_t padded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// A message under way.
class Transfer {
 public:
  Transfer(Comm& comm, uint32_t op, const Message& message)
      : comm_(comm),
        op_(op),
        message_(message),
        from_(message.sends ? comm.rank() : message.peer),
        to_(message.sends ? message.peer : comm.rank()),
        ring_(comm.segment().ring(from_, to_)),
        data_(comm.segment().ring_data(from_, to_)),
        capacity_(comm.segment().ring_bytes()),
        bytes_(message.count * hccl_type_size(message.type)) {}

  bool done() const { return announced_ && moved_ == bytes_; }
  bool sends() const { return message_.sends; }
  uint32_t peer() const { return message_.peer; }
  size_t lane() const { return message_.sends ? to_ : comm_.ranks() + from_; }
  // True when step() would get something done.
  bool possible() const {
    if (done()) return false;
    return message_.sends ? room() >= 64 : ring_.head.load() != ring_.tail.load();
  }
  // Moves as much as the ring allows; true when anything was moved.
  bool step() {
    if (!possible()) return false;
    message_.sends ? push() : pull();
    comm_.segment().rank(message_.peer).p2p.ring();
    return true;
  }

 private:
  uint64_t room() const { return capacity_ - (ring_.head.load() - ring_.tail.load()); }

  void push() {
    if (!announced_) {
      Announcement head = {message_.count, message_.type, {}};
      memcpy(data_ + ring_.head.load() % capacity_, &head, sizeof head);
      ring_.head.fetch_add(sizeof head);
      announced_ = true;
    }
    while (uint64_t chunk = std::min(room(), bytes_ - moved_)) {
      uint64_t at = ring_.head.load() % capacity_;
      chunk = std::min(chunk, capacity_ - at);
      memcpy(data_ + at, message_.buffer + moved_, chunk);
      moved_ += chunk;
      // All but the last piece are multiples of 64, because the ring and all positions in it are.
      ring_.head.fetch_add(padded(chunk));
    }
  }

  void pull() {
    if (!announced_) {
      Announcement head;
      memcpy(&head, data_ + ring_.tail.load() % capacity_, sizeof head);
      if (head.count != message_.count || head.type != message_.type) refuse(head);
      ring_.tail.fetch_add(sizeof head);
      announced_ = true;
    }
    while (uint64_t chunk = std::min(ring_.head.load() - ring_.tail.load(), padded(bytes_ - moved_))) {
      uint64_t at = ring_.tail.load() % capacity_;
      chunk = std::min(chunk, capacity_ - at);
      uint64_t useful = std::min(chunk, bytes_ - moved_);
      memcpy(message_.buffer + moved_, data_ + at, useful);
      vnpu::written(message_.buffer + moved_, useful);
      moved_ += useful;
      ring_.tail.fetch_add(chunk);
    }
  }

  [[noreturn]] void refuse(const Announcement& head) {
    comm_.fail(HCCL_PARA, "EI0005: " + comm_.where(op_) + ": ranks differ: " + comm_.who(from_) + " sends " +
                              std::to_string(head.count) + " x " + hccl_type_name(head.type) + ", " +
                              comm_.who(to_) + " expects " + std::to_string(message_.count) + " x " +
                              hccl_type_name(message_.type));
  }

  Comm& comm_;
  const uint32_t op_;
  const Message message_;
  const uint32_t from_, to_;
  Ring& ring_;
  char* data_;
  const uint64_t capacity_;
  const uint64_t bytes_;
  uint64_t moved_ = 0;
  bool announced_ = false;
};

// The transfers that are at the front of their lane and not done.
std::vector<Transfer*> fronts(std::vector<Transfer>& all) {
  std::vector<Transfer*> result;
  std::vector<size_t> lanes;
  for (Transfer& t : all) {
    if (t.done() || std::find(lanes.begin(), lanes.end(), t.lane()) != lanes.end()) continue;
    lanes.push_back(t.lane());
    result.push_back(&t);
  }
  return result;
}

std::vector<std::unique_lock<std::mutex>> lock_lanes(Comm& comm, const std::vector<Transfer>& all) {
  std::vector<size_t> lanes;
  for (const Transfer& t : all) lanes.push_back(t.lane());
  std::sort(lanes.begin(), lanes.end());
  lanes.erase(std::unique(lanes.begin(), lanes.end()), lanes.end());
  std::vector<std::unique_lock<std::mutex>> locks;
  for (size_t lane : lanes) locks.emplace_back(comm.peer_locks[lane]);
  return locks;
}

}  // namespace

void hccl_transfer(Comm& comm, uint32_t op, const std::vector<Message>& messages) {
  comm.check_usable(op);
  std::vector<Transfer> all;
  all.reserve(messages.size());
  for (const Message& message : messages) all.emplace_back(comm, op, message);
  auto locks = lock_lanes(comm, all);
  comm.segment().rank(comm.rank()).last_op.store(op);
  Bell& bell = comm.segment().rank(comm.rank()).p2p;
  std::vector<Transfer*> open = fronts(all);
  auto possible = [&] { return std::any_of(open.begin(), open.end(), [](Transfer* t) { return t->possible(); }); };
  auto awaited = [&](uint32_t r) {
    return std::any_of(open.begin(), open.end(), [&](Transfer* t) { return t->peer() == r && !t->possible(); });
  };
  while (!open.empty()) {
    bool moved = false;
    for (Transfer* t : open) moved |= t->step();
    if (!moved) comm.wait(op, bell, comm.exec_timeout(), possible, awaited);
    open = fronts(all);
  }
}
