#include "hccl_collectives.h"

#include <string.h>

#include <algorithm>

#include "hccl_reduce.h"
#include "vnpu.h"
#include "written.h"

namespace {

// Above this many bytes and from this many ranks on, each rank reduces a part and the parts are gathered.
constexpr size_t kSplitBytes = 32 << 10;
constexpr uint32_t kSplitRanks = 4;

// The rounds of one collective. In a round every rank fills its slot, all meet, and then each reads the
// slots of the others. Rounds use two slots in turn: who fills a slot again has passed a meeting that the
// others only came to after they had read what was in it, so one meeting a round is enough.
class Rounds {
 public:
  Rounds(Comm& comm, const CallRecord& call) : comm_(comm), lock_(comm.collective_lock), call_(call) {
    comm.check_usable(call.op);
    RankBlock& mine = comm.segment().rank(comm.rank());
    mine.last_op.store(call.op);
    mine.calls.fetch_add(1);
    mine.call[parity()] = call;
  }

  char* mine() { return comm_.segment().slot(comm_.rank(), parity()); }
  const char* of(uint32_t rank) { return comm_.segment().slot(rank, parity() ^ 1); }
  // Announces bytes per peer; before the first meeting.
  void announce(const std::vector<uint64_t>& send, const std::vector<uint64_t>& receive) {
    uint64_t* counts = comm_.segment().counts(comm_.rank(), parity());
    std::copy(send.begin(), send.end(), counts);
    std::copy(receive.begin(), receive.end(), counts + comm_.ranks());
    announced_ = true;
  }
  void meet() {
    comm_.barrier(call_.op);
    if (!compared_) compare();
    compared_ = true;
  }
  // The longest piece that any rank announced; after the first meeting.
  uint64_t longest() {
    uint64_t most = 0;
    for (uint32_t r = 0; r < comm_.ranks(); ++r) {
      const uint64_t* counts = comm_.segment().counts(r, first_parity_);
      most = std::max(most, *std::max_element(counts, counts + comm_.ranks()));
    }
    return most;
  }

 private:
  uint32_t parity() const { return comm_.barriers() & 1; }
  const CallRecord& call_of(uint32_t r) { return comm_.segment().rank(r).call[first_parity_]; }
  void compare();
  void compare_pairs();
  template <class Show>
  [[noreturn]] void differ(const char* what, Show show);

  Comm& comm_;
  std::lock_guard<std::mutex> lock_;
  const CallRecord call_;
  bool announced_ = false, compared_ = false;
  uint32_t first_parity_ = static_cast<uint32_t>(comm_.barriers() & 1);
};

template <class Show>
void Rounds::differ(const char* what, Show show) {
  std::string text = "EI0005: " + comm_.where(call_.op) + ": ranks differ in " + what + ":";
  for (uint32_t r = 0; r < std::min(comm_.ranks(), 16u); ++r)
    text += (r == 0 ? " " : ", ") + show(call_of(r)) + " on " + comm_.who(r);
  comm_.fail(HCCL_PARA, text);
}

void Rounds::compare() {
  const CallRecord& first = call_of(0);
  for (uint32_t r = 1; r < comm_.ranks(); ++r) {
    const CallRecord& other = call_of(r);
    if (other.op != first.op)
      differ("the operation", [](const CallRecord& c) { return std::string(hccl_op_name(c.op)); });
    if (other.type != first.type)
      differ("the data type", [](const CallRecord& c) { return std::string(hccl_type_name(c.type)); });
    if (other.reduction != first.reduction)
      differ("the reduction", [](const CallRecord& c) { return std::string(hccl_reduction_name(c.reduction)); });
    if (other.root != first.root)
      differ("the root rank", [](const CallRecord& c) { return std::to_string(c.root); });
    if (other.count != first.count)
      differ("the count", [](const CallRecord& c) { return std::to_string(c.count); });
  }
  if (announced_) compare_pairs();
}

void Rounds::compare_pairs() {
  uint32_t n = comm_.ranks();
  size_t size = hccl_type_size(call_.type);
  for (uint32_t from = 0; from < n; ++from) {
    const uint64_t* sent = comm_.segment().counts(from, first_parity_);
    for (uint32_t to = 0; to < n; ++to) {
      uint64_t expected = comm_.segment().counts(to, first_parity_)[n + from];
      if (sent[to] == expected) continue;
      comm_.fail(HCCL_PARA, "EI0005: " + comm_.where(call_.op) + ": ranks differ in the count: " + comm_.who(from) +
                                " sends " + std::to_string(sent[to] / size) + " elements to " + comm_.who(to) +
                                ", which expects " + std::to_string(expected / size));
    }
  }
}

// In null mode a reduction computes nothing, like every other kernel; ranks still meet and compare.
bool computes(const CallRecord& call) { return !(vnpu_null_mode() && hccl_is_floating(call.type)); }

// All ranks have filled their slots with `count` elements: each reduces a part, then all collect the parts.
void reduce_split(Comm& comm, Rounds& rounds, const CallRecord& call, size_t count, char* receive) {
  size_t size = hccl_type_size(call.type);
  size_t part = (count + comm.ranks() - 1) / comm.ranks();
  auto begin = [&](uint32_t r) { return std::min(count, part * r); };
  size_t from = begin(comm.rank()), length = begin(comm.rank() + 1) - from;
  std::vector<const void*> sources(comm.ranks());
  for (uint32_t r = 0; r < comm.ranks(); ++r) sources[r] = rounds.of(r) + from * size;
  hccl_reduce(rounds.mine(), sources.data(), static_cast<int>(comm.ranks()), length, call.type, call.reduction);
  rounds.meet();
  for (uint32_t r = 0; r < comm.ranks(); ++r)
    memcpy(receive + begin(r) * size, rounds.of(r), (begin(r + 1) - begin(r)) * size);
}

}  // namespace

void hccl_all_reduce(Comm& comm, const CallRecord& call, const void* send, void* receive) {
  Rounds rounds(comm, call);
  size_t size = hccl_type_size(call.type), per_round = kSlotBytes / size;
  const char* from = static_cast<const char*>(send);
  char* to = static_cast<char*>(receive);
  bool wants = call.op == kAllReduce || call.root == comm.rank();
  bool real = computes(call);
  if (real && wants) vnpu::written(receive, call.count * size);
  std::vector<const void*> sources(comm.ranks());
  uint64_t done = 0;
  do {
    size_t count = std::min<uint64_t>(per_round, call.count - done);
    if (real) memcpy(rounds.mine(), from + done * size, count * size);
    rounds.meet();
    if (real && call.op == kAllReduce && comm.ranks() >= kSplitRanks && count * size >= kSplitBytes) {
      reduce_split(comm, rounds, call, count, to + done * size);
    } else if (real && wants) {
      for (uint32_t r = 0; r < comm.ranks(); ++r) sources[r] = rounds.of(r);
      sources[comm.rank()] = from + done * size;
      hccl_reduce(to + done * size, sources.data(), static_cast<int>(comm.ranks()), count, call.type,
                  call.reduction);
    }
    done += count;
  } while (done < call.count);
}

void hccl_broadcast(Comm& comm, const CallRecord& call, void* buffer) {
  Rounds rounds(comm, call);
  char* at = static_cast<char*>(buffer);
  uint64_t total = call.count * hccl_type_size(call.type), done = 0;
  if (comm.rank() != call.root) vnpu::written(buffer, total);
  do {
    size_t bytes = std::min<uint64_t>(kSlotBytes, total - done);
    if (comm.rank() == call.root) memcpy(rounds.mine(), at + done, bytes);
    rounds.meet();
    if (comm.rank() != call.root) memcpy(at + done, rounds.of(call.root), bytes);
    done += bytes;
  } while (done < total);
}

void hccl_all_gather(Comm& comm, const CallRecord& call, const void* send, void* receive) {
  Rounds rounds(comm, call);
  const char* from = static_cast<const char*>(send);
  char* to = static_cast<char*>(receive);
  uint64_t total = call.count * hccl_type_size(call.type), done = 0;
  vnpu::written(receive, total * comm.ranks());
  do {
    size_t bytes = std::min<uint64_t>(kSlotBytes, total - done);
    memcpy(rounds.mine(), from + done, bytes);
    rounds.meet();
    for (uint32_t r = 0; r < comm.ranks(); ++r) memcpy(to + r * total + done, rounds.of(r), bytes);
    done += bytes;
  } while (done < total);
}

void hccl_exchange(Comm& comm, const Exchange& x) {
  Rounds rounds(comm, x.call);
  rounds.announce(x.send_bytes, x.receive_bytes);
  uint32_t n = comm.ranks(), me = comm.rank();
  size_t piece = kSlotBytes / n / 64 * 64;
  bool real = !x.reduces || computes(x.call);
  std::vector<const void*> sources(n);
  for (uint32_t r = 0; r < n && real; ++r) vnpu::written(x.receive + (x.reduces ? 0 : x.receive_offsets[r]), x.receive_bytes[r]);
  uint64_t done = 0, longest;
  auto now = [&](uint64_t bytes) { return bytes > done ? std::min<uint64_t>(piece, bytes - done) : 0; };
  do {
    for (uint32_t r = 0; r < n; ++r)
      if (real && now(x.send_bytes[r]) > 0)
        memcpy(rounds.mine() + r * piece, x.send + x.send_offsets[r] + done, now(x.send_bytes[r]));
    rounds.meet();
    if (done == 0) longest = rounds.longest();
    if (x.reduces && real) {
      for (uint32_t r = 0; r < n; ++r) sources[r] = rounds.of(r) + me * piece;
      hccl_reduce(x.receive + done, sources.data(), static_cast<int>(n),
                  now(x.receive_bytes[0]) / hccl_type_size(x.call.type), x.call.type, x.call.reduction);
    } else if (!x.reduces) {
      for (uint32_t r = 0; r < n; ++r)
        if (now(x.receive_bytes[r]) > 0)
          memcpy(x.receive + x.receive_offsets[r] + done, rounds.of(r) + me * piece, now(x.receive_bytes[r]));
    }
    done += piece;
  } while (done < longest);
}

void hccl_barrier(Comm& comm) {
  Rounds rounds(comm, CallRecord{kBarrier, HCCL_INT8, HCCL_SUM, 0, 0});
  rounds.meet();
}
