// The old operator path (aclop): torch_npu describes an operation, then asks CANN to compile and run it.
// Describing succeeds, running never does: there is no kernel here, and nothing may look computed.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include "state.h"

namespace {

// Handles only have to be distinct from null; nothing reads through them.
template <class T>
T* token() {
  return reinterpret_cast<T*>(new char);
}
template <class T>
void drop(const T* handle) {
  delete reinterpret_cast<const char*>(handle);
}

int no_kernel(const char* op) {
  return vnpu_fail(VNPU_NOT_SUPPORTED,
                   "virtual NPU: torch_npu asked CANN to run operation '%s', for which there is no kernel here", op);
}

}  // namespace

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType, int, const int64_t*, aclFormat) { return token<aclTensorDesc>(); }
void aclDestroyTensorDesc(const aclTensorDesc* desc) { drop(desc); }
aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return token<aclDataBuffer>(); }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  drop(buffer);
  return ACL_SUCCESS;
}
aclopAttr* aclopCreateAttr() { return token<aclopAttr>(); }
void aclopDestroyAttr(const aclopAttr* attr) { drop(attr); }

aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return no_kernel(op);
}
aclError aclopCompileAndExecuteV2(const char* op, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return no_kernel(op);
}

// Compile options are kept so that what was set can be read back.
size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length > 0) value[0] = '\0';
  return ACL_SUCCESS;
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

}  // extern "C"
