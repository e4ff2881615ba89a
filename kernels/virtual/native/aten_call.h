// The boxed kernel of the virtual NPU: runs an operation on npu tensors by running its CPU kernel over the
// same memory. These parts make up one call.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <optional>
#include <string>

namespace vnpu {

using c10::IValue;
using torch::jit::Stack;

enum class Multiply { kNone, kLinear, kMatmul, kAddMm };  // products that may have a weight

// What the kernel knows about one overload; lives as long as the process.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);

  c10::OperatorHandle op;
  std::string name;            // "aten::add.Tensor"
  bool reference = false;      // npu:: or atb::, run by a Python reference
  bool mutates = false;        // some argument is written
  bool only_writes = false;    // and all results are such arguments, so nothing is allocated
  bool waits = false;          // the host waits for the result (item, nonzero, ...)
  bool copy = false;           // aten::copy_ or aten::_to_copy, between devices maybe
  bool view = false;           // some result is a view of an argument
  bool zero = false;           // aten::zero_
  bool index = false;          // aten::index.Tensor, which waits when an index is a mask
  bool pointwise = false;      // one result, each element from the elements at its place
  bool predicate = false;      // and that result is a bool
  Multiply product = Multiply::kNone;
  bool (*fast)(const OpInfo&, Stack&) = nullptr;  // the compiled form of a reference; see aten_fast.h
  c10::SmallVector<size_t, 4> written;  // the arguments that are written
  mutable std::atomic<bool> no_meta{false};  // null mode found no Meta kernel that works
  int generator = -1;          // index of the Generator argument
  int out_list = -1;           // index of a Tensor[] argument "out", which npu:: schemas leave unmarked
  size_t inputs = 0;
  std::atomic<uint64_t> calls{0};
  mutable std::atomic<uint64_t> fast_runs{0};  // by its compiled form or a packed weight
};

// One distinct npu tensor of a call and the CPU tensor that stands for it.
struct Alias {
  at::Tensor npu;
  at::Tensor cpu;
};

class Aliases {
 public:
  // Replaces npu tensors, devices and generators in the arguments by CPU ones.
  void replace_inputs(const OpInfo& info, Stack& stack);
  // Turns CPU results back into npu tensors.
  void replace_outputs(Stack& stack);
  // Moves memory that the CPU kernel gave to an alias (resized out= arguments) into the npu tensor.
  void write_back();

  bool results_stay_on_cpu() const { return explicit_cpu_; }
  c10::DeviceIndex device() const;
  // A graph does not keep alive what lies in its own memory pool, so that the pool can reuse it.
  bool for_graph = false;

 private:
  IValue to_cpu(const IValue& value);
  at::Tensor to_cpu(const at::Tensor& tensor);
  IValue to_npu(IValue value);
  at::Tensor to_npu(const at::Tensor& tensor);
  c10::Storage npu_storage(const at::Tensor& result);

  c10::SmallVector<Alias, 8> list_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 8> storages_;  // cpu, npu
  c10::SmallVector<c10::TensorImpl*, 4> cpu_inputs_;
  c10::DeviceIndex device_ = -1;
  bool explicit_cpu_ = false;
};

// A CPU tensor over the memory of an npu tensor. `owns` keeps that memory alive.
at::Tensor cpu_alias(const at::Tensor& npu, const c10::Storage& storage);
c10::Storage cpu_storage(const c10::Storage& npu, bool owns);
// True when the memory belongs to the private pool of a graph.
bool in_graph_pool(const c10::Storage& npu);

// While one lives, CPU kernels of this thread take memory from torch_npu's caching allocator.
class DeviceMemory {
 public:
  explicit DeviceMemory(bool on);
  ~DeviceMemory();

 private:
  bool before_;
};
void install_allocator();
// True when the memory of this CPU storage came from the caching allocator.
bool on_device_memory(const c10::StorageImpl& storage);

// A CPU generator that continues where this npu generator stands, and steps it. Undefined: the default
// generator of the device.
at::Generator cpu_generator(const at::Generator& npu, c10::DeviceIndex device);

// The product with a packed weight; false when there is none, and nothing was done.
bool run_packed(const OpInfo& info, Stack& stack);
// Tells those who watch that the memory of this CPU tensor, or list of them, is written.
void note_written(const IValue& value);
// Runs the CPU kernel; arguments and results on the stack are CPU tensors.
void run_cpu(const OpInfo& info, Stack& stack);
// The whole call, outside captures.
void run(const OpInfo& info, Stack& stack);
// The current stream of this thread's device.
const void* current_stream();
// Whether that stream takes part in an open capture.
bool on_captured_stream();
// Whether this call makes the host wait for the device.
bool leaves_device(const OpInfo& info, const Stack& stack);
// Drops the arguments and leaves those that the operation returns, where each result is a written argument.
void return_written(const OpInfo& info, Stack& stack);
// Raises when the call comes after a replay that is still waiting for an external event.
void refuse_behind_waiting_replay(const OpInfo& info);
// The call while a graph is captured or a task group is updated.
void run_recorded(const OpInfo& info, Stack& stack);
// Null mode: gives results of the right shape without computing; false when the op must run all the same.
bool run_null(const OpInfo& info, Stack& stack);

}  // namespace vnpu
