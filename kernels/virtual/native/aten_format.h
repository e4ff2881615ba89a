// Casts between storage formats (aten_format.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace vnpu {

at::Tensor format_cast(const at::Tensor& x, int64_t format, std::optional<int64_t> customize_dtype,
                       std::optional<int64_t> input_dtype);

}  // namespace vnpu
