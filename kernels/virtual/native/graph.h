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
};

struct TaskGroup {
  Graph* graph;
  std::vector<size_t> steps;  // indices into graph->steps
};

struct Graph {
  uint32_t id = 0;
  bool open = true;
  bool invalid = false;
  Stream* origin = nullptr;
  std::vector<Stream*> streams;  // that take part while the capture is open
  std::vector<Step> steps;
  std::vector<std::unique_ptr<TaskGroup>> groups;
};

Graph* capture_of_thread();
bool updating_task_group();
void join(Stream* stream, Graph* graph);

}  // namespace vnpu
