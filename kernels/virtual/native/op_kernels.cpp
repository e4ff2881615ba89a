#include "op_kernels.h"

#include <cstring>
#include <string>

#include "vnpu.h"

namespace vnpu {
namespace {

int64_t elements(const TensorDesc& desc) {
  int64_t n = 1;
  for (int64_t dim : desc.dims) n *= dim;
  return n;
}

// Bytes of one element of a tensor that fills its buffer.
size_t element_bytes(const OpTensor& tensor) {
  int64_t n = elements(*tensor.desc);
  return n > 0 ? tensor.buffer.bytes / static_cast<size_t>(n) : 0;
}

void fill(char* to, size_t count, const char* value, size_t size) {
  for (size_t i = 0; i < count; ++i) memcpy(to + i * size, value, size);
}

// Fill(shape, value) -> output: every element is the value.
std::function<void()> make_fill(const std::vector<OpTensor>& inputs, const std::vector<OpTensor>& outputs) {
  const OpTensor& value = inputs.at(1);
  const OpTensor& out = outputs.at(0);
  if (value.desc->type != out.desc->type) return nullptr;
  size_t size = element_bytes(value), count = static_cast<size_t>(elements(*out.desc));
  char* to = static_cast<char*>(out.buffer.data);
  const char* from = static_cast<const char*>(value.buffer.data);
  return [=] { fill(to, count, from, size); };
}

// One dimension of PadV3, then the next; `sizes` are those of the source.
struct Pad {
  std::vector<int64_t> sizes, before, after;
  size_t element;
  const char* value;

  void run(const char*& from, char*& to, size_t axis) const {
    if (axis == sizes.size()) {
      memcpy(to, from, element);
      from += element;
      to += element;
      return;
    }
    size_t row = element;
    for (size_t i = axis + 1; i < sizes.size(); ++i)
      row *= static_cast<size_t>(sizes[i] + before[i] + after[i]);
    to = filled(to, static_cast<size_t>(before[axis]) * row);
    for (int64_t i = 0; i < sizes[axis]; ++i) run(from, to, axis + 1);
    to = filled(to, static_cast<size_t>(after[axis]) * row);
  }
  char* filled(char* to, size_t bytes) const {
    fill(to, bytes / element, value, element);
    return to + bytes;
  }
};

// PadV3(input, paddings, value) -> output, mode "constant": `paddings` holds before and after per dimension.
std::function<void()> make_pad(const std::vector<OpTensor>& inputs, const std::vector<OpTensor>& outputs) {
  const OpTensor& in = inputs.at(0);
  const OpTensor& paddings = inputs.at(1);
  size_t dims = in.desc->dims.size();
  if (paddings.desc->type != ACL_INT32 || paddings.buffer.bytes < 2 * dims * sizeof(int32_t)) return nullptr;
  const int32_t* amounts = static_cast<const int32_t*>(paddings.buffer.data);
  Pad pad;
  pad.sizes = in.desc->dims;
  for (size_t i = 0; i < dims; ++i) {
    pad.before.push_back(amounts[2 * i]);
    pad.after.push_back(amounts[2 * i + 1]);
    if (pad.sizes[i] + pad.before[i] + pad.after[i] != outputs.at(0).desc->dims.at(i)) return nullptr;
  }
  pad.element = element_bytes(in);
  pad.value = static_cast<const char*>(inputs.at(2).buffer.data);
  const char* from = static_cast<const char*>(in.buffer.data);
  char* to = static_cast<char*>(outputs.at(0).buffer.data);
  return [=] {
    const char* source = from;
    char* target = to;
    pad.run(source, target, 0);
  };
}

}  // namespace

std::function<void()> find_op(const char* op, const std::vector<OpTensor>& inputs,
                              const std::vector<OpTensor>& outputs) {
  std::string name = op;
  if (name == "Fill" && inputs.size() == 2 && outputs.size() == 1) return make_fill(inputs, outputs);
  if (name == "PadV3" && inputs.size() == 3 && outputs.size() == 1) return make_pad(inputs, outputs);
  return nullptr;
}

}  // namespace vnpu
