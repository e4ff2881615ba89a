// Element types and reductions of the virtual NPU's HCCL.
#pragma once

#include <cstddef>
#include <cstdint>

// Bytes of one element, 0 for a data type that HCCL does not define.
size_t hccl_type_size(uint32_t type);
// "fp32" and the like; "unknown" for a number that HCCL does not define.
const char* hccl_type_name(uint32_t type);
const char* hccl_reduction_name(uint32_t op);
// True where hccl_reduce knows the pair.
bool hccl_can_reduce(uint32_t type, uint32_t op);
bool hccl_is_floating(uint32_t type);

// out[i] = sources[0][i] op sources[1][i] op ... in that order, so that a result depends on nothing but
// its inputs. fp16 and bf16 are accumulated in fp32 and rounded once (to nearest even), other types in
// their own; integers wrap around. `out` may be one of the sources. NaN wins in max and min.
void hccl_reduce(void* out, const void* const* sources, int n, size_t count, uint32_t type, uint32_t op);
