// The collectives, as work on a communicator. Each runs to its end before it returns, on every rank; each
// throws VnpuError and fails the communicator when ranks disagree on the arguments or one does not come.
#pragma once

#include <cstdint>
#include <vector>

#include "hccl_comm.h"

// Any collective in which each ordered pair of ranks has its own piece: all-to-all, scatter, reduce-scatter
// and the gathers of unequal pieces. All lengths and offsets are bytes, one entry per rank.
struct Exchange {
  CallRecord call;
  bool reduces = false;  // add up what arrives (call.type, call.reduction) instead of placing it
  const char* send = nullptr;
  char* receive = nullptr;
  std::vector<uint64_t> send_bytes, send_offsets, receive_bytes, receive_offsets;
};
void hccl_exchange(Comm& comm, const Exchange& exchange);

// AllReduce, and Reduce where only call.root gets the result.
void hccl_all_reduce(Comm& comm, const CallRecord& call, const void* send, void* receive);
void hccl_broadcast(Comm& comm, const CallRecord& call, void* buffer);
void hccl_all_gather(Comm& comm, const CallRecord& call, const void* send, void* receive);
void hccl_barrier(Comm& comm);
