// Matrix products with weights. oneDNN computes in a layout of its own and would bring the weight into it at
// every call, which costs more than the product of a decode step; so a weight that is used again and again
// without being written is kept in that layout as well.
#include <ATen/Context.h>
#include <ATen/core/TensorBody.h>

#include <mutex>
#include <unordered_map>

#include "aten_call.h"
#include "written.h"

namespace vnpu {

namespace {

constexpr int64_t kSmallest = 1 << 16;     // elements: below, the layout does not matter
constexpr size_t kMostBytes = 4ull << 30;  // of host memory for all packed weights of this process
constexpr int kUsesFirst = 4;              // what is used this often unchanged is a weight;
constexpr int kMostDoublings = 6;          // after each change it has to be used twice as often

struct Weight {
  int64_t rows = 0, columns = 0;
  std::atomic<bool>* changed = nullptr;
  int uses = 0, changes = 0;
  at::Tensor packed;
};

std::mutex mutex;
std::unordered_map<const void*, Weight> weights;  // by address
size_t packed_bytes = 0;
bool possible = at::hasMKLDNN();

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

at::Tensor pack(const at::Tensor& weight) {
  Stack stack{weight, c10::IValue()};
  static const c10::OperatorHandle reorder = find("mkldnn::_reorder_linear_weight");
  DeviceMemory host(false);  // the layout is the host's affair: no memory of the device
  try {
    reorder.callBoxed(stack);
  } catch (const c10::Error&) {  // this processor has no bfloat16 product in oneDNN
    possible = false;
    return {};
  }
  return stack.back().toTensor();
}

void forget(Weight& weight) {
  if (weight.packed.defined()) packed_bytes -= static_cast<size_t>(weight.rows * weight.columns) * sizeof(c10::BFloat16);
  weight.packed.reset();
  weight.uses = 0;
}

// Memory that changed since it was last used may belong to something else by now.
void forget_changed() {
  for (auto at = weights.begin(); at != weights.end();) {
    Weight& weight = at->second;
    if (weight.changed == nullptr || !weight.changed->load()) {
      ++at;
      continue;
    }
    forget(weight);
    unwatch(weight.changed);
    at = weights.erase(at);
  }
}

// The packed form of a weight [rows, columns], if there is one yet.
at::Tensor packed_form(const at::Tensor& weight) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!possible) return {};
  if (weights.count(weight.const_data_ptr()) == 0) forget_changed();
  Weight& known = weights[weight.const_data_ptr()];
  const size_t bytes = weight.nbytes();
  if (known.changed == nullptr || known.rows != weight.size(0) || known.columns != weight.size(1)) {
    forget(known);
    if (known.changed != nullptr) unwatch(known.changed);
    known = {weight.size(0), weight.size(1), watch(weight.const_data_ptr(), bytes), 0, known.changes};
  }
  if (known.changed->exchange(false)) {
    forget(known);
    known.changes = std::min(known.changes + 1, kMostDoublings);
  }
  if (++known.uses >= kUsesFirst << known.changes && !known.packed.defined() && packed_bytes + bytes <= kMostBytes) {
    known.packed = pack(weight);
    if (known.packed.defined()) packed_bytes += bytes;
  }
  return known.packed;
}

bool is_bfloat16(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().scalar_type() == c10::kBFloat16;
}

bool is_vector(const IValue& value, int64_t size) {
  return is_bfloat16(value) && value.toTensor().dim() == 1 && value.toTensor().size(0) == size && value.toTensor().is_contiguous();
}

// x [..., columns] times the transpose of weight [rows, columns], plus bias [rows].
struct Product {
  at::Tensor x, weight;
  IValue bias;
};

// What linear(x, weight, bias?), matmul(x, weight.t()), mm alike, or addmm(bias, x, weight.t(), beta=1, alpha=1)
// computes; no x when it is not of this kind.
Product product_of(const OpInfo& info, const Stack& stack) {
  const bool adds = info.product == Multiply::kAddMm, linear = info.product == Multiply::kLinear;
  const size_t first = adds ? 1 : 0;
  if (!is_bfloat16(stack[first]) || !is_bfloat16(stack[first + 1])) return {};
  const at::Tensor& x = stack[first].toTensor();
  const at::Tensor& given = stack[first + 1].toTensor();
  if (given.dim() != 2 || given.numel() < kSmallest) return {};
  const at::Tensor weight = linear ? given : given.t();
  if (!weight.is_contiguous() || !x.is_contiguous() || x.numel() == 0) return {};
  if (x.dim() < 2 || (adds && x.dim() != 2)) return {};
  if (x.size(-1) != weight.size(1)) return {};
  IValue bias = adds ? stack[0] : linear ? stack[2] : IValue();
  if (!bias.isNone() && !is_vector(bias, weight.size(0))) return {};
  if (adds && (stack[3].toScalar().toDouble() != 1 || stack[4].toScalar().toDouble() != 1)) return {};
  return {x, weight, std::move(bias)};
}

}  // namespace

bool run_packed(const OpInfo& info, Stack& stack) {
  Product product = product_of(info, stack);
  if (!product.x.defined()) return false;
  at::Tensor packed = packed_form(product.weight);
  if (!packed.defined()) return false;
  static const c10::OperatorHandle linear = find("mkldnn::_linear_pointwise");
  Stack call{product.x, std::move(packed), std::move(product.bias), "none", c10::List<std::optional<at::Scalar>>(), ""};
  linear.callBoxed(call);
  stack = std::move(call);
  return true;
}

}  // namespace vnpu
