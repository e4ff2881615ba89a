// ACL graphs: a capture collects steps, a replay runs them again in order. A task group marks the steps
// between its begin and end; an update replaces the steps of a group with newly recorded ones.
#include <acl/acl.h>

#include <mutex>
#include <utility>

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

// A replay that stopped before a step, because an external event was not recorded yet.
struct Waiting {
  Graph* graph;
  size_t next;
  vnpu::Stream* stream;
};
std::mutex waiting_mutex;
std::vector<Waiting> waiting;
std::atomic<int> waiting_count{0};

int run(Graph* graph, size_t next, vnpu::Stream* stream) {
  graph->running = true;
  for (size_t i = next; i < graph->steps.size(); ++i) {
    const Step& step = graph->steps[i];
    if (step.wait != nullptr) {
      if (step.wait->recorded) continue;
      std::lock_guard<std::mutex> lock(waiting_mutex);
      waiting.push_back({graph, i, stream});
      waiting_count = static_cast<int>(waiting.size());
      return ACL_SUCCESS;
    }
    try {
      step.run();
    } catch (const std::exception& error) {
      graph->running = false;
      const auto* known = dynamic_cast<const VnpuError*>(&error);
      return vnpu_fail(known != nullptr ? known->code : ACL_ERROR_RT_MODEL_EXECUTE,
                       "virtual NPU: step %zu (%s) of graph %u: %s", i, step.name.c_str(), graph->id, error.what());
    }
  }
  graph->running = false;
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
  if (open_graph->invalid.empty()) open_graph->invalid = what;
  return vnpu_fail(VNPU_STREAM_CAPTURED,
                   "virtual NPU: %s is not permitted while a graph is being captured (a device refuses it too)", what);
}

void record_wait(Event* event) {
  vnpu_record(nullptr, "aclrtStreamWaitEvent");
  open_graph->steps.back().wait = event;
}

int resume(Event* event) {
  if (waiting_count == 0) return ACL_SUCCESS;
  std::vector<Waiting> ready;
  {
    std::lock_guard<std::mutex> lock(waiting_mutex);
    for (size_t i = 0; i < waiting.size();) {
      if (waiting[i].graph->steps[waiting[i].next].wait == event) {
        ready.push_back(waiting[i]);
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    waiting_count = static_cast<int>(waiting.size());
  }
  for (const Waiting& replay : ready)
    if (const int code = run(replay.graph, replay.next, replay.stream); code != ACL_SUCCESS) return code;
  return ACL_SUCCESS;
}

int refuse_behind_waiting_replay(const Stream* stream, const char* what) {
  if (waiting_count == 0) return ACL_SUCCESS;
  std::lock_guard<std::mutex> lock(waiting_mutex);
  for (const Waiting& replay : waiting)
    if (stream == nullptr || replay.stream == stream)
      return vnpu_fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE,
                       "virtual NPU: %s comes after the replay of graph %u, which waits for an external event that nobody "
                       "recorded yet: record it (graph update) first",
                       what, replay.graph->id);
  return ACL_SUCCESS;
}

}  // namespace vnpu

bool vnpu_capturing() { return open_graph != nullptr || updating != nullptr; }

bool vnpu_stream_capturing(const void* stream) {
  return vnpu::stream_of(const_cast<void*>(stream))->capture != nullptr;
}

void vnpu_record(std::function<void()> replay, const char* name) {
  if (updating != nullptr) {
    update_steps.push_back({std::move(replay), name, nullptr});
    return;
  }
  if (open_graph == nullptr) vnpu_throw(VNPU_INTERNAL, "virtual NPU: %s recorded outside a capture", name);
  if (open_group != nullptr) open_group->steps.push_back(open_graph->steps.size());
  open_graph->steps.push_back({std::move(replay), name, nullptr});
}

extern "C" {

int vnpu_waiting() { return waiting_count.load(std::memory_order_relaxed); }
int vnpu_refuse_waiting(const void* stream, const char* what) {
  return vnpu::refuse_behind_waiting_replay(vnpu::stream_of(const_cast<void*>(stream)), what);
}
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
            : !graph->invalid.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
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
  if (!graph->invalid.empty())
    return vnpu_fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "virtual NPU: the capture is invalid after %s, which is not "
                     "permitted while a graph is being captured", graph->invalid.c_str());
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

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  vnpu::Stream* stream = vnpu::stream_of(handle);
  Graph* graph = static_cast<Graph*>(model);
  if (open_graph != nullptr) return vnpu::refuse_in_capture("replaying a graph");
  if (updating != nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: a task update is still open");
  if (graph->running)
    return vnpu_fail(ACL_ERROR_RT_MODEL_RUNNING, "virtual NPU: graph %u is still running: its last replay waits for an "
                     "external event", graph->id);
  if (const int code = vnpu::refuse_behind_waiting_replay(stream, "a replay"); code != ACL_SUCCESS) return code;
  graph->before = std::exchange(graph->last, vnpu::replay_on(stream));
  return run(graph, 0, stream);
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  {
    std::lock_guard<std::mutex> lock(waiting_mutex);
    std::erase_if(waiting, [model](const Waiting& replay) { return replay.graph == model; });
    waiting_count = static_cast<int>(waiting.size());
  }
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

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
  if (open_graph != nullptr) return vnpu::refuse_in_capture("updating a task group");
  if (updating != nullptr) return vnpu_fail(VNPU_INVALID_PARAM, "virtual NPU: a task update is already open");
  auto* group = static_cast<vnpu::TaskGroup*>(handle);
  // A replay that waits at an event is the one that the update is for.
  const vnpu::Replay& over = group->graph->running ? group->graph->before : group->graph->last;
  if (over.number != 0 && !vnpu::comes_after(vnpu::stream_of(stream), over))
    return vnpu_fail(ACL_ERROR_RT_MODEL_RUNNING, "virtual NPU: a task of graph %u is updated while a replay before may still "
                     "run: the stream of the update must wait for an event behind that replay, or the host for the replay",
                     group->graph->id);
  updating = group;
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
  for (size_t index : group->steps) old.push_back({nullptr, steps[index].name, nullptr});
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
