// A captured graph. Graph handles (aclmdlRI) and task group handles (aclrtTaskGrp) point to these.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "state.h"

namespace vnpu {

struct Step {
  std::function<void()> run;
  std::string name;
  Event* wait = nullptr;  // an external event that has to be recorded before the graph goes on
};

struct TaskGroup {
  Graph* graph;
  std::vector<size_t> steps;  // indices into graph->steps
};

struct Graph {
  uint32_t id = 0;
  bool open = true;
  std::string invalid;  // why the capture cannot be used any more
  bool running = false;
  Replay last, before;  // its newest replay, and the one before that
  Stream* origin = nullptr;
  std::vector<Stream*> streams;  // that take part while the capture is open
  std::vector<Step> steps;
  std::vector<std::unique_ptr<TaskGroup>> groups;
};

Graph* capture_of_thread();
bool updating_task_group();
void join(Stream* stream, Graph* graph);
void record_wait(Event* event);
// Goes on with replays that waited for this event. Returns the ACL code of what they ran.
int resume(Event* event);
// Refuses work on a stream behind a replay that waits for an external event. Returns an ACL code.
int refuse_behind_waiting_replay(const Stream* stream, const char* what);

}  // namespace vnpu
