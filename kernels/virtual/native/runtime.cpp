// Process-wide state: settings, errors, devices and their properties.
#include <acl/acl.h>

#include <cstdarg>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace {

thread_local std::string last_error;
thread_local int current_device = -1;

std::string format(const char* fmt, va_list args) {
  char text[2048];
  vsnprintf(text, sizeof text, fmt, args);
  return text;
}

// CANN reads the variable when the runtime starts: ids are physical, in the order given, and the list
// ends at the first id that is not a device, is not a number, or was already named.
std::vector<int> read_visible_devices() {
  const int count = vnpu::config().count;
  std::vector<int> ids;
  const char* text = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int i = 0; i < count; ++i) ids.push_back(i);
    return ids;
  }
  while (*text != '\0') {
    char* end = nullptr;
    const long id = std::strtol(text, &end, 10);
    if (end == text || id < 0 || id >= count) break;
    for (int seen : ids)
      if (seen == id) return ids;
    ids.push_back(static_cast<int>(id));
    while (*end == ' ') ++end;
    if (*end != ',') break;
    text = end + 1;
  }
  return ids;
}

std::mutex visible_mutex;
std::vector<int> visible;
bool visible_fixed = false;  // set by the first aclrtSetDevice, as the real runtime starts there

}  // namespace

namespace vnpu {

Config& config() {
  static Config instance;
  return instance;
}

const std::vector<int>& visible_devices() {
  std::lock_guard<std::mutex> lock(visible_mutex);
  if (!visible_fixed) visible = read_visible_devices();
  return visible;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

static bool bad_device(int64_t id) {
  return id < 0 || id >= static_cast<int64_t>(visible_devices().size());
}

static int fail_device(int64_t id) {
  return vnpu_fail(ACL_ERROR_RT_INVALID_DEVICEID, "virtual NPU: device %lld does not exist, %zu visible",
                   static_cast<long long>(id), visible_devices().size());
}

}  // namespace vnpu

int vnpu_fail(int code, const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  last_error = format(fmt, args);
  va_end(args);
  return code;
}

void vnpu_throw(int code, const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  last_error = format(fmt, args);
  va_end(args);
  throw VnpuError(code, last_error);
}

int vnpu_device() { return current_device < 0 ? 0 : current_device; }

int vnpu_physical_device(int device) {
  const auto& ids = vnpu::visible_devices();
  return device >= 0 && device < static_cast<int>(ids.size()) ? ids[device] : device;
}

bool vnpu_null_mode() { return vnpu::config().null_mode; }

extern "C" {

// Called once by boot.py, before torch_npu is loaded.
void vnpu_configure(const char* soc, int count, uint64_t hbm_bytes, int64_t cube_cores, int64_t vector_cores,
                    int64_t l2_bytes, int null_mode) {
  vnpu::Config& c = vnpu::config();
  c.soc = soc;
  c.count = count;
  c.hbm_bytes = hbm_bytes;
  c.cube_cores = cube_cores;
  c.vector_cores = vector_cores;
  c.l2_bytes = l2_bytes;
  c.null_mode = null_mode != 0;
}

// What a stand-in without a body does (stand_ins.py generates the callers).
int vnpu_missing(const char* symbol) {
  vnpu_throw(VNPU_NOT_SUPPORTED, "virtual NPU: %s has no stand-in, so this feature of CANN is not available",
             symbol);
}

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }

const char* aclGetRecentErrMsg() {
  static thread_local std::string given;
  given.swap(last_error);  // CANN hands each message out once
  last_error.clear();
  return given.c_str();
}

const char* aclrtGetSocName() { return vnpu::config().soc.c_str(); }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(vnpu::visible_devices().size());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t id) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  {
    std::lock_guard<std::mutex> lock(visible_mutex);
    visible_fixed = true;
  }
  current_device = id;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* id) {
  if (current_device < 0) return vnpu_fail(ACL_ERROR_RT_CONTEXT_NULL, "virtual NPU: no device set on this thread");
  *id = current_device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t id) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  if (current_device == id) current_device = -1;
  return ACL_SUCCESS;
}

// A context is a device here: handle = device + 1, so that none is null.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device < 0) return vnpu_fail(ACL_ERROR_RT_CONTEXT_NULL, "virtual NPU: no device set on this thread");
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(current_device) + 1);
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  const intptr_t id = reinterpret_cast<intptr_t>(context) - 1;
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  current_device = static_cast<int>(id);
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t* flags, int32_t* active) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  if (flags != nullptr) *flags = 0;
  *active = current_device == id ? 1 : 0;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t id, aclrtDevAttr attr, int64_t* value) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  const vnpu::Config& c = vnpu::config();
  switch (attr) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = c.cube_cores; return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = c.vector_cores; return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(c.hbm_bytes); return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = c.l2_bytes; return ACL_SUCCESS;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = vnpu_physical_device(static_cast<int>(id)); return ACL_SUCCESS;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; return ACL_SUCCESS;  // no compute power splitting
    default:
      return vnpu_fail(VNPU_NOT_SUPPORTED, "virtual NPU: device attribute %d is not known", static_cast<int>(attr));
  }
}

aclError aclGetDeviceCapability(uint32_t id, aclDeviceInfo info, int64_t* value) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  const vnpu::Config& c = vnpu::config();
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = c.cube_cores; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = c.vector_cores; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE: *value = c.l2_bytes; return ACL_SUCCESS;
    default:
      return vnpu_fail(VNPU_NOT_SUPPORTED, "virtual NPU: device capability %d is not known",
                       static_cast<int>(info));
  }
}

// Virtual devices have no serial number: name and physical number, in the 16 bytes of a UUID.
aclError aclrtDeviceGetUuid(int32_t id, aclrtUuid* uuid) {
  if (vnpu::bad_device(id)) return vnpu::fail_device(id);
  memset(uuid, 0, sizeof *uuid);
  snprintf(reinterpret_cast<char*>(uuid->bytes), sizeof uuid->bytes, "virtual-npu-%02d", vnpu_physical_device(id));
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  if (vnpu::bad_device(device)) return vnpu::fail_device(device);
  if (vnpu::bad_device(peer)) return vnpu::fail_device(peer);
  *can = device != peer;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

}  // extern "C"
