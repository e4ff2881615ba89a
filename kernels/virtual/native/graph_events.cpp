// Events as a graph capture sees them. A stream that waits for an event recorded inside a capture joins
// that capture, as on a device. Events made outside may be waited for by steps of the graph only when
// they are external events (torch.npu.ExternalEvent): a replay stops there until somebody records the event,
// so a graph may be updated before or after its replay is asked for, as on a device.
#include <acl/acl.h>

#include "graph.h"

namespace {

vnpu::Event* event_of(aclrtEvent handle) { return static_cast<vnpu::Event*>(handle); }

void mark(vnpu::Event* event) {
  event->nanoseconds = vnpu::now_ns();
  event->recorded = true;
}

}  // namespace

extern "C" {

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  vnpu::Event* event = event_of(handle);
  vnpu::Graph* graph = vnpu::stream_of(stream_handle)->capture;
  const bool external = (event->flags & ACL_EVENT_EXTERNAL) != 0;
  if (graph != nullptr && external) {
    vnpu_record([event] { mark(event); }, "aclrtRecordEvent");
    return ACL_SUCCESS;
  }
  event->capture = graph;
  mark(event);
  vnpu::record_order(event, vnpu::stream_of(stream_handle));
  return external ? vnpu::resume(event) : ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
  vnpu::Event* event = event_of(handle);
  if (vnpu::stream_of(stream_handle)->capture != nullptr) {
    vnpu_record([event] { event->recorded = false; }, "aclrtResetEvent");
    return ACL_SUCCESS;
  }
  event->recorded = false;
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  vnpu::Event* event = event_of(handle);
  vnpu::Stream* stream = vnpu::stream_of(stream_handle);
  const bool external = (event->flags & ACL_EVENT_EXTERNAL) != 0;
  if (stream->capture != nullptr && external) {
    vnpu::record_wait(event);
    return ACL_SUCCESS;
  }
  vnpu::Graph* open = vnpu::capture_of_thread();
  if (event->capture != nullptr && event->capture == open) {
    vnpu::join(stream, open);
    return ACL_SUCCESS;
  }
  if (external && !event->recorded)
    return vnpu_fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "virtual NPU: wait for an external event that nobody recorded");
  vnpu::wait_order(stream, event);
  return ACL_SUCCESS;
}

}  // extern "C"
