// Messages between two ranks, through a ring of shared memory per ordered pair.
#pragma once

#include <cstdint>
#include <vector>

#include "hccl_comm.h"

// One message to send or to receive.
struct Message {
  bool sends;
  char* buffer;  // only read when sending
  uint64_t count;
  uint32_t type;
  uint32_t peer;
};

// Moves all messages at the same time and returns when all are done; messages between the same two ranks in
// the same direction keep their order. A send is done when its bytes are in the ring, so a short one (up to
// a ring, 64 to 256 KiB) does not wait for its receiver. Throws VnpuError and fails the communicator when
// sender and receiver disagree on count or type, or the peer does not come.
void hccl_transfer(Comm& comm, uint32_t op, const std::vector<Message>& messages);
