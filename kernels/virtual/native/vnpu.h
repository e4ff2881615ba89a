// What the parts of the virtual NPU's runtime library share.
//
// One shared library answers every CANN symbol that torch_npu looks up (see stand_ins.py). Its parts
// are: the runtime (devices, streams, events, memory), graphs, and HCCL. Everything is synchronous: when
// a call returns, its work is done. "Device" memory is host memory, so a device pointer may be read and
// written directly.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

// CANN error codes that the virtual NPU returns (acl/acl_base_rt.h, hccl/hccl_types.h give the names).
constexpr int VNPU_OK = 0;
constexpr int VNPU_INVALID_PARAM = 100000;
constexpr int VNPU_NOT_SUPPORTED = 200001;      // ACL_ERROR_API_NOT_SUPPORT
constexpr int VNPU_OUT_OF_MEMORY = 207001;      // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr int VNPU_INTERNAL = 500000;           // ACL_ERROR_INTERNAL_ERROR
constexpr int VNPU_STREAM_CAPTURED = 107030;    // ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT

// An error with its ACL code; what() is the text that aclGetRecentErrMsg will give.
class VnpuError : public std::runtime_error {
 public:
  VnpuError(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  const int code;
};

// Keeps the text for aclGetRecentErrMsg (per thread) and returns `code`, so that an entry point can say
// `return vnpu_fail(VNPU_INVALID_PARAM, "...")`. An Hccl* function passes its own HCCL code.
int vnpu_fail(int code, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
// The same as an exception, for code that runs inside a recorded step or deep in a call.
[[noreturn]] void vnpu_throw(int code, const char* fmt, ...) __attribute__((format(printf, 2, 3)));

// True while this thread has a graph capture open (aclmdlRICaptureBegin ... End).
bool vnpu_capturing();
// True when this stream (an aclrtStream) takes part in an open capture: the one it was begun on, and
// those that have since waited for an event recorded inside it.
bool vnpu_stream_capturing(const void* stream);
// Appends a step to the capture that this thread has open. Each replay runs the steps again in order, on
// the thread that replays. A step reports failure with vnpu_throw. `name` appears in error messages.
// Whoever records runs the work once himself during capture (as the boxed kernels do), or not at all:
// a replay never depends on it.
void vnpu_record(std::function<void()> replay, const char* name);

// The device of this thread (0 .. visible devices - 1), and the physical number behind it.
int vnpu_device();
int vnpu_physical_device(int device);
// True in null mode: kernels compute nothing. Collectives still have to keep ranks in step.
bool vnpu_null_mode();
