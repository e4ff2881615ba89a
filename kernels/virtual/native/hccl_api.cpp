// The HCCL entry points that torch_npu calls.
#include <stdio.h>
#include <string.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hccl_calls.h"
#include "hccl_collectives.h"
#include "hccl_comm.h"
#include "hccl_p2p.h"
#include "hccl_reduce.h"
#include "hccl_types.h"
#include "vnpu.h"

#define HCCL_API extern "C" __attribute__((visibility("default"))) int

namespace {

void check_type(uint32_t op, uint32_t type) {
  if (hccl_type_size(type) == 0) vnpu_throw(HCCL_NOT_SUPPORT, "%s: data type %u is unknown", hccl_op_name(op), type);
}

void check_reduction(uint32_t op, uint32_t type, uint32_t reduction) {
  check_type(op, type);
  if (!hccl_can_reduce(type, reduction))
    vnpu_throw(HCCL_NOT_SUPPORT, "EI0003: %s cannot reduce data type %s with operation %s (%u)", hccl_op_name(op),
               hccl_type_name(type), hccl_reduction_name(reduction), reduction);
}

void check_peer(const Comm& comm, uint32_t op, const char* what, uint32_t rank) {
  if (rank >= comm.ranks())
    vnpu_throw(HCCL_PARA, "EI0003: %s: %s is %u, but the ranks are 0 to %u", comm.where(op).c_str(), what, rank,
               comm.ranks() - 1);
}

void check_buffer(uint32_t op, const void* buffer, uint64_t bytes) {
  if (buffer == nullptr && bytes > 0) vnpu_throw(HCCL_PTR, "EI0003: %s: null buffer", hccl_op_name(op));
}

using Bytes = std::vector<uint64_t>;

Bytes times(const void* counts, uint32_t n, size_t size) {
  if (counts == nullptr) vnpu_throw(HCCL_PTR, "EI0003: null array of counts");
  const uint64_t* from = static_cast<const uint64_t*>(counts);
  Bytes result(from, from + n);
  for (uint64_t& value : result) value *= size;
  return result;
}

Bytes steps(uint32_t n, uint64_t bytes) {
  Bytes result(n);
  for (uint32_t r = 0; r < n; ++r) result[r] = r * bytes;
  return result;
}

// Offsets of pieces that lie one behind the other.
Bytes packed(const Bytes& lengths) {
  Bytes result(lengths.size(), 0);
  for (size_t r = 1; r < lengths.size(); ++r) result[r] = result[r - 1] + lengths[r - 1];
  return result;
}

uint64_t total(const Bytes& lengths) {
  uint64_t sum = 0;
  for (uint64_t value : lengths) sum += value;
  return sum;
}

Exchange exchange(const CallRecord& call, const void* send, const void* receive) {
  Exchange x;
  x.call = call;
  x.send = static_cast<const char*>(send);
  x.receive = static_cast<char*>(const_cast<void*>(receive));
  return x;
}

int run_exchange(Comm& comm, Exchange x) {
  check_buffer(x.call.op, x.send, total(x.send_bytes));
  check_buffer(x.call.op, x.receive, total(x.receive_bytes));
  uint64_t bytes = total(x.send_bytes);
  uint32_t op = x.call.op;
  return hccl_run(comm, op, bytes, [x = std::move(x)](Comm& c) { hccl_exchange(c, x); });
}

// All-to-all between elements of two types only makes sense when they are of one size.
size_t common_size(uint32_t op, uint32_t send_type, uint32_t receive_type) {
  check_type(op, send_type);
  check_type(op, receive_type);
  if (send_type != receive_type)
    vnpu_throw(HCCL_NOT_SUPPORT, "EI0003: %s: sends %s but receives %s", hccl_op_name(op), hccl_type_name(send_type),
               hccl_type_name(receive_type));
  return hccl_type_size(send_type);
}

}  // namespace

HCCL_API HcclAllReduce(void* send, void* receive, uint64_t count, uint32_t type, uint32_t reduction, void* handle,
                       void*) {
  return hccl_call(handle, kAllReduce, [&](Comm& comm) {
    check_reduction(kAllReduce, type, reduction);
    uint64_t bytes = count * hccl_type_size(type);
    check_buffer(kAllReduce, send, bytes);
    check_buffer(kAllReduce, receive, bytes);
    CallRecord call = {kAllReduce, type, reduction, 0, count};
    return hccl_run(comm, kAllReduce, bytes, [=](Comm& c) { hccl_all_reduce(c, call, send, receive); });
  });
}

HCCL_API HcclReduce(void* send, void* receive, uint64_t count, uint32_t type, uint32_t reduction, uint32_t root,
                    void* handle, void*) {
  return hccl_call(handle, kReduce, [&](Comm& comm) {
    check_reduction(kReduce, type, reduction);
    check_peer(comm, kReduce, "the root", root);
    uint64_t bytes = count * hccl_type_size(type);
    check_buffer(kReduce, send, bytes);
    if (root == comm.rank()) check_buffer(kReduce, receive, bytes);
    CallRecord call = {kReduce, type, reduction, root, count};
    return hccl_run(comm, kReduce, bytes, [=](Comm& c) { hccl_all_reduce(c, call, send, receive); });
  });
}

HCCL_API HcclBroadcast(void* buffer, uint64_t count, uint32_t type, uint32_t root, void* handle, void*) {
  return hccl_call(handle, kBroadcast, [&](Comm& comm) {
    check_type(kBroadcast, type);
    check_peer(comm, kBroadcast, "the root", root);
    uint64_t bytes = count * hccl_type_size(type);
    check_buffer(kBroadcast, buffer, bytes);
    CallRecord call = {kBroadcast, type, 0, root, count};
    return hccl_run(comm, kBroadcast, bytes, [=](Comm& c) { hccl_broadcast(c, call, buffer); });
  });
}

HCCL_API HcclAllGather(void* send, void* receive, uint64_t count, uint32_t type, void* handle, void*) {
  return hccl_call(handle, kAllGather, [&](Comm& comm) {
    check_type(kAllGather, type);
    uint64_t bytes = count * hccl_type_size(type);
    check_buffer(kAllGather, send, bytes);
    check_buffer(kAllGather, receive, bytes);
    CallRecord call = {kAllGather, type, 0, 0, count};
    return hccl_run(comm, kAllGather, bytes, [=](Comm& c) { hccl_all_gather(c, call, send, receive); });
  });
}

HCCL_API HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* offsets,
                        uint32_t type, void* handle, void*) {
  return hccl_call(handle, kAllGatherV, [&](Comm& comm) {
    check_type(kAllGatherV, type);
    size_t size = hccl_type_size(type);
    Exchange x = exchange({kAllGatherV, type, 0, 0, 0}, send, receive);
    x.send_bytes.assign(comm.ranks(), count * size);
    x.send_offsets.assign(comm.ranks(), 0);
    x.receive_bytes = times(counts, comm.ranks(), size);
    x.receive_offsets = times(offsets, comm.ranks(), size);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclReduceScatter(void* send, void* receive, uint64_t count, uint32_t type, uint32_t reduction, void* handle,
                           void*) {
  return hccl_call(handle, kReduceScatter, [&](Comm& comm) {
    check_reduction(kReduceScatter, type, reduction);
    size_t size = hccl_type_size(type);
    Exchange x = exchange({kReduceScatter, type, reduction, 0, count}, send, receive);
    x.reduces = true;
    x.send_bytes.assign(comm.ranks(), count * size);
    x.send_offsets = steps(comm.ranks(), count * size);
    x.receive_bytes = x.send_bytes;
    x.receive_offsets.assign(comm.ranks(), 0);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclReduceScatterV(void* send, const void* counts, const void* offsets, void* receive, uint64_t count,
                            uint32_t type, uint32_t reduction, void* handle, void*) {
  return hccl_call(handle, kReduceScatterV, [&](Comm& comm) {
    check_reduction(kReduceScatterV, type, reduction);
    size_t size = hccl_type_size(type);
    Exchange x = exchange({kReduceScatterV, type, reduction, 0, 0}, send, receive);
    x.reduces = true;
    x.send_bytes = times(counts, comm.ranks(), size);
    x.send_offsets = times(offsets, comm.ranks(), size);
    x.receive_bytes.assign(comm.ranks(), count * size);
    x.receive_offsets.assign(comm.ranks(), 0);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclScatter(void* send, void* receive, uint64_t count, uint32_t type, uint32_t root, void* handle, void*) {
  return hccl_call(handle, kScatter, [&](Comm& comm) {
    check_type(kScatter, type);
    check_peer(comm, kScatter, "the root", root);
    uint64_t bytes = count * hccl_type_size(type);
    Exchange x = exchange({kScatter, type, 0, root, count}, send, receive);
    x.send_bytes.assign(comm.ranks(), comm.rank() == root ? bytes : 0);
    x.send_offsets = steps(comm.ranks(), bytes);
    x.receive_bytes.assign(comm.ranks(), 0);
    x.receive_bytes[root] = bytes;
    x.receive_offsets.assign(comm.ranks(), 0);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclAlltoAll(const void* send, uint64_t send_count, uint32_t send_type, const void* receive,
                      uint64_t receive_count, uint32_t receive_type, void* handle, void*) {
  return hccl_call(handle, kAlltoAll, [&](Comm& comm) {
    size_t size = common_size(kAlltoAll, send_type, receive_type);
    Exchange x = exchange({kAlltoAll, send_type, 0, 0, 0}, send, receive);
    x.send_bytes.assign(comm.ranks(), send_count * size);
    x.send_offsets = steps(comm.ranks(), send_count * size);
    x.receive_bytes.assign(comm.ranks(), receive_count * size);
    x.receive_offsets = steps(comm.ranks(), receive_count * size);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, uint32_t send_type,
                       const void* receive, const void* receive_counts, const void* receive_offsets,
                       uint32_t receive_type, void* handle, void*) {
  return hccl_call(handle, kAlltoAllV, [&](Comm& comm) {
    size_t size = common_size(kAlltoAllV, send_type, receive_type);
    Exchange x = exchange({kAlltoAllV, send_type, 0, 0, 0}, send, receive);
    x.send_bytes = times(send_counts, comm.ranks(), size);
    x.send_offsets = times(send_offsets, comm.ranks(), size);
    x.receive_bytes = times(receive_counts, comm.ranks(), size);
    x.receive_offsets = times(receive_offsets, comm.ranks(), size);
    return run_exchange(comm, std::move(x));
  });
}

// `matrix` holds at [i][j] how many elements rank i sends to rank j.
HCCL_API HcclAlltoAllVC(const void* send, const void* matrix, uint32_t send_type, const void* receive,
                        uint32_t receive_type, void* handle, void*) {
  return hccl_call(handle, kAlltoAllVC, [&](Comm& comm) {
    size_t size = common_size(kAlltoAllVC, send_type, receive_type);
    uint32_t n = comm.ranks();
    Bytes all = times(matrix, n * n, size);
    Exchange x = exchange({kAlltoAllVC, send_type, 0, 0, 0}, send, receive);
    for (uint32_t r = 0; r < n; ++r) {
      x.send_bytes.push_back(all[comm.rank() * n + r]);
      x.receive_bytes.push_back(all[r * n + comm.rank()]);
    }
    x.send_offsets = packed(x.send_bytes);
    x.receive_offsets = packed(x.receive_bytes);
    return run_exchange(comm, std::move(x));
  });
}

HCCL_API HcclBarrier(void* handle, void*) {
  return hccl_call(handle, kBarrier,
                   [&](Comm& comm) { return hccl_run(comm, kBarrier, 0, [](Comm& c) { hccl_barrier(c); }); });
}

namespace {

int transfer(void* handle, uint32_t op, std::vector<Message> messages) {
  return hccl_call(handle, op, [&](Comm& comm) {
    uint64_t bytes = 0;
    for (const Message& m : messages) {
      check_type(op, m.type);
      check_peer(comm, op, "the peer", m.peer);
      if (op != kBatchSendRecv && m.peer == comm.rank())
        vnpu_throw(HCCL_PARA, "EI0003: %s: the peer is the calling rank itself", comm.where(op).c_str());
      check_buffer(op, m.buffer, m.count);
      bytes += m.count * hccl_type_size(m.type);
    }
    return hccl_run(comm, op, bytes, [op, all = std::move(messages)](Comm& c) { hccl_transfer(c, op, all); });
  });
}

}  // namespace

HCCL_API HcclSend(void* buffer, uint64_t count, uint32_t type, uint32_t peer, void* handle, void*) {
  return hccl_group_or(handle, {true, static_cast<char*>(buffer), count, type, peer}, [&](Message m) {
    return transfer(handle, kSend, {m});
  });
}

HCCL_API HcclRecv(void* buffer, uint64_t count, uint32_t type, uint32_t peer, void* handle, void*) {
  return hccl_group_or(handle, {false, static_cast<char*>(buffer), count, type, peer}, [&](Message m) {
    return transfer(handle, kRecv, {m});
  });
}

HCCL_API HcclBatchSendRecv(HcclP2pItem* items, uint32_t n, void* handle, void*) {
  if (items == nullptr && n > 0) return vnpu_fail(HCCL_PTR, "EI0003: HcclBatchSendRecv: null items");
  std::vector<Message> messages;
  for (uint32_t i = 0; i < n; ++i) {
    const HcclP2pItem& item = items[i];
    if (item.kind > 1)
      return vnpu_fail(HCCL_PARA, "EI0003: HcclBatchSendRecv: item %u is neither send nor receive (%u)", i, item.kind);
    messages.push_back({item.kind == 0, static_cast<char*>(item.buffer), item.count, item.type, item.peer});
  }
  return transfer(handle, kBatchSendRecv, std::move(messages));
}

HCCL_API HcclGroupStart() { return hccl_group_start(); }

HCCL_API HcclGroupEnd() {
  return hccl_group_end(
      [](void* handle, std::vector<Message> all) { return transfer(handle, kBatchSendRecv, std::move(all)); });
}
