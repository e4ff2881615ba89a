// The old operator path (aclop): torch_npu describes an operation, then asks CANN to compile and run it.
// Describing succeeds; running does for the few operations of op_kernels.h and fails for all others, so that
// nothing may look computed.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <utility>
#include <vector>

#include "op_kernels.h"
#include "state.h"
#include "written.h"

namespace {

std::vector<vnpu::OpTensor> tensors(int n, const aclTensorDesc* const descs[], const aclDataBuffer* const buffers[]) {
  std::vector<vnpu::OpTensor> result;
  for (int i = 0; i < n; ++i) {
    const auto* buffer = reinterpret_cast<const vnpu::DataBuffer*>(buffers[i]);
    if (descs[i] != nullptr && buffer != nullptr)
      result.push_back({reinterpret_cast<const vnpu::TensorDesc*>(descs[i]), *buffer});
  }
  return result;
}

int run_op(const char* op, int n_inputs, const aclTensorDesc* const input_descs[], const aclDataBuffer* const inputs[],
           int n_outputs, const aclTensorDesc* const output_descs[], const aclDataBuffer* const outputs[]) {
  auto work = vnpu::find_op(op, tensors(n_inputs, input_descs, inputs), tensors(n_outputs, output_descs, outputs));
  if (work == nullptr)
    return vnpu_fail(VNPU_NOT_SUPPORTED,
                     "virtual NPU: torch_npu asked CANN to run operation '%s', for which there is no kernel here", op);
  const auto run = [work = std::move(work), targets = tensors(n_outputs, output_descs, outputs)] {
    work();
    for (const vnpu::OpTensor& target : targets) vnpu::written(target.buffer.data, target.buffer.bytes);
  };
  run();
  if (vnpu_capturing()) vnpu_record(run, op);
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int n, const int64_t* dims, aclFormat) {
  return reinterpret_cast<aclTensorDesc*>(new vnpu::TensorDesc{type, std::vector<int64_t>(dims, dims + n)});
}
void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete reinterpret_cast<const vnpu::TensorDesc*>(desc); }
aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) {
  return reinterpret_cast<aclDataBuffer*>(new vnpu::DataBuffer{data, bytes});
}
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete reinterpret_cast<const vnpu::DataBuffer*>(buffer);
  return ACL_SUCCESS;
}
aclopAttr* aclopCreateAttr() { return reinterpret_cast<aclopAttr*>(new char); }  // attributes are not read
void aclopDestroyAttr(const aclopAttr* attr) { delete reinterpret_cast<const char*>(attr); }

aclError aclopCompileAndExecute(const char* op, int n_inputs, const aclTensorDesc* const input_descs[],
                                const aclDataBuffer* const inputs[], int n_outputs,
                                const aclTensorDesc* const output_descs[], aclDataBuffer* const outputs[],
                                const aclopAttr*, aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  return run_op(op, n_inputs, input_descs, inputs, n_outputs, output_descs, outputs);
}
aclError aclopCompileAndExecuteV2(const char* op, int n_inputs, aclTensorDesc* input_descs[], aclDataBuffer* inputs[],
                                  int n_outputs, aclTensorDesc* output_descs[], aclDataBuffer* outputs[], aclopAttr*,
                                  aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  return run_op(op, n_inputs, input_descs, inputs, n_outputs, output_descs, outputs);
}

// Compile options are kept so that what was set can be read back.
size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length > 0) value[0] = '\0';
  return ACL_SUCCESS;
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

}  // extern "C"
