// Norms, rotary embedding, gated activation and cache writes; see aten_fast.h.
#include "aten_fast.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <map>

namespace vnpu::fast {

namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth another thread

template <class T>
VNPU_INLINE void norm_row(const T* a, const T* b, const T* gamma, int64_t n, float epsilon, T* y, T* total, float* rstd) {
  float sum = 0;
  if (b != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(total[i], load(a[i]) + load(b[i]));
    a = total;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load(a[i]) * load(a[i]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], load(a[i]) * scale * load(gamma[i]));
  *rstd = scale;
}

VNPU_SIMD void norm_rows(const float* a, const float* b, const float* gamma, int64_t rows, int64_t n, float epsilon, float* y,
                         float* total, float* rstd) {
  for (int64_t r = 0; r < rows; ++r)
    norm_row(a + r * n, b ? b + r * n : b, gamma, n, epsilon, y + r * n, total ? total + r * n : total, rstd + r);
}
VNPU_SIMD void norm_rows(const Bf16* a, const Bf16* b, const Bf16* gamma, int64_t rows, int64_t n, float epsilon, Bf16* y,
                         Bf16* total, float* rstd) {
  for (int64_t r = 0; r < rows; ++r)
    norm_row(a + r * n, b ? b + r * n : b, gamma, n, epsilon, y + r * n, total ? total + r * n : total, rstd + r);
}

template <class T>
T* data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

bool norm(Stack& stack, bool adds) {
  const size_t g = adds ? 2 : 1;
  if (!computes(stack[0])) return false;
  const at::Tensor x = stack[0].toTensor();
  const auto type = x.scalar_type();
  if (!plain(stack[0], type) || !plain(stack[g], type) || (adds && !plain(stack[1], type))) return false;
  const at::Tensor gamma = stack[g].toTensor(), other = adds ? stack[1].toTensor() : at::Tensor();
  if (x.dim() == 0 || x.numel() == 0 || gamma.dim() != 1 || gamma.size(0) != x.size(-1)) return false;
  if (adds && other.sizes() != x.sizes()) return false;
  at::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = 1;
  const at::Tensor y = at::empty(x.sizes(), x.options()), rstd = at::empty(shape, x.options().dtype(c10::kFloat));
  const at::Tensor total = adds ? at::empty(x.sizes(), x.options()) : at::Tensor();
  const int64_t n = x.size(-1), rows = x.numel() / n;
  const auto epsilon = static_cast<float>(stack[g + 1].toDouble());
  typed(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / n), [&](int64_t from, int64_t to) {
      const int64_t at = from * n;
      norm_rows(data<T>(x) + at, adds ? data<T>(other) + at : nullptr, data<T>(gamma), to - from, n, epsilon, data<T>(y) + at,
                adds ? data<T>(total) + at : nullptr, data<float>(rstd) + from);
    });
  });
  stack.clear();
  stack.insert(stack.end(), {y, rstd});
  if (adds) stack.emplace_back(total);
  return true;
}

bool rms_norm(const OpInfo&, Stack& stack) { return norm(stack, false); }
bool add_rms_norm(const OpInfo&, Stack& stack) { return norm(stack, true); }

template <class T>
VNPU_INLINE void swiglu_row(const T* x, int64_t half, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float gate = load(x[i]);
    store(y[i], round_to<T>(gate / (1.0f + exp(-gate))) * load(x[half + i]));
  }
}
VNPU_SIMD void swiglu_rows(const float* x, int64_t rows, int64_t half, float* y) {
  for (int64_t r = 0; r < rows; ++r) swiglu_row(x + 2 * r * half, half, y + r * half);
}
VNPU_SIMD void swiglu_rows(const Bf16* x, int64_t rows, int64_t half, Bf16* y) {
  for (int64_t r = 0; r < rows; ++r) swiglu_row(x + 2 * r * half, half, y + r * half);
}

bool swiglu(const OpInfo&, Stack& stack) {
  if (!computes(stack[0]) || !plain(stack[0], stack[0].toTensor().scalar_type())) return false;
  const at::Tensor x = stack[0].toTensor();
  const int64_t dim = stack[1].toInt();
  if (x.dim() == 0 || x.numel() == 0 || (dim != -1 && dim != x.dim() - 1) || x.size(-1) % 2 != 0) return false;
  at::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() /= 2;
  const at::Tensor y = at::empty(shape, x.options());
  const int64_t half = shape.back(), rows = y.numel() / half;
  typed(x.scalar_type(), [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / half), [&](int64_t from, int64_t to) {
      swiglu_rows(data<T>(x) + 2 * from * half, to - from, half, data<T>(y) + from * half);
    });
  });
  stack.clear();
  stack.emplace_back(y);
  return true;
}

// One head: what lies beyond the rotary part passes through.
template <class T>
VNPU_INLINE void rope_head(const T* x, const T* cos, const T* sin, int64_t rotary, int64_t size, int64_t apart, int64_t step, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < rotary / 2; ++i) {
    const float a = load(x[i * step]), b = load(x[i * step + apart]), c = load(cos[i]), s = load(sin[i]);
    store(y[i * step], a * c - b * s);
    store(y[i * step + apart], b * c + a * s);
  }
  for (int64_t i = rotary; i < size; ++i) y[i] = x[i];
}

struct Rope {
  int64_t rotary, size, apart, step;  // elements of a pair lie `apart`, pairs begin `step` apart
};
template <class T>
VNPU_INLINE void rope_token(const Rope& rope, const T* x, int64_t heads, const T* cos_sin, T* y) {
  for (int64_t h = 0; h < heads; ++h) {
    const T *in = x + h * rope.size, *sin = cos_sin + rope.rotary / 2;
    T* out = y + h * rope.size;
    if (rope.step == 1)  // constants let the loop be vectorised
      rope_head(in, cos_sin, sin, rope.rotary, rope.size, rope.apart, 1, out);
    else
      rope_head(in, cos_sin, sin, rope.rotary, rope.size, 1, 2, out);
  }
}
VNPU_SIMD void rope(const Rope& rope, const float* x, int64_t heads, const float* cos_sin, float* y) {
  rope_token(rope, x, heads, cos_sin, y);
}
VNPU_SIMD void rope(const Rope& rope, const Bf16* x, int64_t heads, const Bf16* cos_sin, Bf16* y) {
  rope_token(rope, x, heads, cos_sin, y);
}

bool rows_of(const at::Tensor& x, c10::ScalarType type, int64_t tokens, int64_t head) {
  return x.scalar_type() == type && x.dim() == 2 && x.size(0) == tokens && x.size(1) % head == 0 && x.stride(1) == 1;
}

// npu_mrope with one position per token.
bool mrope(const OpInfo&, Stack& stack) {
  if (!computes(stack[1])) return false;
  const at::Tensor positions = stack[0].toTensor(), query = stack[1].toTensor(), key = stack[2].toTensor(), cache = stack[3].toTensor();
  const auto type = query.scalar_type();
  const int64_t head = stack[4].toInt(), tokens = positions.dim() == 1 ? positions.size(0) : 0;
  if (tokens == 0 || head <= 0 || positions.scalar_type() != c10::kLong || !positions.is_contiguous()) return false;
  if (!rows_of(query, type, tokens, head) || !rows_of(key, type, tokens, head) || !plain(stack[3], type) || cache.dim() != 2)
    return false;
  const int64_t rotary = cache.size(1);
  if (rotary % (type == c10::kFloat ? 16 : 32) != 0 || rotary > head || !stack[6].isString() || !stack[7].isString()) return false;
  if (!stack[5].isNone())
    for (int64_t part : stack[5].toIntVector())
      if (part != 0) return false;
  const std::string mode = stack[6].toStringRef(), shared = stack[7].toStringRef();
  if ((mode != "half" && mode != "interleave") || (shared != "default" && shared != "interleave")) return false;
  const auto* position = positions.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    if (position[t] < 0 || position[t] >= cache.size(0)) return false;
  const at::Tensor q = at::empty(query.sizes(), query.options()), k = at::empty(key.sizes(), key.options());
  const Rope how = mode == "half" ? Rope{rotary, head, rotary / 2, 1} : Rope{rotary, head, 1, 2};
  typed(type, [&](auto* pointer) {
    using T = std::remove_pointer_t<decltype(pointer)>;
    at::parallel_for(0, tokens, std::max<int64_t>(1, kGrain / (q.size(1) + k.size(1))), [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        const T* cos_sin = data<T>(cache) + position[t] * rotary;
        rope(how, data<T>(query) + t * query.stride(0), q.size(1) / head, cos_sin, data<T>(q) + t * q.size(1));
        rope(how, data<T>(key) + t * key.stride(0), k.size(1) / head, cos_sin, data<T>(k) + t * k.size(1));
      }
    });
  });
  stack.clear();
  stack.insert(stack.end(), {q, k});
  return true;
}

// npu_scatter_pa_kv_cache in the plain layout.
bool write_cache(const OpInfo&, Stack& stack) {
  const auto type = stack[0].toTensor().scalar_type();
  for (size_t i = 0; i < 4; ++i)
    if (!plain(stack[i], type)) return false;
  if (!plain(stack[4], c10::kInt) || !stack[5].isNone() || !stack[6].isNone() || !stack[7].isNone()) return false;
  if (!computes(stack[0]) || !(stack[8].isNone() || stack[8].toStringRef() == "Norm")) return false;
  const at::Tensor slots = stack[4].toTensor();
  const at::Tensor keys = stack[2].toTensor(), values = stack[3].toTensor();
  for (size_t side = 0; side < 2; ++side) {
    const at::Tensor &x = stack[side].toTensor(), &cache = stack[side + 2].toTensor();
    if (x.dim() != 3 || cache.dim() != 4 || cache.size(2) != x.size(1) || cache.size(3) != x.size(2) || cache.size(1) % 16 != 0)
      return false;
    if (slots.dim() != 1 || x.size(0) != slots.size(0) || x.size(1) != stack[0].toTensor().size(1)) return false;
  }
  if (keys.size(0) != values.size(0) || keys.size(1) != values.size(1)) return false;
  const auto* slot = slots.const_data_ptr<int32_t>();
  const int64_t count = keys.size(0) * keys.size(1);
  for (int64_t t = 0; t < slots.size(0); ++t)
    if (slot[t] < -1 || slot[t] >= count) return false;
  for (size_t side = 0; side < 2; ++side) {
    const at::Tensor &x = stack[side].toTensor(), &cache = stack[side + 2].toTensor();
    const size_t bytes = static_cast<size_t>(x.size(1) * x.size(2)) * x.itemsize();
    const auto* from = static_cast<const char*>(x.const_data_ptr());
    auto* to = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t t = 0; t < slots.size(0); ++t)
      if (slot[t] >= 0) memcpy(to + static_cast<size_t>(slot[t]) * bytes, from + static_cast<size_t>(t) * bytes, bytes);
  }
  stack.clear();
  return true;
}

}  // namespace

Kernel find(const std::string& name) {
  static const std::map<std::string, Kernel> kernels = {
      {"npu::npu_rms_norm", rms_norm},
      {"npu::npu_add_rms_norm", add_rms_norm},
      {"npu::npu_swiglu", swiglu},
      {"npu::npu_mrope", mrope},
      {"npu::npu_scatter_pa_kv_cache", write_cache},
      {"npu::npu_fused_infer_attention_score", fused_attention},
      {"npu::npu_fused_infer_attention_score.out", fused_attention},
  };
  const auto found = kernels.find(name);
  return found == kernels.end() ? nullptr : found->second;
}

}  // namespace vnpu::fast
