// Compiled forms of the references that a decode step calls once or twice a layer. Each takes only the plain
// case, which it checks in full, and leaves every other call, wrong ones above all, to the Python reference: that
// is the one that says what the operation is, and raises its errors. Results agree up to the order of sums.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "aten_call.h"

// Loops are compiled for several processors, and the best is taken when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VNPU_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VNPU_SIMD
#endif
#define VNPU_INLINE inline __attribute__((always_inline))

namespace vnpu::fast {

using Kernel = bool (*)(const OpInfo& info, Stack& stack);

// The compiled form of this operation, or null. It returns false when it left the call alone.
Kernel find(const std::string& name);

bool fused_attention(const OpInfo& info, Stack& stack);

struct Bf16 {
  uint16_t bits;
};
VNPU_INLINE float load(float x) { return x; }
VNPU_INLINE float load(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
VNPU_INLINE void store(float& to, float x) { to = x; }
VNPU_INLINE void store(Bf16& to, float x) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}
template <class T>
VNPU_INLINE float round_to(float x) {
  T value;
  store(value, x);
  return load(value);
}

// e^x within 2 units in the last place for x in [-87, 88]; arguments outside are taken as the nearer end.
VNPU_INLINE float exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float y = 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return y * scale;
}

// True for a defined, contiguous tensor of this type.
inline bool plain(const IValue& value, c10::ScalarType type) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == type &&
         value.toTensor().is_contiguous();
}
// The types that are worth it: the checking type and the one of most models.
inline bool computes(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         (value.toTensor().scalar_type() == c10::kBFloat16 || value.toTensor().scalar_type() == c10::kFloat);
}
// Calls `work` with a null pointer of the element type.
template <class Work>
void typed(c10::ScalarType type, Work work) {
  if (type == c10::kFloat)
    work(static_cast<float*>(nullptr));
  else
    work(static_cast<Bf16*>(nullptr));
}

}  // namespace vnpu::fast
