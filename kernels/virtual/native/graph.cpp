// ACL graphs: a capture collects steps, a replay runs them again in order. A task group marks the steps
// between its begin and end; an update replaces the steps of a group with newly recorded ones.
#include <acl/acl.h>

#include "graph.h"

namespace {

using vnpu::Graph;
using vnpu::Step;

thread_local Graph* open_graph = nullptr;           // capture opened by this thread
thread_local vnpu::TaskGroup* open_group = nullptr;  // group being captured
thread_local vnpu::TaskGroup* updating = nullptr;    // group being updated
thread_local std::vector<Step> update_steps;

std::atomic<uint32_t> next_graph_id{1};

std::string step_names(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) text += (text.empty() ? "" : ", ") + step.name;
  return text.empty() ? "nothing" : text;
}

void close(Graph* graph) {
  for (vnpu::Stream* stream : graph->streams) stream->capture = nullptr;
  graph->streams.clear();
  graph->open = false;
  open_graph = nullptr;
}

int run(Graph* graph) {
  for (size_t i = 0; i < graph->steps.size(); ++i) {
    const Step& step = graph->steps[i];
    try {
      step.run();
    } catch (const VnpuError& error) {
      return vnpu_fail(error.code, "virtual NPU: step %zu (%s) of graph %u: %s", i, step.name.c_str(), graph->id,
                       error.what());
    } catch (const std::exception& error) {
      return vnpu_fail(ACL_ERROR_RT_MODEL_EXECUTE, "virtual NPU: step %zu (%s) of graph %u: %s", i, step.name.c_str(),
                       graph->id, error.what());
    }
  }
  return ACL_SUCCESS;
}

}  // namespace

namespace vnpu {

Graph* capture_of_thread() { return open_graph; }
bool updating_task_group() { return updating != nullptr; }

void join(Stream* stream, Graph* graph) {
  if (stream->capture == graph) return;
  stream->capture = graph;
  graph->streams.push_back(stream);
}

int refuse_in_capture(const char* what) {
  if (open_graph == nullptr) return ACL_SUCCESS;
  open_graph->invalid = true;
  return vnpu_fail(VNPU_STREAM_CAPTURED,
                   "virtual NPU: %s is not permitted while a graph is being captured (a device refuses it too)", what);
}

}  // namespace vnpu

bool vnpu_capturing() { return open_graph != nullptr || updating != nullptr; }

bool vnpu_stream_capturing(const void* stream) {
  return vnpu::stream_of(const_cast<void*>(stream))->capture != nullptr;
}

void vnpu_record(std::function<void()> replay, const char* name) {
  if (updating != nullptr) {
    update_steps.push_back({std::move(replay), name});
    return;
  }
  if (open_graph == nullptr) vnpu_throw(VNPU_INTERNAL, "virtual NPU: %s recorded outside a capture", name);
  if (open_group != nullptr) open_group->steps.push_back(open_graph->steps.size());
  open_graph->steps.push_back({std::move(replay), name});
}

extern "C" {

int vnpu_updating() { return updating != nullptr ? 1 : 0; }
int vnpu_refuse(const char* what) { return vnpu::refuse_in_capture(what); }

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  vnpu::Stream* stream = vnpu::stream_of(handle);
  if (open_graph != nullptr || stream->capture != nullptr)
    return vnpu_fail(ACL_ERROR_RT_STREAM_CAPTURED, "virtual NPU: a graph capture is already open");
  open_graph = new Graph;
  open_graph->id = next_graph_id.fetch_add(1);
  open_graph->origin = stream;
  vnpu::join(stream, open_graph);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  Graph* graph = vnpu::stream_of(handle)->capture;
  *status = graph == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : graph->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                             : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  *model = graph;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  Graph* graph = vnpu::stream_of(handle)->capture;
  *model = graph;
  if (graph == nullptr) return vnpu_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "virtual NPU: no graph capture is open");
  if (graph != open_graph)
    return vnpu_fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "virtual NPU: the capture was begun by another thread");
  const bool in_group = open_group != nullptr;
  open_group = nullptr;
  close(graph);
  if (graph->invalid)
    return vnpu_fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                     "virtual NPU: the capture is invalid, because a call that a capture does not permit was made");
  if (in_group) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: the capture ended inside a task group");
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  static thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
  *id = static_cast<Graph*>(model)->id;
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream) {
  if (open_graph != nullptr) return vnpu::refuse_in_capture("replaying a graph");
  if (updating != nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: a task update is still open");
  return run(static_cast<Graph*>(model));
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  delete static_cast<Graph*>(model);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Graph* graph = vnpu::stream_of(handle)->capture;
  if (graph == nullptr) return vnpu_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "virtual NPU: a task group needs a capture");
  if (open_group != nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: a task group is already open");
  graph->groups.push_back(std::make_unique<vnpu::TaskGroup>());
  open_group = graph->groups.back().get();
  open_group->graph = graph;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp* handle) {
  if (open_group == nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: no task group is open");
  *handle = open_group;
  open_group = nullptr;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream, aclrtTaskGrp handle) {
  if (open_graph != nullptr) return vnpu::refuse_in_capture("updating a task group");
  if (updating != nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: a task update is already open");
  updating = static_cast<vnpu::TaskGroup*>(handle);
  update_steps.clear();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) {
  vnpu::TaskGroup* group = updating;
  updating = nullptr;
  std::vector<Step> fresh;
  fresh.swap(update_steps);
  if (group == nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: no task update is open");
  std::vector<Step>& steps = group->graph->steps;
  std::vector<Step> old;
  for (size_t index : group->steps) old.push_back({nullptr, steps[index].name});
  bool same = old.size() == fresh.size() && !old.empty();
  for (size_t i = 0; same && i < old.size(); ++i) same = old[i].name == fresh[i].name;
  if (!same)
    return vnpu_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                     "virtual NPU: a task update must repeat the calls of its group: captured %s, given %s",
                     step_names(old).c_str(), step_names(fresh).c_str());
  for (size_t i = 0; i < fresh.size(); ++i) steps[group->steps[i]].run = std::move(fresh[i].run);
  return ACL_SUCCESS;
}

}  // extern "C"
