// Vectorising needs both; no-trapping-math changes no result.
#pragma GCC optimize("O3,no-trapping-math")
#include "hccl_reduce.h"

#include <cstring>
#include <type_traits>

#include "hccl_types.h"

namespace {

struct TypeInfo {
  uint32_t type;
  size_t size;
  const char* name;
};
constexpr TypeInfo kTypes[] = {
    {HCCL_INT8, 1, "int8"},       {HCCL_INT16, 2, "int16"},     {HCCL_INT32, 4, "int32"},
    {HCCL_FP16, 2, "fp16"},       {HCCL_FP32, 4, "fp32"},       {HCCL_INT64, 8, "int64"},
    {HCCL_UINT64, 8, "uint64"},   {HCCL_UINT8, 1, "uint8"},     {HCCL_UINT16, 2, "uint16"},
    {HCCL_UINT32, 4, "uint32"},   {HCCL_FP64, 8, "fp64"},       {HCCL_BF16, 2, "bf16"},
    {HCCL_INT128, 16, "int128"},  {HCCL_HIF8, 1, "hif8"},       {HCCL_FP8E4M3, 1, "fp8e4m3"},
    {HCCL_FP8E5M2, 1, "fp8e5m2"}, {HCCL_FP8E8M0, 1, "fp8e8m0"},
};

const TypeInfo* find(uint32_t type) {
  for (const TypeInfo& info : kTypes)
    if (info.type == type) return &info;
  return nullptr;
}

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Each element type T says what it is accumulated in and how to get there and back.
template <class T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static Acc load(Stored v) { return v; }
  static Stored store(Acc v) { return v; }
};

struct Bf16 {
  using Stored = uint16_t;
  using Acc = float;
  static Acc load(Stored v) { return bits_to_float(static_cast<uint32_t>(v) << 16); }
  static Stored store(Acc v) {
    uint32_t bits = float_to_bits(v);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return static_cast<Stored>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
};

struct Fp16 {
  using Stored = uint16_t;
  using Acc = float;
  // A half's exponent and mantissa, moved into a float's place, are 2^-112 of its value: multiplying by
  // 2^112 is exact, for subnormal halves too.
  static Acc load(Stored v) {
    uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16;
    uint32_t rest = static_cast<uint32_t>(v & 0x7fffu) << 13;
    float scaled = bits_to_float(rest) * bits_to_float(0x77800000u);
    uint32_t bits = (v & 0x7c00u) == 0x7c00u ? (rest | 0x7f800000u) : float_to_bits(scaled);
    return bits_to_float(bits | sign);
  }
  static Stored store(Acc v) {
    uint32_t bits = float_to_bits(v);
    uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    // All cases are computed and one is chosen, so that the compiler can vectorise the loop around this.
    // Below 2^-14, adding 0.5 lets the float unit round to the subnormal.
    uint32_t half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    uint32_t tiny = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000u;
    half = bits < 0x38800000u ? tiny : half;
    half = bits >= 0x477ff000u ? 0x7c00u : half;  // rounds to at least 65520: infinity
    half = bits > 0x7f800000u ? 0x7e00u : half;
    return static_cast<Stored>(sign | half);
  }
};

template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    return a + b;
  }
}

template <class A>
A multiply(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <class A>
A larger(A a, A b) {
  return b != b || a < b ? b : a;
}

template <class A>
A smaller(A a, A b) {
  return b != b || b < a ? b : a;
}

constexpr size_t kBlock = 1024;

template <class T, class Op>
void reduce_with(void* out, const void* const* sources, int n, size_t count, Op op) {
  using Stored = typename T::Stored;
  typename T::Acc acc[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    size_t length = count - start < kBlock ? count - start : kBlock;
    const Stored* first = static_cast<const Stored*>(sources[0]) + start;
    for (size_t i = 0; i < length; ++i) acc[i] = T::load(first[i]);
    for (int r = 1; r < n; ++r) {
      const Stored* next = static_cast<const Stored*>(sources[r]) + start;
      for (size_t i = 0; i < length; ++i) acc[i] = op(acc[i], T::load(next[i]));
    }
    Stored* to = static_cast<Stored*>(out) + start;
    for (size_t i = 0; i < length; ++i) to[i] = T::store(acc[i]);
  }
}

template <class T>
void reduce_type(void* out, const void* const* sources, int n, size_t count, uint32_t op) {
  using A = typename T::Acc;
  switch (op) {
    case HCCL_SUM:
      return reduce_with<T>(out, sources, n, count, [](A a, A b) { return add(a, b); });
    case HCCL_PROD:
      return reduce_with<T>(out, sources, n, count, [](A a, A b) { return multiply(a, b); });
    case HCCL_MAX:
      return reduce_with<T>(out, sources, n, count, [](A a, A b) { return larger(a, b); });
    case HCCL_MIN:
      return reduce_with<T>(out, sources, n, count, [](A a, A b) { return smaller(a, b); });
  }
}

}  // namespace

size_t hccl_type_size(uint32_t type) {
  const TypeInfo* info = find(type);
  return info == nullptr ? 0 : info->size;
}

const char* hccl_type_name(uint32_t type) {
  const TypeInfo* info = find(type);
  return info == nullptr ? "unknown" : info->name;
}

const char* hccl_reduction_name(uint32_t op) {
  static const char* const names[] = {"sum", "prod", "max", "min"};
  return op < 4 ? names[op] : "unknown";
}

bool hccl_can_reduce(uint32_t type, uint32_t op) {
  return op <= HCCL_MIN && (type <= HCCL_BF16);
}

bool hccl_is_floating(uint32_t type) {
  return type == HCCL_FP16 || type == HCCL_FP32 || type == HCCL_FP64 || type == HCCL_BF16;
}

// Compiled for AVX2 too where that exists; `flatten` puts the loops themselves into both versions.
#if defined(__x86_64__)
__attribute__((flatten, target_clones("avx2", "default")))
#endif
void hccl_reduce(void* out, const void* const* sources, int n, size_t count, uint32_t type, uint32_t op) {
  switch (type) {
    case HCCL_INT8: return reduce_type<Plain<int8_t>>(out, sources, n, count, op);
    case HCCL_INT16: return reduce_type<Plain<int16_t>>(out, sources, n, count, op);
    case HCCL_INT32: return reduce_type<Plain<int32_t>>(out, sources, n, count, op);
    case HCCL_INT64: return reduce_type<Plain<int64_t>>(out, sources, n, count, op);
    case HCCL_UINT8: return reduce_type<Plain<uint8_t>>(out, sources, n, count, op);
    case HCCL_UINT16: return reduce_type<Plain<uint16_t>>(out, sources, n, count, op);
    case HCCL_UINT32: return reduce_type<Plain<uint32_t>>(out, sources, n, count, op);
    case HCCL_UINT64: return reduce_type<Plain<uint64_t>>(out, sources, n, count, op);
    case HCCL_FP16: return reduce_type<Fp16>(out, sources, n, count, op);
    case HCCL_BF16: return reduce_type<Bf16>(out, sources, n, count, op);
    case HCCL_FP32: return reduce_type<Plain<float>>(out, sources, n, count, op);
    case HCCL_FP64: return reduce_type<Plain<double>>(out, sources, n, count, op);
  }
}
