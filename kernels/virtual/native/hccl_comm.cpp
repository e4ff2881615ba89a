#include "hccl_comm.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <map>

#include "vnpu.h"

namespace {

constexpr double kSpinSeconds = 20e-6;
constexpr int kYields = 4;
constexpr int kSleepMilliseconds = 100;
constexpr double kPeerCheckSeconds = 0.25;
constexpr int kNamed = 8;  // ranks that a message lists

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool has_pid(RankBlock& block) {
  uint32_t state = block.state.load();
  return state == kJoined || state == kLeft;
}

long whole_number(const char* variable, const char* text, long least, const char* unit) {
  char* end = nullptr;
  long value = strtol(text, &end, 10);
  if (*end != '\0' || value < least || value > 2147483647L)
    vnpu_throw(HCCL_PARA, "EI0001: %s must be a whole number of %s from %ld to 2147483647, not '%s'", variable, unit,
               least, text);
  return value;
}

std::mutex g_comms_lock;
std::map<void*, std::shared_ptr<Comm>>& comms() {
  static auto* map = new std::map<void*, std::shared_ptr<Comm>>;
  return *map;
}

}  // namespace

const char* hccl_op_name(uint32_t op) {
  static const char* const names[kOps] = {
      "nothing yet",   "HcclAllReduce",     "HcclBroadcast",       "HcclAllGather", "HcclAllGatherV",
      "HcclReduceScatter", "HcclReduceScatterV", "HcclReduce",     "HcclScatter",   "HcclAlltoAll",
      "HcclAlltoAllV", "HcclAlltoAllVC",    "HcclBarrier",         "HcclSend",      "HcclRecv",
      "HcclBatchSendRecv", "MoeDistributeDispatch counts", "MoeDistributeDispatch", "MoeDistributeCombine",
      "HcclCommInit",  "HcclCreateSubCommConfig",
  };
  return op < kOps ? names[op] : "unknown";
}

std::shared_ptr<Comm> hccl_comm(void* handle) {
  std::lock_guard<std::mutex> lock(g_comms_lock);
  auto it = comms().find(handle);
  return it == comms().end() ? nullptr : it->second;
}

std::shared_ptr<Comm> hccl_comm_named(const std::string& name) {
  std::lock_guard<std::mutex> lock(g_comms_lock);
  for (const auto& [handle, comm] : comms())
    if (comm->name() == name) return comm;
  return nullptr;
}

void* hccl_register(std::shared_ptr<Comm> comm) {
  std::lock_guard<std::mutex> lock(g_comms_lock);
  void* handle = comm.get();
  comms()[handle] = std::move(comm);
  return handle;
}

bool hccl_unregister(void* handle) {
  std::shared_ptr<Comm> comm;
  {
    std::lock_guard<std::mutex> lock(g_comms_lock);
    auto it = comms().find(handle);
    if (it == comms().end()) return false;
    comm = std::move(it->second);
    comms().erase(it);
  }
  comm->close();
  return true;
}

double hccl_timeout(const char* variable, double otherwise) {
  const char* text = getenv(variable);
  if (text == nullptr || *text == '\0') return otherwise;
  return static_cast<double>(whole_number(variable, text, 0, "seconds"));
}

uint64_t hccl_buffer_bytes() {
  const char* text = getenv("HCCL_BUFFSIZE");
  uint64_t megabytes = 200;
  if (text != nullptr && *text != '\0') megabytes = static_cast<uint64_t>(whole_number("HCCL_BUFFSIZE", text, 1, "MB"));
  return megabytes << 20;
}

Comm::Comm(const RootInfo& root, uint32_t ranks, uint32_t rank, const std::string& name, int32_t exec_timeout,
           uint32_t buffer_size)
    : peer_locks(size_t{ranks} * 2), rank_(rank), segment_(root, ranks), name_(name) {
  if (name_.empty()) {
    char text[32];
    snprintf(text, sizeof text, "hccl_%016llx", static_cast<unsigned long long>(root.nonce));
    name_ = text;
  }
  double connect_timeout = hccl_timeout("HCCL_CONNECT_TIMEOUT", 120);
  exec_timeout_ = exec_timeout > 0 ? exec_timeout : hccl_timeout("HCCL_EXEC_TIMEOUT", 1800);
  buffer_bytes_ = buffer_size == HCCL_BUFFER_UNSET ? hccl_buffer_bytes() : uint64_t{buffer_size} << 20;
  claim_rank(ranks);
  SegmentHeader& header = segment_.header();
  header.joined.fetch_add(1);
  header.join.ring();
  wait(
      kInit, header.join, connect_timeout, [&] { return header.joined.load() == ranks; },
      [&](uint32_t r) { return !has_pid(segment_.rank(r)); });
  segment_.close_file();
}

void Comm::claim_rank(uint32_t ranks) {
  SegmentHeader& header = segment_.header();
  uint32_t expected = 0;
  if (!header.ranks.compare_exchange_strong(expected, ranks) && expected != ranks)
    fail(HCCL_PARA, "EI0005: rank " + std::to_string(rank_) + " joins a communicator of " + std::to_string(ranks) +
                        " ranks, others one of " + std::to_string(expected));
  RankBlock& mine = segment_.rank(rank_);
  uint32_t absent = kAbsent;
  if (!mine.state.compare_exchange_strong(absent, kClaimed))
    fail(HCCL_PARA, "EI0005: two processes join as " + who(rank_));
  mine.pid = getpid();
  mine.start_time = process_start_time(mine.pid);
  mine.last_op.store(kInit);
  mine.state.store(kJoined);
}

Comm::~Comm() {
  segment_.rank(rank_).state.store(kLeft);
  // Whoever waits for this rank should notice now, not at the next look round.
  segment_.header().barrier.ring();
  for (uint32_t r = 0; r < ranks(); ++r) segment_.rank(r).p2p.ring();
}

void Comm::close() {
  closed_.store(true);
  segment_.header().barrier.ring();
  segment_.rank(rank_).p2p.ring();
}

void Comm::use(uint32_t op) {
  auto fused = [](uint32_t o) { return o == kMoeCounts || o == kMoeDispatch || o == kMoeCombine; };
  uint32_t before = kNoOp;
  if (used_for_.compare_exchange_strong(before, op) || fused(before) == fused(op)) return;
  vnpu_throw(HCCL_NOT_SUPPORT, "%s: the communicator has run %s before: dispatch and combine of experts want one of their own",
             where(op).c_str(), hccl_op_name(before));
}

int Comm::failure() {
  SegmentHeader& header = segment_.header();
  return header.failed.load() == 2 ? header.failure_code : 0;
}

void Comm::check_usable(uint32_t op) {
  if (int code = failure()) {
    std::string text = segment_.header().failure;
    vnpu_throw(code, "%s: the communicator has failed: %s", where(op).c_str(), text.c_str());
  }
}

void Comm::fail(int code, const std::string& text) {
  SegmentHeader& header = segment_.header();
  uint32_t none = 0;
  if (header.failed.compare_exchange_strong(none, 1)) {
    header.failure_code = code;
    snprintf(header.failure, sizeof header.failure, "%s", text.c_str());
    header.failed.store(2);
  }
  header.join.ring();
  header.barrier.ring();
  for (uint32_t r = 0; r < ranks(); ++r) segment_.rank(r).p2p.ring();
  vnpu_throw(code, "%s", text.c_str());
}

std::string Comm::call(uint32_t op) const { return std::string(hccl_op_name(op)) + " on communicator " + name_; }

std::string Comm::where(uint32_t op) const {
  return call(op) + " (rank " + std::to_string(rank_) + " of " + std::to_string(segment_.ranks()) + ")";
}

std::string Comm::who(uint32_t rank) {
  RankBlock& block = segment_.rank(rank);
  if (!has_pid(block)) return "rank " + std::to_string(rank) + " (has not joined)";
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(block.pid) + ")";
}

void Comm::wait(uint32_t op, Bell& bell, double limit, const std::function<bool()>& ready,
                const std::function<bool(uint32_t)>& awaited) {
  double start = now_seconds();
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return;
      pause_cpu();
    }
  } while (now_seconds() - start < kSpinSeconds);
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (ready()) return;
  }
  double next_check = start + kPeerCheckSeconds;
  while (true) {
    uint32_t seen = bell.count.load();
    if (ready()) return;
    check_usable(op);
    if (closed_.load()) vnpu_throw(HCCL_UNAVAIL, "%s: the communicator was destroyed meanwhile", where(op).c_str());
    double now = now_seconds();
    bool late = limit > 0 && now - start > limit;
    if (now >= next_check || late) {
      check_peers(op, awaited);
      next_check = now + kPeerCheckSeconds;
    }
    if (ready()) return;
    if (late) time_out(op, limit, awaited);
    sleep_on(bell, seen, kSleepMilliseconds);
  }
}

void Comm::check_peers(uint32_t op, const std::function<bool(uint32_t)>& awaited) {
  for (uint32_t r = 0; r < ranks(); ++r) {
    RankBlock& block = segment_.rank(r);
    if (r == rank_ || !has_pid(block)) continue;
    // While joining nobody may go; later only those matter that have not done their part.
    if (op != kInit && !awaited(r)) continue;
    bool left = block.state.load() == kLeft;
    if (!left && process_alive(block.pid, block.start_time)) continue;
    if (op != kInit && !awaited(r)) continue;  // it did its part just before
    if (left)
      fail(HCCL_REMOTE, who(r) + " has destroyed its end of the communicator, awaited in " + where(op));
    fail(HCCL_REMOTE, who(r) + " died during " + call(op) + ", seen by rank " + std::to_string(rank_) + " of " +
                          std::to_string(ranks()));
  }
}

void Comm::time_out(uint32_t op, double limit, const std::function<bool(uint32_t)>& awaited) {
  std::string text = where(op) + " was not finished within " + std::to_string(static_cast<long>(limit)) + " s (" +
                     (op == kInit || op == kSubInit ? "HCCL_CONNECT_TIMEOUT" : "HCCL_EXEC_TIMEOUT") + "); not arrived:";
  const char* separator = " ";
  int named = 0;
  for (uint32_t r = 0; r < ranks(); ++r) {
    if (r == rank_ || !awaited(r)) continue;
    if (++named > kNamed) {
      text += ", and others";
      break;
    }
    RankBlock& block = segment_.rank(r);
    text += separator + who(r);
    if (block.state.load() == kJoined && op != kInit)
      text += ", last call " + std::string(hccl_op_name(block.last_op.load()));
    separator = "; ";
  }
  fail(HCCL_TIMEOUT, text);
}

void Comm::barrier(uint32_t op) {
  SegmentHeader& header = segment_.header();
  uint64_t target = ++barriers_;
  // Arriving is one atomic step, so a rank that dies has either arrived or not. Its own mark comes later and
  // only says whom to blame.
  bool last = header.arrivals.fetch_add(1) + 1 == target * ranks();
  segment_.rank(rank_).arrived.store(target);
  if (last) return header.barrier.ring();
  wait(
      op, header.barrier, exec_timeout_, [&] { return header.arrivals.load() >= target * ranks(); },
      [&](uint32_t r) { return segment_.rank(r).arrived.load() < target; });
}
