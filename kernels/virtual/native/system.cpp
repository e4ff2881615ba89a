// Small process-wide facts that torch_npu asks CANN for: system parameters, versions, resource limits.
#include <acl/acl.h>

#include <cstring>
#include <map>
#include <mutex>

#include "state.h"

namespace {

// The CANN release whose interfaces the stand-ins follow.
constexpr const char* kCannVersion = "9.1.0";

std::mutex mutex;
std::map<int, int64_t> system_parameters;  // CANN's default of every option is 0 (off)

}  // namespace

extern "C" {

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> lock(mutex);
  *value = system_parameters[static_cast<int>(option)];
  return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> lock(mutex);
  system_parameters[static_cast<int>(option)] = value;
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  strncpy(version->version, kCannVersion, sizeof version->version - 1);
  return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char*, char* version) {
  strcpy(version, kCannVersion);
  return ACL_SUCCESS;
}

}  // extern "C"
