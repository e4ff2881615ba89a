#include "hccl_calls.h"

#include <atomic>
#include <utility>

namespace {

struct Counter {
  std::atomic<uint64_t> calls{0}, bytes{0}, nanoseconds{0};
};
Counter g_counters[kOps];

struct Group {
  int depth = 0;
  std::vector<std::pair<void*, std::vector<Message>>> messages;  // per communicator
};
thread_local Group t_group;

}  // namespace

void hccl_run_counted(Comm& comm, uint32_t op, uint64_t bytes, const std::function<void(Comm&)>& work) {
  comm.use(op);
  double start = now_seconds();
  work(comm);
  Counter& counter = g_counters[op];
  counter.calls.fetch_add(1);
  counter.bytes.fetch_add(bytes);
  counter.nanoseconds.fetch_add(static_cast<uint64_t>((now_seconds() - start) * 1e9));
}

int hccl_run(Comm& comm, uint32_t op, uint64_t bytes, std::function<void(Comm&)> work) {
  hccl_run_counted(comm, op, bytes, work);
  if (!vnpu_capturing()) return HCCL_OK;
  std::weak_ptr<Comm> again = hccl_comm(&comm);
  auto replay = [again, op, bytes, work = std::move(work)] {
    std::shared_ptr<Comm> comm = again.lock();
    if (comm == nullptr)
      vnpu_throw(HCCL_PARA, "%s in a graph: the communicator has been destroyed since capture", hccl_op_name(op));
    hccl_run_counted(*comm, op, bytes, work);
  };
  vnpu_record(std::move(replay), hccl_op_name(op));
  return HCCL_OK;
}

int hccl_group_start() {
  ++t_group.depth;
  return HCCL_OK;
}

int hccl_group_end(const std::function<int(void*, std::vector<Message>)>& transfer) {
  if (t_group.depth == 0) return vnpu_fail(HCCL_PARA, "EI0003: HcclGroupEnd without HcclGroupStart");
  if (--t_group.depth > 0) return HCCL_OK;
  auto collected = std::move(t_group.messages);
  t_group.messages.clear();
  for (auto& [handle, messages] : collected)
    if (int code = transfer(handle, std::move(messages))) return code;
  return HCCL_OK;
}

int hccl_group_or(void* handle, const Message& message, const std::function<int(const Message&)>& now) {
  if (t_group.depth == 0) return now(message);
  for (auto& [known, messages] : t_group.messages) {
    if (known != handle) continue;
    messages.push_back(message);
    return HCCL_OK;
  }
  t_group.messages.push_back({handle, {message}});
  return HCCL_OK;
}

// What this process did since it started, for benchmarks. Writes for operation 0, 1, ... three numbers each
// (calls, bytes handed in, nanoseconds inside) to `out`, for at most `capacity` operations, and returns how
// many there are. Replays of graphs count.
extern "C" __attribute__((visibility("default"))) int vnpu_hccl_counters(uint64_t* out, int capacity) {
  for (int op = 0; op < capacity && op < static_cast<int>(kOps); ++op) {
    out[3 * op] = g_counters[op].calls.load();
    out[3 * op + 1] = g_counters[op].bytes.load();
    out[3 * op + 2] = g_counters[op].nanoseconds.load();
  }
  return static_cast<int>(kOps);
}

// The name of operation `op` in vnpu_hccl_counters, such as "HcclAllReduce".
extern "C" __attribute__((visibility("default"))) const char* vnpu_hccl_counter_name(int op) {
  return hccl_op_name(static_cast<uint32_t>(op));
}
