// Moving rows of experts between ranks, for the references of the fused operators (MoeDistributeDispatch and
// MoeDistributeCombine). These operators find their communicator by its name, and are recorded in graphs by the
// boxed kernel like any other: nothing is recorded here.
#include <string.h>

#include <numeric>

#include "hccl_calls.h"
#include "hccl_collectives.h"
#include "hccl_comm.h"
#include "vnpu.h"

#define VNPU_API extern "C" __attribute__((visibility("default"))) int

namespace {

template <class Work>
int named(const char* name, uint32_t op, Work work) {
  return hccl_guarded([&] {
    std::shared_ptr<Comm> comm = hccl_comm_named(name);
    if (comm == nullptr)
      vnpu_throw(HCCL_NOT_FOUND, "EI0003: %s: no communicator of this process is called '%s'", hccl_op_name(op), name);
    return work(*comm);
  });
}

}  // namespace

// Writes rank, number of ranks and the bytes of the communicator's buffer.
VNPU_API vnpu_hccl_group(const char* name, uint64_t out[3]) {
  return named(name, kMoeDispatch, [&](Comm& comm) {
    out[0] = comm.rank();
    out[1] = comm.ranks();
    out[2] = comm.buffer_bytes();
    return HCCL_OK;
  });
}

// `step` 0: counts of a dispatch, 1: its rows, 2: the rows of a combine. Pieces lie one behind the other, in the
// order of ranks; all lengths are bytes.
VNPU_API vnpu_hccl_move_rows(const char* name, uint32_t step, const void* send, const uint64_t* send_bytes,
                             void* receive, const uint64_t* receive_bytes) {
  const uint32_t op = step == 0 ? kMoeCounts : step == 1 ? kMoeDispatch : kMoeCombine;
  return named(name, op, [&](Comm& comm) {
    const uint32_t n = comm.ranks();
    Exchange x;
    x.call = {op, HCCL_INT8, 0, 0, 0};
    x.send = static_cast<const char*>(send);
    x.receive = static_cast<char*>(receive);
    x.send_bytes.assign(send_bytes, send_bytes + n);
    x.receive_bytes.assign(receive_bytes, receive_bytes + n);
    x.send_offsets.resize(n);
    x.receive_offsets.resize(n);
    std::exclusive_scan(send_bytes, send_bytes + n, x.send_offsets.begin(), uint64_t{0});
    std::exclusive_scan(receive_bytes, receive_bytes + n, x.receive_offsets.begin(), uint64_t{0});
    const uint64_t bytes = std::accumulate(send_bytes, send_bytes + n, uint64_t{0});
    hccl_run_counted(comm, op, bytes, [&](Comm& c) { hccl_exchange(c, x); });
    return HCCL_OK;
  });
}
