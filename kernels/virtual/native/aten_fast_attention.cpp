// npu_fused_infer_attention_score for decode: few queries per request over paged keys; see aten_fast.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aten_fast.h"

namespace vnpu::fast {

namespace {

constexpr int64_t kMostQueries = 8;  // of one request; with more, the reference's matrix products are faster
constexpr int64_t kMaskSide = 2048;

// Where the arguments that this kernel knows stand in the schema; all others must have their defaults.
struct Places {
  explicit Places(const c10::FunctionSchema& schema) {
    const std::unordered_set<std::string> known = {
        "query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table", "num_heads",
        "scale", "pre_tokens", "next_tokens", "input_layout", "num_key_value_heads", "sparse_mode", "inner_precise", "block_size",
        "workspace", "out"};
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      at[argument.name()] = i;
      if (known.count(argument.name()) != 0) continue;
      const IValue value = argument.default_value().value_or(IValue());
      (value.isNone() ? absent : zero).push_back(i);
    }
  }
  bool others_are_default(const Stack& stack) const {
    for (size_t i : absent)
      if (!stack[i].isNone()) return false;
    for (size_t i : zero)
      if (stack[i].isBool() ? stack[i].toBool() : stack[i].toInt() != 0) return false;
    return true;
  }
  const IValue& operator()(const Stack& stack, const char* name) const { return stack[at.at(name)]; }

  std::unordered_map<std::string, size_t> at;
  std::vector<size_t> absent, zero;
};

const Places& places(const OpInfo& info) {
  static std::mutex mutex;
  static std::unordered_map<const OpInfo*, Places> known;
  std::lock_guard<std::mutex> lock(mutex);
  return known.try_emplace(&info, info.op.schema()).first->second;
}

struct Call {
  at::Tensor query, key, value, table, out;
  std::vector<int64_t> ends, lengths;
  int64_t key_heads = 0, block = 0, window = 0;  // window 0: all keys
  float scale = 1;
};

bool numbers(const IValue& value, std::vector<int64_t>& out) {
  if (!value.isList()) return false;
  for (const IValue& item : value.toListRef()) {
    if (!item.isInt()) return false;
    out.push_back(item.toInt());
  }
  return true;
}

// The compressed causal mask. Its content is read once per address, as in the reference.
bool is_causal_mask(const IValue& value) {
  static std::mutex mutex;
  static std::unordered_set<const void*> seen;
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& mask = value.toTensor();
  const auto type = mask.scalar_type();
  if (type != c10::kBool && type != c10::kChar && type != c10::kByte) return false;
  if (mask.dim() < 2 || mask.dim() > 4 || mask.numel() != kMaskSide * kMaskSide || mask.size(-1) != kMaskSide || !mask.is_contiguous())
    return false;
  const auto* at = static_cast<const uint8_t*>(mask.const_data_ptr());
  std::lock_guard<std::mutex> lock(mutex);
  if (seen.count(at) != 0 && at[1] != 0) return true;
  for (int64_t i = 0; i < kMaskSide; ++i)
    for (int64_t j = 0; j < kMaskSide; ++j)
      if ((at[i * kMaskSide + j] != 0) != (j > i)) return false;
  if (seen.size() > 64) seen.clear();
  seen.insert(at);
  return true;
}

bool pages_fit(const Call& call, int64_t heads) {
  const int64_t size = call.query.size(2), row = call.key_heads * size;
  if (size % 16 != 0 || size <= 0 || size > 512 || row > 65535) return false;
  if (call.key_heads <= 0 || heads % call.key_heads != 0 || heads / call.key_heads > 64) return false;
  if (call.block <= 0 || call.block > 512 || call.block % 16 != 0) return false;
  for (const at::Tensor* x : {&call.key, &call.value})
    if (x->dim() != 3 || x->size(0) != call.key.size(0) || x->size(1) != call.block || x->size(2) != row) return false;
  return call.table.dim() == 2;
}

// Lengths against shapes and each other, and every block that will be read.
bool lengths_fit(const Call& call) {
  if (call.lengths.size() != call.ends.size() || call.ends.empty() || call.ends.back() != call.query.size(0)) return false;
  if (call.table.size(0) != static_cast<int64_t>(call.lengths.size())) return false;
  const auto* table = call.table.const_data_ptr<int32_t>();
  int64_t start = 0;
  for (size_t r = 0; r < call.ends.size(); ++r) {
    const int64_t queries = call.ends[r] - start, keys = call.lengths[r], blocks = (keys + call.block - 1) / call.block;
    if (queries < 0 || queries > kMostQueries || keys < 0 || (keys != 0 && keys < queries) || blocks > call.table.size(1)) return false;
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t id = table[static_cast<int64_t>(r) * call.table.size(1) + b];
      if (id < 0 || id >= call.key.size(0)) return false;
    }
    start = call.ends[r];
  }
  return true;
}

bool outputs_fit(const IValue& out, const at::Tensor& query) {
  const auto targets = out.toTensorVector();
  return targets.size() == 2 && targets[0].sizes() == query.sizes() && targets[0].scalar_type() == query.scalar_type() &&
         targets[0].is_contiguous() && targets[1].scalar_type() == c10::kFloat;
}

bool read(const Places& at, const Stack& stack, Call& call) {
  if (!computes(stack[0]) || !at.others_are_default(stack)) return false;
  const auto type = stack[0].toTensor().scalar_type();
  for (size_t i = 0; i < 3; ++i)
    if (!plain(stack[i], type)) return false;
  if (!plain(at(stack, "block_table"), c10::kInt) || at(stack, "input_layout").toStringRef() != "TND") return false;
  call.query = stack[0].toTensor();
  call.key = stack[1].toTensor();
  call.value = stack[2].toTensor();
  call.table = at(stack, "block_table").toTensor();
  const int64_t heads = at(stack, "num_heads").toInt(), mode = at(stack, "sparse_mode").toInt(), precise = at(stack, "inner_precise").toInt();
  call.key_heads = at(stack, "num_key_value_heads").toInt() != 0 ? at(stack, "num_key_value_heads").toInt() : heads;
  call.block = at(stack, "block_size").toInt();
  call.scale = static_cast<float>(at(stack, "scale").toDouble());
  if (call.query.dim() != 3 || call.query.size(1) != heads || (precise != 0 && precise != 1) || !pages_fit(call, heads)) return false;
  const int64_t before = at(stack, "pre_tokens").toInt();
  if (mode == 4 && (at(stack, "next_tokens").toInt() != 0 || before < 0)) return false;
  if (mode != 3 && mode != 4) return false;
  call.window = mode == 4 ? before + 1 : 0;
  if (!is_causal_mask(at(stack, "atten_mask"))) return false;
  if (!numbers(at(stack, "actual_seq_lengths"), call.ends) || !numbers(at(stack, "actual_seq_lengths_kv"), call.lengths)) return false;
  return lengths_fit(call);
}

// One query head group of one request: `rows` = queries x group.
template <class T>
struct Group {
  const T* query;   // [queries][heads][size], at the first head of the group
  T* out;           // likewise
  const T *key, *value;
  const int32_t* blocks;
  int64_t queries, group, heads, key_heads, head, size, block, keys, window;
  float scale;
};

template <class T>
VNPU_INLINE void attend(const Group<T>& g, int64_t size, float* scores, float* query, float* row, float* sum) {
  const int64_t stride = g.key_heads * size, rows = g.queries * g.group;
  for (int64_t q = 0; q < g.queries; ++q)
    for (int64_t h = 0; h < g.group; ++h)
#pragma omp simd
      for (int64_t d = 0; d < size; ++d)
        query[(q * g.group + h) * size + d] = load(g.query[(q * g.heads + h) * size + d]) * g.scale;
  // the keys of the first query begin first
  const int64_t oldest = g.keys - g.queries + 1, first = g.window > 0 && oldest > g.window ? oldest - g.window : 0;
  const int64_t width = g.keys - first;
  for (int64_t k = first; k < g.keys; ++k) {
    const T* at = g.key + (static_cast<int64_t>(g.blocks[k / g.block]) * g.block + k % g.block) * stride + g.head * size;
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) row[d] = load(at[d]);
    for (int64_t r = 0; r < rows; ++r) {
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < size; ++d) dot += row[d] * query[r * size + d];
      scores[r * width + k - first] = dot;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t end = g.keys - g.queries + r / g.group + 1;  // one past the last key that this query sees
    const int64_t begin = g.window > 0 && end > g.window ? end - g.window : 0;
    float* s = scores + r * width - first;
    float most = s[begin], total = 0;
#pragma omp simd reduction(max : most)
    for (int64_t k = begin; k < end; ++k) most = s[k] > most ? s[k] : most;
#pragma omp simd reduction(+ : total)
    for (int64_t k = begin; k < end; ++k) {
      s[k] = exp(s[k] - most);
      total += s[k];
    }
    for (int64_t k = first; k < begin; ++k) s[k] = 0;
    for (int64_t k = end; k < g.keys; ++k) s[k] = 0;
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t k = begin; k < end; ++k) s[k] = round_to<T>(s[k] * inverse);
  }
  for (int64_t i = 0; i < rows * size; ++i) sum[i] = 0;
  for (int64_t k = first; k < g.keys; ++k) {
    const T* at = g.value + (static_cast<int64_t>(g.blocks[k / g.block]) * g.block + k % g.block) * stride + g.head * size;
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) row[d] = load(at[d]);
    for (int64_t r = 0; r < rows; ++r) {
      const float p = scores[r * width + k - first];
#pragma omp simd
      for (int64_t d = 0; d < size; ++d) sum[r * size + d] += p * row[d];
    }
  }
  for (int64_t q = 0; q < g.queries; ++q)
    for (int64_t h = 0; h < g.group; ++h)
#pragma omp simd
      for (int64_t d = 0; d < size; ++d) store(g.out[(q * g.heads + h) * size + d], sum[(q * g.group + h) * size + d]);
}

// Loops of known length are unrolled, which halves the time.
template <class T>
VNPU_INLINE void attend_sized(const Group<T>& g, float* scores, float* query, float* row, float* sum) {
  if (g.size == 64) return attend(g, 64, scores, query, row, sum);
  if (g.size == 128) return attend(g, 128, scores, query, row, sum);
  attend(g, g.size, scores, query, row, sum);
}
VNPU_SIMD void attend_group(const Group<float>& g, float* scores, float* query, float* row, float* sum) {
  attend_sized(g, scores, query, row, sum);
}
VNPU_SIMD void attend_group(const Group<Bf16>& g, float* scores, float* query, float* row, float* sum) {
  attend_sized(g, scores, query, row, sum);
}

template <class T>
void compute(const Call& call, const at::Tensor& out) {
  const int64_t heads = call.query.size(1), size = call.query.size(2), group = heads / call.key_heads;
  const auto requests = static_cast<int64_t>(call.ends.size());
  const auto* table = call.table.const_data_ptr<int32_t>();
  at::parallel_for(0, requests * call.key_heads, 4, [&](int64_t from, int64_t to) {
    std::vector<float> memory;
    for (int64_t item = from; item < to; ++item) {
      const int64_t r = item / call.key_heads, head = item % call.key_heads;
      const int64_t start = r == 0 ? 0 : call.ends[r - 1], queries = call.ends[r] - start, rows = queries * group;
      if (queries == 0) continue;
      const int64_t offset = (start * heads + head * group) * size;
      if (call.lengths[r] == 0) {  // no keys: zeros
        for (int64_t q = 0; q < queries; ++q)
          memset(static_cast<T*>(out.mutable_data_ptr()) + offset + q * heads * size, 0, sizeof(T) * group * size);
        continue;
      }
      memory.resize(rows * (call.lengths[r] + 2 * size) + size);
      float *scores = memory.data(), *query = scores + rows * call.lengths[r], *sum = query + rows * size, *row = sum + rows * size;
      const Group<T> g{static_cast<const T*>(call.query.const_data_ptr()) + offset,
                       static_cast<T*>(out.mutable_data_ptr()) + offset,
                       static_cast<const T*>(call.key.const_data_ptr()),
                       static_cast<const T*>(call.value.const_data_ptr()),
                       table + r * call.table.size(1),
                       queries, group, heads, call.key_heads, head, size, call.block, call.lengths[r], call.window, call.scale};
      attend_group(g, scores, query, row, sum);
    }
  });
}

}  // namespace

bool fused_attention(const OpInfo& info, Stack& stack) {
  const Places& at = places(info);
  const bool into = info.out_list >= 0;
  Call call;
  if (!read(at, stack, call)) return false;
  at::Tensor out, lse;
  if (into) {
    const IValue& workspace = at(stack, "workspace");
    if (!workspace.isNone() && workspace.toTensor().scalar_type() != c10::kByte) return false;
    if (!outputs_fit(at(stack, "out"), call.query)) return false;
    const auto targets = at(stack, "out").toTensorVector();
    out = targets[0];
    lse = targets[1];
  } else {
    out = at::empty_like(call.query);
    lse = at::empty({0}, call.query.options().dtype(c10::kFloat));
  }
  typed(call.query.scalar_type(), [&](auto* t) { compute<std::remove_pointer_t<decltype(t)>>(call, out); });
  stack.clear();
  stack.insert(stack.end(), {out, lse});
  return true;
}

}  // namespace vnpu::fast
