// What every HCCL entry point does around its work: find the communicator, run, record, count, report.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "hccl_comm.h"
#include "hccl_p2p.h"
#include "vnpu.h"

// Runs `work(comm)` and turns what it throws into a result code and the text for aclGetRecentErrMsg. No
// exception may leave a C entry point, so this is the one place that catches everything.
template <class Work>
int hccl_guarded(Work work) {
  try {
    return work();
  } catch (const VnpuError& error) {
    return vnpu_fail(error.code, "%s", error.what());
  } catch (const std::exception& error) {
    return vnpu_fail(HCCL_INTERNAL, "HCCL: %s", error.what());
  }
}

template <class Work>
int hccl_call(void* handle, uint32_t op, Work work) {
  std::shared_ptr<Comm> comm = hccl_comm(handle);
  if (comm == nullptr)
    return vnpu_fail(HCCL_PARA, "EI0003: %s: the communicator does not exist (any more)", hccl_op_name(op));
  return hccl_guarded([&] { return work(*comm); });
}

// Does the work and counts it under `op`.
void hccl_run_counted(Comm& comm, uint32_t op, uint64_t bytes, const std::function<void(Comm&)>& work);
// Does the work now and, while a graph is being captured, once more at each replay, on the same buffers.
int hccl_run(Comm& comm, uint32_t op, uint64_t bytes, std::function<void(Comm&)> work);

// Between HcclGroupStart and HcclGroupEnd messages are only collected, and then go together.
int hccl_group_start();
int hccl_group_end(const std::function<int(void* handle, std::vector<Message>)>& transfer);
// Collects the message if a group is open, otherwise passes it to `now`.
int hccl_group_or(void* handle, const Message& message, const std::function<int(const Message&)>& now);
