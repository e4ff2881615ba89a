// Operations that torch_npu runs through the old operator path from C++ of its own, where no registered
// kernel can be put in its place. They are few and only move bytes.
#pragma once

#include <acl/acl.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace vnpu {

// What torch_npu describes a tensor with; behind aclTensorDesc.
struct TensorDesc {
  aclDataType type;
  std::vector<int64_t> dims;
};

// Behind aclDataBuffer.
struct DataBuffer {
  void* data;
  size_t bytes;
};

struct OpTensor {
  const TensorDesc* desc;
  DataBuffer buffer;
};

// The work of operation `op` on these tensors, ready to run (again), or nothing when there is no kernel for
// it. Inputs that are read on the host, such as shapes, are read now.
std::function<void()> find_op(const char* op, const std::vector<OpTensor>& inputs,
                              const std::vector<OpTensor>& outputs);

}  // namespace vnpu
