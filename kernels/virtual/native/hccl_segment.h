// The shared memory of one communicator, and how a process gets hold of it.
//
// A communicator is one anonymous memory file (memfd): it has no name anywhere in the file system, so
// nothing can be left behind, whenever a process dies. The process that makes the root info holds it open,
// the others open it through /proc/<pid>/fd/<fd>, and everybody closes it as soon as all ranks have it
// mapped. Pages that nobody touches take no memory, so generous sizes are cheap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "hccl_types.h"

constexpr uint32_t kMaxRanks = 1024;
constexpr size_t kSlotBytes = 1 << 20;   // one rank's part in one round of a collective
constexpr size_t kFailureText = 1024;

// A word to sleep on. Whoever changes what others may wait for rings it.
struct Bell {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> sleepers{0};
  void ring();
};

// What one rank says it is about to do. All ranks compare before a byte is copied out.
struct CallRecord {
  uint32_t op;
  uint32_t type;
  uint32_t reduction;
  uint32_t root;
  uint64_t count;
};

// Where a communicator can be found: travels inside HcclRootInfo and, for sub groups, in RankBlock.
struct RootInfo {
  char magic[8];
  uint64_t nonce;
  int32_t pid;
  int32_t fd;
  uint64_t start_time;  // of the process, clock ticks since boot: tells a reused pid from the old one
  char host[64];        // machine and pid namespace
};
static_assert(sizeof(RootInfo) <= HCCL_ROOT_INFO_SIZE, "travels in HcclRootInfo");

enum RankState : uint32_t { kAbsent = 0, kClaimed = 1, kJoined = 2, kLeft = 3 };

struct alignas(64) RankBlock {
  std::atomic<uint32_t> state;
  int32_t pid;
  uint64_t start_time;
  std::atomic<uint32_t> last_op;     // for messages
  std::atomic<uint64_t> calls;       // collectives started
  alignas(64) std::atomic<uint64_t> arrived;  // barriers this rank has reached
  alignas(64) Bell p2p;              // rung when a ring to or from this rank moves
  alignas(64) CallRecord call[2];
  // The sub communicator that this rank is founding, while sub_open is 1.
  alignas(64) std::atomic<uint32_t> sub_open;
  uint64_t sub_id;
  RootInfo sub_root;
};

struct SegmentHeader {
  char magic[8];
  uint64_t nonce;
  std::atomic<uint32_t> ranks;       // 0 until the first rank joins
  std::atomic<uint32_t> joined;
  Bell join;
  alignas(64) std::atomic<uint64_t> arrivals;  // at all barriers, by all ranks
  Bell barrier;
  alignas(64) std::atomic<uint32_t> failed;    // 0 no, 1 being written, 2 yes
  int32_t failure_code;
  char failure[kFailureText];
};

// A byte stream from one rank to another; head and tail count bytes since the beginning.
struct Ring {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
};

// A mapped segment. Layout: header, rank blocks, count vectors, slots, rings.
class Segment {
 public:
  // Makes an empty one and describes it; the descriptor stays open in this process until somebody here
  // joins it.
  static RootInfo found();
  // Maps the segment that `root` describes for `ranks` ranks. Throws VnpuError when its founder is gone.
  Segment(const RootInfo& root, uint32_t ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint32_t ranks() const { return ranks_; }
  size_t ring_bytes() const { return ring_bytes_; }
  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(base_); }
  RankBlock& rank(uint32_t r) { return reinterpret_cast<RankBlock*>(base_ + blocks_)[r]; }
  // Bytes that rank r sends to (first `ranks`) and expects from (the next `ranks`) each rank.
  uint64_t* counts(uint32_t r, uint32_t parity) {
    return reinterpret_cast<uint64_t*>(base_ + counts_) + (size_t{r} * 2 + parity) * 2 * ranks_;
  }
  char* slot(uint32_t r, uint32_t parity) { return base_ + slots_ + (size_t{r} * 2 + parity) * kSlotBytes; }
  Ring& ring(uint32_t from, uint32_t to) { return *reinterpret_cast<Ring*>(ring_at(from, to)); }
  char* ring_data(uint32_t from, uint32_t to) { return ring_at(from, to) + sizeof(Ring); }
  // Closes the descriptor: all ranks have mapped the segment.
  void close_file();

 private:
  char* ring_at(uint32_t from, uint32_t to) {
    return base_ + rings_ + (size_t{from} * ranks_ + to) * (sizeof(Ring) + ring_bytes_);
  }

  uint32_t ranks_;
  size_t ring_bytes_, blocks_, counts_, slots_, rings_, total_;
  int fd_ = -1;
  char* base_ = nullptr;
};

// Start time of a process as /proc gives it, or 0 when it does not exist or is only waiting to be reaped.
uint64_t process_start_time(int pid);
bool process_alive(int pid, uint64_t start_time);

// Sleeps until bell.count differs from `seen`, at most `milliseconds`. May return early.
void sleep_on(Bell& bell, uint32_t seen, int milliseconds);
// Seconds on a clock that only moves forward.
double now_seconds();
