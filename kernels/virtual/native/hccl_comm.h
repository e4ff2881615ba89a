// One rank's end of a communicator: joining, waiting with a deadline, failing.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hccl_segment.h"
#include "hccl_types.h"

// Kinds of calls, in the order in which vnpu_hccl_counters lists them.
enum HcclOp : uint32_t {
  kNoOp,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kReduce,
  kScatter,
  kAlltoAll,
  kAlltoAllV,
  kAlltoAllVC,
  kBarrier,
  kSend,
  kRecv,
  kBatchSendRecv,
  kMoeCounts,
  kMoeDispatch,
  kMoeCombine,
  kInit,
  kSubInit,
  kOps,
};
const char* hccl_op_name(uint32_t op);

class Comm {
 public:
  // Joins and waits for all ranks, at most HCCL_CONNECT_TIMEOUT seconds. `name` may be empty: then one is
  // made up, the same on all ranks. `exec_timeout` in seconds, or HCCL_CONFIG_UNSET for HCCL_EXEC_TIMEOUT;
  // `buffer_size` in MB, or HCCL_BUFFER_UNSET for HCCL_BUFFSIZE.
  Comm(const RootInfo& root, uint32_t ranks, uint32_t rank, const std::string& name, int32_t exec_timeout,
       uint32_t buffer_size);
  ~Comm();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return segment_.ranks(); }
  const std::string& name() const { return name_; }
  Segment& segment() { return segment_; }
  // Ends waits of other threads of this process: the handle has been destroyed.
  void close();
  // 0, or the code with which the communicator failed, here or on another rank.
  int failure();

  // Throws what the communicator failed with, when it has. First thing in every operation.
  void check_usable(uint32_t op);
  // Marks the communicator failed for all ranks and throws. The first failure is kept.
  [[noreturn]] void fail(int code, const std::string& text);
  // "HcclAllReduce on communicator group_name_0", and the same with " (rank 0 of 2)", for messages.
  std::string call(uint32_t op) const;
  std::string where(uint32_t op) const;
  // "rank 1 (pid 123)".
  std::string who(uint32_t rank);

  // Waits until ready() holds: looks for some microseconds, then sleeps on `bell`. Fails the communicator
  // when a rank that `awaited` says is needed has died or left, or at the deadline (`limit` seconds from
  // now, 0: none), naming those ranks.
  void wait(uint32_t op, Bell& bell, double limit, const std::function<bool()>& ready,
            const std::function<bool(uint32_t)>& awaited);
  double exec_timeout() const { return exec_timeout_; }
  // What the communicator's buffer would hold on a device; here only operators' limits follow from it.
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  // Notes what the communicator is used for. The fused operators of experts want one of their own: throws when
  // collectives have used it before, and the other way round.
  void use(uint32_t op);

  // All ranks reach barrier number `barriers()` before anybody passes.
  void barrier(uint32_t op);
  uint64_t barriers() const { return barriers_; }

  // Held for the length of a collective.
  std::mutex collective_lock;
  // Held while a message goes to rank p (p) or comes from it (ranks() + p); taken in this order.
  std::vector<std::mutex> peer_locks;
  // Held while this rank takes part in making a sub communicator.
  std::mutex sub_lock;

 private:
  void check_peers(uint32_t op, const std::function<bool(uint32_t)>& awaited);
  [[noreturn]] void time_out(uint32_t op, double limit, const std::function<bool(uint32_t)>& awaited);
  void claim_rank(uint32_t ranks);

  uint32_t rank_;
  Segment segment_;
  std::string name_;
  double exec_timeout_;
  uint64_t buffer_bytes_;
  std::atomic<uint32_t> used_for_{kNoOp};
  uint64_t barriers_ = 0;
  std::atomic<bool> closed_{false};
};

// Finds the communicator behind a handle, nullptr when there is none (any more).
std::shared_ptr<Comm> hccl_comm(void* handle);
// Finds it by its name, as operators do that are given the name of a group.
std::shared_ptr<Comm> hccl_comm_named(const std::string& name);
void* hccl_register(std::shared_ptr<Comm> comm);
// Forgets the handle; false when there is none such.
bool hccl_unregister(void* handle);

// A limit in seconds from the environment; throws VnpuError for anything but a whole number.
double hccl_timeout(const char* variable, double otherwise);
// HCCL_BUFFSIZE in bytes; throws as hccl_timeout.
uint64_t hccl_buffer_bytes();
