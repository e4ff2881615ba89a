// Making, finding and ending communicators; queries.
#include <string.h>

#include <algorithm>

#include "hccl_calls.h"
#include "hccl_comm.h"
#include "hccl_types.h"
#include "vnpu.h"

#define HCCL_API extern "C" __attribute__((visibility("default"))) int

namespace {

struct Config {
  std::string name;
  int32_t exec_timeout = HCCL_CONFIG_UNSET;
  uint32_t buffer_size = HCCL_BUFFER_UNSET;
};

Config read_config(const void* given) {
  Config config;
  if (given == nullptr) return config;
  const HcclConfigHead* head = static_cast<const HcclConfigHead*>(given);
  if (head->magic != HCCL_CONFIG_MAGIC)
    vnpu_throw(HCCL_PARA, "EI0003: HcclCommConfig was not initialised (magic word %08x)", head->magic);
  if (head->size >= offsetof(HcclConfigHead, deterministic)) config.buffer_size = head->buffer_size;
  if (head->size >= offsetof(HcclConfigHead, udi))
    config.name.assign(head->name, strnlen(head->name, HCCL_NAME_SIZE));
  if (head->size >= sizeof(HcclConfigHead)) config.exec_timeout = head->exec_timeout;
  return config;
}

int join(const RootInfo& root, uint32_t ranks, uint32_t rank, const Config& config, void** handle) {
  if (ranks == 0 || ranks > kMaxRanks)
    vnpu_throw(HCCL_PARA, "EI0003: a communicator has 1 to %u ranks, not %u", kMaxRanks, ranks);
  if (rank >= ranks) vnpu_throw(HCCL_PARA, "EI0003: rank %u does not exist among %u", rank, ranks);
  *handle = hccl_register(std::make_shared<Comm>(root, ranks, rank, config.name, config.exec_timeout, config.buffer_size));
  return HCCL_OK;
}

int init(uint32_t ranks, const void* info, uint32_t rank, const void* config, void** handle) {
  if (info == nullptr || handle == nullptr)
    return vnpu_fail(HCCL_PTR, "EI0003: HcclCommInitRootInfo: null pointer");
  RootInfo root;
  memcpy(&root, info, sizeof root);
  return hccl_guarded([&] { return join(root, ranks, rank, read_config(config), handle); });
}

int not_supported(const char* name) {
  return vnpu_fail(HCCL_NOT_SUPPORT, "%s is not supported by virtual NPUs", name);
}

// The first rank of the sub group founds it and shows the others where, in its block of the parent.
RootInfo meet_in_parent(Comm& parent, uint32_t first, uint64_t id) {
  RankBlock& block = parent.segment().rank(first);
  if (first == parent.rank()) {
    block.sub_root = Segment::found();
    block.sub_id = id;
    block.sub_open.store(1);
    parent.segment().header().join.ring();
    return block.sub_root;
  }
  parent.wait(
      kSubInit, parent.segment().header().join, hccl_timeout("HCCL_CONNECT_TIMEOUT", 120),
      [&] { return block.sub_open.load() == 1 && block.sub_id == id; },
      [&](uint32_t r) { return r == first && !(block.sub_open.load() == 1 && block.sub_id == id); });
  return block.sub_root;
}

int32_t g_settings[2] = {0, 0};

}  // namespace

HCCL_API HcclGetRootInfo(void* info) {
  if (info == nullptr) return vnpu_fail(HCCL_PTR, "EI0003: HcclGetRootInfo: null pointer");
  return hccl_guarded([&] {
    RootInfo root = Segment::found();
    memset(info, 0, HCCL_ROOT_INFO_SIZE);
    memcpy(info, &root, sizeof root);
    return HCCL_OK;
  });
}

HCCL_API HcclCommInitRootInfo(uint32_t ranks, const void* info, uint32_t rank, void** handle) {
  return init(ranks, info, rank, nullptr, handle);
}

HCCL_API HcclCommInitRootInfoConfig(uint32_t ranks, const void* info, uint32_t rank, const void* config,
                                    void** handle) {
  return init(ranks, info, rank, config, handle);
}

// `comm` points to the parent's handle. Ranks of the parent that are not in the sub group pass no ranks.
HCCL_API HcclCreateSubCommConfig(void** comm, uint32_t n, const uint32_t* ranks, uint64_t id, uint32_t rank,
                                 const void* config, void** handle) {
  if (comm == nullptr || handle == nullptr)
    return vnpu_fail(HCCL_PTR, "EI0003: HcclCreateSubCommConfig: null pointer");
  if (ranks == nullptr) {
    *handle = nullptr;
    return HCCL_OK;
  }
  return hccl_call(*comm, kSubInit, [&](Comm& parent) {
    parent.check_usable(kSubInit);
    bool listed = rank < n && ranks[rank] == parent.rank();
    if (!listed || std::any_of(ranks, ranks + n, [&](uint32_t r) { return r >= parent.ranks(); }))
      vnpu_throw(HCCL_PARA, "EI0003: HcclCreateSubCommConfig: rank %u of the sub group is not rank %u of %s", rank,
                 parent.rank(), parent.name().c_str());
    std::lock_guard<std::mutex> one_at_a_time(parent.sub_lock);
    RootInfo root = meet_in_parent(parent, ranks[0], id);
    int code = hccl_guarded([&] { return join(root, n, rank, read_config(config), handle); });
    // All have joined, or never will: nobody needs the notice any more.
    if (ranks[0] == parent.rank()) parent.segment().rank(parent.rank()).sub_open.store(0);
    return code;
  });
}

HCCL_API HcclCommDestroy(void* handle) {
  if (!hccl_unregister(handle))
    return vnpu_fail(HCCL_PARA, "EI0003: HcclCommDestroy: the communicator does not exist (any more)");
  return HCCL_OK;
}

HCCL_API HcclGetCommName(void* handle, char* name) {
  return hccl_call(handle, kNoOp, [&](Comm& comm) {
    snprintf(name, HCCL_NAME_SIZE, "%s", comm.name().c_str());
    return HCCL_OK;
  });
}

HCCL_API HcclGetRankSize(void* handle, uint32_t* size) {
  return hccl_call(handle, kNoOp, [&](Comm& comm) {
    *size = comm.ranks();
    return HCCL_OK;
  });
}

HCCL_API HcclGetRankId(void* handle, uint32_t* rank) {
  return hccl_call(handle, kNoOp, [&](Comm& comm) {
    *rank = comm.rank();
    return HCCL_OK;
  });
}

// Asked by torch_npu's watchdog thread, which ends the whole process at an error. Work is done when a call
// returns, so every error has been returned by the call that met it, and none is ever left over: a rank that is
// idle while the communicator fails is told at its next call.
HCCL_API HcclGetCommAsyncError(void* handle, int* error) {
  return hccl_call(handle, kNoOp, [&](Comm&) {
    *error = HCCL_OK;
    return HCCL_OK;
  });
}

extern "C" __attribute__((visibility("default"))) const char* HcclGetErrorString(int code) {
  static const char* const texts[] = {
      "no error",         "parameter error",       "empty pointer",   "memory error",         "internal error",
      "not support",      "not found",             "unavailable",     "call system error",    "timeout",
      "open file failure", "tcp connect failure",  "roce connect failure", "tcp transfer failure",
      "roce transfer failure", "call runtime failure", "call driver failure", "call profiling failure",
      "call cce failure", "call network failure",  "try again",       "remote error",         "suspending",
      "operation retry failed", "out of memory",
  };
  return code >= 0 && code < 25 ? texts[code] : "unknown error";
}

extern "C" __attribute__((visibility("default"))) uint32_t HcclGetCommConfigCapability() {
  return HCCL_CONFIG_FIELDS;
}

// 0: deterministic computation, 1: which engine runs collectives. Results are deterministic always, and there
// is one engine, so the values are only kept for HcclGetConfig.
HCCL_API HcclSetConfig(uint32_t key, int32_t value) {
  if (key > 1) return vnpu_fail(HCCL_PARA, "EI0003: HcclSetConfig: unknown key %u", key);
  g_settings[key] = value;
  return HCCL_OK;
}

HCCL_API HcclGetConfig(uint32_t key, int32_t* value) {
  if (key > 1) return vnpu_fail(HCCL_PARA, "EI0003: HcclGetConfig: unknown key %u", key);
  *value = g_settings[key];
  return HCCL_OK;
}

// torch_npu asks for these only when a rank table, several roots or one process with several devices is set
// up; with a rank table it then goes on with the root info.
HCCL_API HcclCommInitClusterInfo(const char*, uint32_t, void**) { return not_supported("HcclCommInitClusterInfo"); }
HCCL_API HcclCommInitClusterInfoConfig(const char*, uint32_t, void*, void**) {
  return not_supported("HcclCommInitClusterInfoConfig");
}
HCCL_API HcclGetRootInfoScalable(void*) { return not_supported("HcclGetRootInfoScalable"); }
HCCL_API HcclCommInitRootInfoScalable(uint32_t, uint32_t, const void*, uint32_t, uint32_t, const void*, void**) {
  return not_supported("HcclCommInitRootInfoScalable");
}
HCCL_API HcclCommInitAll(uint32_t, int32_t*, void**) { return not_supported("HcclCommInitAll"); }
HCCL_API HcclCommSuspend(void*) { return not_supported("HcclCommSuspend"); }
HCCL_API HcclCommResume(void*) { return not_supported("HcclCommResume"); }
HCCL_API HcclCommWorkingDevNicSet(void*, uint32_t*, bool*, uint32_t) {
  return not_supported("HcclCommWorkingDevNicSet");
}
HCCL_API HcclCommRegister(void*, void*, uint64_t, void**, uint32_t) { return not_supported("HcclCommRegister"); }
HCCL_API HcclCommDeregister(void*, void*) { return not_supported("HcclCommDeregister"); }
HCCL_API HcclCommExchangeMem(void*, void*, uint32_t*, uint32_t) { return not_supported("HcclCommExchangeMem"); }
HCCL_API HcclCommSymWinRegister(void*, void*, uint64_t, void**, uint32_t) {
  return not_supported("HcclCommSymWinRegister");
}
HCCL_API HcclCommSymWinDeregister(void*) { return not_supported("HcclCommSymWinDeregister"); }
HCCL_API HcclCommSetMemoryRange(void*, void*, size_t, size_t, uint64_t) {
  return not_supported("HcclCommSetMemoryRange");
}
HCCL_API HcclCommUnsetMemoryRange(void*, void*) { return not_supported("HcclCommUnsetMemoryRange"); }
HCCL_API HcclCommActivateCommMemory(void*, void*, size_t, size_t, void*, uint64_t) {
  return not_supported("HcclCommActivateCommMemory");
}
HCCL_API HcclCommDeactivateCommMemory(void*, void*) { return not_supported("HcclCommDeactivateCommMemory"); }
