// The part of the HCCL C ABI that torch_npu uses: values and layouts of hccl/hccl_types.h (CANN).
#pragma once

#include <cstddef>
#include <cstdint>

// Result codes.
constexpr int HCCL_OK = 0;
constexpr int HCCL_PARA = 1;           // parameter error
constexpr int HCCL_PTR = 2;            // null pointer
constexpr int HCCL_MEMORY = 3;         // memory error
constexpr int HCCL_INTERNAL = 4;       // internal error
constexpr int HCCL_NOT_SUPPORT = 5;    // feature not supported
constexpr int HCCL_NOT_FOUND = 6;      // resource not found
constexpr int HCCL_UNAVAIL = 7;        // resource unavailable
constexpr int HCCL_SYSCALL = 8;        // system call failed
constexpr int HCCL_TIMEOUT = 9;        // deadline passed
constexpr int HCCL_REMOTE = 21;        // the other end failed

// Data types; the numbers between are unused.
enum HcclType : uint32_t {
  HCCL_INT8 = 0,
  HCCL_INT16 = 1,
  HCCL_INT32 = 2,
  HCCL_FP16 = 3,
  HCCL_FP32 = 4,
  HCCL_INT64 = 5,
  HCCL_UINT64 = 6,
  HCCL_UINT8 = 7,
  HCCL_UINT16 = 8,
  HCCL_UINT32 = 9,
  HCCL_FP64 = 10,
  HCCL_BF16 = 11,
  HCCL_INT128 = 12,
  HCCL_HIF8 = 14,
  HCCL_FP8E4M3 = 15,
  HCCL_FP8E5M2 = 16,
  HCCL_FP8E8M0 = 17,
};

enum HcclReduction : uint32_t { HCCL_SUM = 0, HCCL_PROD = 1, HCCL_MAX = 2, HCCL_MIN = 3 };

constexpr size_t HCCL_ROOT_INFO_SIZE = 4108;
constexpr size_t HCCL_NAME_SIZE = 128;
constexpr uint32_t HCCL_CONFIG_MAGIC = 0xf0f0f0f0;
constexpr int32_t HCCL_CONFIG_UNSET = -1;
constexpr uint32_t HCCL_BUFFER_UNSET = 0xffffffff;
// HcclGetCommConfigCapability answers the number of the first configuration field that is not understood.
// 9: everything up to and including the execution time limit.
constexpr uint32_t HCCL_CONFIG_FIELDS = 9;

// The head of HcclCommConfig. `size` says how much of it the caller knows.
struct HcclConfigHead {
  uint64_t size;
  uint32_t magic;
  uint32_t version;
  uint64_t reserved;
  uint32_t buffer_size;
  uint32_t deterministic;
  char name[HCCL_NAME_SIZE];
  char udi[HCCL_NAME_SIZE];
  uint32_t op_expansion_mode;
  uint32_t rdma_traffic_class;
  uint32_t rdma_service_level;
  uint32_t world_rank;
  uint64_t job;
  uint8_t graph_zero_copy;
  int32_t exec_timeout;
};
static_assert(offsetof(HcclConfigHead, name) == 32, "layout of HcclCommConfig");
static_assert(offsetof(HcclConfigHead, exec_timeout) == 316, "layout of HcclCommConfig");

// One entry of HcclBatchSendRecv.
struct HcclP2pItem {
  uint32_t kind;  // 0 send, 1 receive
  void* buffer;
  uint64_t count;
  uint32_t type;
  uint32_t peer;
};
static_assert(sizeof(HcclP2pItem) == 32, "layout of HcclSendRecvItem");
