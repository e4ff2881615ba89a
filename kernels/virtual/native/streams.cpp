// Streams and events. All work is done when its call returns, so waiting is free; what remains is order
// inside graph captures, times, and the counts of host synchronisations.
#include <acl/acl.h>

#include <array>

#include "graph.h"

namespace {

std::atomic<int> next_stream_id{1};
std::array<std::atomic<uint64_t>, static_cast<size_t>(vnpu::Sync::kCount)> sync_counts;

vnpu::Event* event_of(aclrtEvent handle) { return static_cast<vnpu::Event*>(handle); }

int new_event(aclrtEvent* out, uint32_t flags) {
  auto* event = new vnpu::Event;
  event->flags = flags;
  *out = event;
  return ACL_SUCCESS;
}

}  // namespace

namespace vnpu {

Stream* stream_of(void* handle) {
  if (handle != nullptr) return static_cast<Stream*>(handle);
  static std::array<Stream, kMaxDevices> defaults;
  Stream& stream = defaults[static_cast<size_t>(vnpu_device())];
  stream.device = vnpu_device();
  return &stream;
}

void count_sync(Sync kind) { sync_counts[static_cast<size_t>(kind)].fetch_add(1, std::memory_order_relaxed); }

}  // namespace vnpu

using vnpu::Sync;

extern "C" {

void vnpu_copied_to_host(const void* stream) {
  vnpu::count_sync(Sync::kCopyToHost);
  vnpu::host_waited(vnpu::stream_of(const_cast<void*>(stream)));
}
uint64_t vnpu_sync_count(int kind) { return sync_counts[static_cast<size_t>(kind)].load(); }
void vnpu_reset_sync_counts() {
  for (auto& count : sync_counts) count.store(0);
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = new vnpu::Stream{.id = next_stream_id.fetch_add(1), .device = vnpu_device()};
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<vnpu::Stream*>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = vnpu::stream_of(stream)->id;
  return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  if (vnpu::stream_of(stream)->capture != nullptr) return vnpu::refuse_in_capture("querying a stream");
  vnpu::host_waited(vnpu::stream_of(stream));
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  vnpu::count_sync(Sync::kStream);
  vnpu::host_waited(vnpu::stream_of(stream));
  const int code = vnpu::refuse_behind_waiting_replay(vnpu::stream_of(stream), "waiting for the stream");
  if (code != ACL_SUCCESS) return code;
  return vnpu::refuse_in_capture("synchronizing a stream");
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  vnpu::count_sync(Sync::kDevice);
  vnpu::host_waited_for_device(vnpu_device());
  const int code = vnpu::refuse_behind_waiting_replay(nullptr, "waiting for the device");
  if (code != ACL_SUCCESS) return code;
  return vnpu::refuse_in_capture("synchronizing the device");
}
aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return new_event(event, flag); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return new_event(event, flag); }
aclError aclrtCreateEvent(aclrtEvent* event) { return new_event(event, ACL_EVENT_SYNC); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete event_of(event);
  return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  vnpu::host_waited(event_of(event));
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  vnpu::count_sync(Sync::kEvent);
  vnpu::host_waited(event_of(event));
  if (event_of(event)->capture != nullptr) return vnpu::refuse_in_capture("synchronizing an event");
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  if (!event_of(start)->recorded || !event_of(end)->recorded)
    return vnpu_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "virtual NPU: elapsed time of an event that was not recorded");
  *ms = static_cast<float>(event_of(end)->nanoseconds - event_of(start)->nanoseconds) * 1e-6f;
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<uint64_t>(event_of(event)->nanoseconds / 1000);
  return ACL_SUCCESS;
}

// Work is finished when it is enqueued, so a callback or host function can run at once.
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* args) {
  if (vnpu::stream_of(stream)->capture != nullptr) {
    vnpu_record([fn, args] { fn(args); }, "aclrtLaunchHostFunc");
    return ACL_SUCCESS;
  }
  fn(args);
  return ACL_SUCCESS;
}
aclError aclrtLaunchCallback(aclrtCallback fn, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  return aclrtLaunchHostFunc(stream, fn, data);
}

}  // extern "C"
