// Null mode: an operation with floating-point input computes nothing. It gives results of the right shape:
// floating-point ones are uninitialised, integer ones are zero, so that ids and indices stay in range.
// Views, copies, what the host waits for, and integer arithmetic (positions, slots) run as usual.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/TensorBody.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_strided.h>

#include <unordered_map>

#include "aten_call.h"
#include "vnpu.h"

namespace vnpu {

namespace {

using Shape = c10::SmallVector<int64_t, 5>;

const at::Tensor& tensor_at(const Stack& stack, size_t index) { return stack[index].toTensor(); }
Shape shape_of(const at::Tensor& tensor) { return Shape(tensor.sizes().begin(), tensor.sizes().end()); }

at::Tensor blank(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType type, c10::Device device) {
  auto tensor = at::empty_strided(sizes, strides, at::TensorOptions().dtype(type).device(device));
  return c10::isIntegralType(type, /*includeBool=*/true) ? tensor.zero_() : tensor;
}

c10::Device npu_device() {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(vnpu_device())};
}

at::Tensor blank(const Shape& sizes, c10::Device device, c10::ScalarType type) {
  Shape strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides[i] = step;
  return blank(sizes, strides, type, device);
}
at::Tensor blank(const Shape& sizes, const at::Tensor& like) { return blank(sizes, like.device(), like.scalar_type()); }

bool has_float_input(const Stack& stack) {
  const auto is_float = [](const at::Tensor& tensor) {
    return tensor.defined() && !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  };
  for (const IValue& value : stack) {
    if (value.isTensor() && is_float(value.toTensor())) return true;
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector())
        if (is_float(tensor)) return true;
  }
  return false;
}

// The results of the operations of a decode step, written out because a Meta kernel would cost more than
// the host overhead that this mode measures. Each returns false when it meets arguments it does not know.
using Rule = bool (*)(Stack&);

void results(Stack& stack, std::initializer_list<at::Tensor> tensors) {
  Stack out;
  for (const at::Tensor& tensor : tensors) out.emplace_back(tensor);
  stack.swap(out);
}

bool like_first(Stack& stack) {
  const at::Tensor& x = tensor_at(stack, 0);
  results(stack, {blank(shape_of(x), x)});
  return true;
}

bool matrix_product(Stack& stack, const at::Tensor& a, int64_t columns) {
  Shape sizes = shape_of(a);
  sizes.back() = columns;
  results(stack, {blank(sizes, a)});
  return true;
}
bool mm(Stack& stack) { return matrix_product(stack, tensor_at(stack, 0), tensor_at(stack, 1).size(-1)); }
bool addmm(Stack& stack) { return matrix_product(stack, tensor_at(stack, 1), tensor_at(stack, 2).size(-1)); }
bool matmul(Stack& stack) {
  if (tensor_at(stack, 0).dim() < 2 || tensor_at(stack, 1).dim() != 2) return false;
  return mm(stack);
}
bool linear(Stack& stack) { return matrix_product(stack, tensor_at(stack, 0), tensor_at(stack, 1).size(0)); }

bool embedding(Stack& stack) {
  Shape sizes = shape_of(tensor_at(stack, 1));
  sizes.push_back(tensor_at(stack, 0).size(-1));
  results(stack, {blank(sizes, tensor_at(stack, 0))});
  return true;
}

at::Tensor rstd_of(const at::Tensor& x, const at::Tensor& gamma) {
  Shape sizes = shape_of(x);
  for (int64_t i = 0; i < gamma.dim(); ++i) sizes[sizes.size() - 1 - static_cast<size_t>(i)] = 1;
  return blank(sizes, x.device(), c10::kFloat);
}
bool rms_norm(Stack& stack) {
  const at::Tensor x = tensor_at(stack, 0);
  results(stack, {blank(shape_of(x), x), rstd_of(x, tensor_at(stack, 1))});
  return true;
}
bool add_rms_norm(Stack& stack) {
  const at::Tensor x = tensor_at(stack, 0);
  results(stack, {blank(shape_of(x), x), rstd_of(x, tensor_at(stack, 2)), blank(shape_of(x), x)});
  return true;
}
bool swiglu(Stack& stack) {
  const at::Tensor x = tensor_at(stack, 0);
  Shape sizes = shape_of(x);
  const int64_t dim = c10::maybe_wrap_dim(stack[1].toInt(), x.dim());
  sizes[static_cast<size_t>(dim)] /= 2;
  results(stack, {blank(sizes, x)});
  return true;
}
bool mrope(Stack& stack) {
  const at::Tensor q = tensor_at(stack, 1), k = tensor_at(stack, 2);
  results(stack, {blank(shape_of(q), q), blank(shape_of(k), k)});
  return true;
}

const std::unordered_map<std::string, Rule>& rules() {
  static const std::unordered_map<std::string, Rule> table = {
      {"aten::mm", mm},
      {"aten::addmm", addmm},
      {"aten::matmul", matmul},
      {"aten::linear", linear},
      {"aten::embedding", embedding},
      {"npu::npu_rms_norm", rms_norm},
      {"npu::npu_gemma_rms_norm", rms_norm},
      {"npu::npu_add_rms_norm", add_rms_norm},
      {"npu::npu_swiglu", swiglu},
      {"npu::npu_rotary_mul", like_first},
      {"npu::npu_mrope", mrope},
  };
  return table;
}

IValue to_meta(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) {
    const at::Tensor& x = value.toTensor();
    return at::detail::empty_strided_symint_meta(x.sym_sizes(), x.sym_strides(), x.scalar_type());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_meta(tensor).toTensor());
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kMeta);
  return value.isGenerator() ? IValue() : value;
}

IValue from_meta(const IValue& value, c10::Device device) {
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(from_meta(tensor, device).toTensor());
    return list;
  }
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const at::Tensor& x = value.toTensor();
  return blank(x.sizes(), x.strides(), x.scalar_type(), device);
}

bool by_place(const OpInfo& info, Stack& stack) {
  at::native::ResultTypeState types{};
  std::optional<at::DimVector> sizes;
  for (const IValue& value : stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& x = value.toTensor();
    sizes = sizes ? at::infer_size_dimvector(*sizes, x.sizes()) : at::DimVector(x.sizes());
    if (x.is_complex()) return false;
    if (x.scalar_type() != c10::kBool || !info.predicate) types = at::native::update_result_type_state(x, types);
  }
  const auto type = info.predicate ? c10::kBool : at::native::result_type(types);
  results(stack, {blank(Shape(sizes->begin(), sizes->end()), npu_device(), type)});
  return true;
}

// Asks the Meta kernel for the shapes; false when the operation has none that works.
bool by_meta(const OpInfo& info, Stack& stack) {
  if (info.no_meta || !info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  Stack meta;
  for (const IValue& value : stack) meta.push_back(to_meta(value));
  try {
    info.op.callBoxed(meta);
  } catch (const c10::Error&) {  // shapes that depend on data, or an incomplete Meta kernel: compute it
    info.no_meta = true;
    return false;
  }
  for (IValue& value : meta) value = from_meta(value, npu_device());
  stack.swap(meta);
  return true;
}

}  // namespace

bool run_null(const OpInfo& info, Stack& stack) {
  if (info.copy || info.waits || info.view || info.zero || !has_float_input(stack)) return false;
  if (info.only_writes) {
    return_written(info, stack);
    return true;
  }
  const auto rule = rules().find(info.name);
  if (rule != rules().end() && rule->second(stack)) return true;
  return (info.pointwise && by_place(info, stack)) || by_meta(info, stack);
}

}  // namespace vnpu
