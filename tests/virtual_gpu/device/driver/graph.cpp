// Graphs: captured ones, child graphs, and conditional nodes of the one type that is used here, loops.
//
// What is refused is what CUDA's documentation of cuGraphAddNode, cuGraphConditionalHandleCreate and
// CUDA_CONDITIONAL_NODE_PARAMS rules out; what it calls undefined fails the device. Types of nodes that a loop may not
// hold (host functions, events, allocations) cannot be captured here at all; torch's operations stand for kernels.
#include <algorithm>
#include <atomic>

#include "driver.h"

namespace virtual_gpu {

namespace {

constexpr int kConditionalNode = 13, kWhile = 1;  // CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_COND_TYPE_WHILE
constexpr unsigned kAssignDefault = 1;            // CU_GRAPH_COND_ASSIGN_DEFAULT
constexpr int kMaxRounds = 10000;

struct NodeParams {  // CUgraphNodeParams of a conditional node
  int32_t type, reserved[3];
  Condition* handle;
  int32_t kind;
  uint32_t size;
  void** bodies;
  void* context;
  char unused[208];
};
static_assert(sizeof(NodeParams) == 256, "the layout that the bindings were built for");

// The item that the calling thread runs, if it is a graph's.
struct Running {
  const Graph* graph;
  void* context;
  uint64_t number;  // of the item
};
thread_local Running* running = nullptr;

std::shared_ptr<Condition> find_condition(const Graph& graph, const void* handle) {
  for (const auto& condition : graph.conditions) {
    if (condition.get() == handle) return condition;
  }
  return nullptr;
}

// Whether no node's context was destroyed.
bool has_contexts(const Graph& graph) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) {
    return node.child != nullptr ? has_contexts(*node.child) : is_context(node.context);
  });
}

bool is_within(const Graph& graph, const void* context) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
    return node.child != nullptr ? is_within(*node.child, context) : node.context == context;
  });
}

Status evaluate(const Condition& condition, const Graph& body, int* num_rounds) {
  if (!condition.is_set) {
    say("a conditional node whose condition nothing has set");
  } else if (condition.value != 0 && (body.nodes.empty() || ++*num_rounds > kMaxRounds)) {
    say("a loop that does not end");
  } else {
    return kDone;
  }
  return kLaunchFailed;
}

// The items of a launch of `root`, of which `graph` is a part. An item holds the graph.
void add_items(const std::shared_ptr<Graph>& root, const Graph& graph, bool is_in_loop, std::vector<Work>* items) {
  for (const Node& node : graph.nodes) {
    if (node.condition != nullptr) {
      auto num_rounds = std::make_shared<int>(0);
      const auto ask = [root, condition = node.condition, body = node.child, num_rounds] {
        return evaluate(*condition, *body, num_rounds.get());
      };
      const auto next = [root, condition = node.condition, body = node.child] {
        std::vector<Work> made;
        if (condition->value != 0) add_items(root, *body, true, &made);
        return made;
      };
      items->push_back({"conditional node", ask, nullptr, 0, next, is_in_loop});
    } else if (node.child != nullptr) {
      add_items(root, *node.child, is_in_loop, items);
    } else {
      const auto run = [root, context = node.context, run = node.work.run] {
        static std::atomic<uint64_t> num_run{0};
        Running item{root.get(), context, ++num_run};
        running = &item;
        const Status status = run();
        running = nullptr;
        return status;
      };
      items->push_back({node.work.label, run, nullptr, 0, nullptr, is_in_loop});
    }
  }
}

// A node is added behind the last one: graphs of several branches do not exist here.
Status add(Graph* graph, Node node, const void* const* dependencies, size_t num_dependencies, void** handle) {
  const bool is_behind = graph->nodes.empty() ? num_dependencies == 0
                                              : num_dependencies == 1 && dependencies[0] == graph->nodes.back().handle;
  if (!is_behind) {
    say("a node of a graph that does not depend on just the node before");
    return kNotSupported;
  }
  static uintptr_t num_made = 0;
  *handle = node.handle = reinterpret_cast<void*>(++num_made);
  graph->nodes.push_back(std::move(node));
  return kDone;
}

}  // namespace

}  // namespace virtual_gpu

using namespace virtual_gpu;
using Lock = std::unique_lock<std::mutex>;

CALL(cuGraphCreate, void** graph, unsigned flags) {
  Lock lock(device().mutex);
  if (flags != 0) return kInvalidValue;
  *graph = new GraphHandle{std::make_shared<Graph>()};
  device().handles.insert(*graph);
  return kDone;
}
CALL(cuGraphDestroy, void* handle) {
  Lock lock(device().mutex);
  if (device().handles.erase(handle) == 0) return kInvalidHandle;
  auto* held = static_cast<GraphHandle*>(handle);
  for (const auto& condition : held->graph->conditions) {
    device().handles.erase(condition->body_handle);
    delete static_cast<GraphHandle*>(condition->body_handle);
    condition->body_handle = nullptr;
  }
  delete held;
  return kDone;
}
// The node holds a copy of the child, which does not own the child's memory.
CALL(cuGraphAddChildGraphNode, void** node, void* graph, const void* const* dependencies, size_t num_dependencies,
     void* child) {
  Lock lock(device().mutex);
  if (!is_handle(graph) || !is_handle(child)) return kInvalidHandle;
  const Graph& original = *static_cast<GraphHandle*>(child)->graph;
  if (!original.conditions.empty()) return kInvalidValue;
  auto copied = std::make_shared<Graph>();
  copied->nodes = original.nodes;
  Graph* into = static_cast<GraphHandle*>(graph)->graph.get();
  const Status status = add(into, {nullptr, {}, copied}, dependencies, num_dependencies, node);
  return status == kDone ? logged(__func__) : status;
}
CALL(cuGraphConditionalHandleCreate, void** handle, void* graph, void* context, unsigned initial, unsigned flags) {
  Lock lock(device().mutex);
  if (!is_handle(graph) || (flags & ~kAssignDefault) != 0) return kInvalidValue;
  auto& conditions = static_cast<GraphHandle*>(graph)->graph->conditions;
  conditions.push_back(std::make_shared<Condition>(Condition{context, 0, initial, flags == kAssignDefault, false}));
  *handle = conditions.back().get();
  return logged(__func__);
}
// A condition is that of one node of its graph.
CALL(cuGraphAddNode, void** node, void* graph, const void* const* dependencies, const void* edges,
     size_t num_dependencies, NodeParams* params) {
  Lock lock(device().mutex);
  if (!is_handle(graph)) return kInvalidHandle;
  if (params->type != kConditionalNode || params->kind != kWhile || edges != nullptr) return kNotSupported;
  const auto is_zero = [](auto byte) { return byte == 0; };
  if (!std::all_of(std::begin(params->unused), std::end(params->unused), is_zero)) return kInvalidValue;
  Graph* into = static_cast<GraphHandle*>(graph)->graph.get();
  auto condition = find_condition(*into, params->handle);
  if (params->size != 1 || condition == nullptr || condition->body_handle != nullptr) return kInvalidValue;
  if (params->context != condition->context) return kInvalidContext;
  auto body = std::make_shared<Graph>();
  if (Status status = add(into, {nullptr, {}, body, condition}, dependencies, num_dependencies, node)) return status;
  condition->body_handle = new GraphHandle{body};
  device().handles.insert(condition->body_handle);
  params->bodies = &condition->body_handle;
  return logged(__func__);
}
// Conditional nodes: one instance at a time, each handle with its node, all of a body in the node's context.
CALL(cuGraphInstantiateWithFlags, void** exec, void* handle, uint64_t) {
  Lock lock(device().mutex);
  if (Status refused = refuse_while_capturing(__func__)) return refused;
  if (!is_handle(handle)) return kInvalidHandle;
  auto graph = static_cast<GraphHandle*>(handle)->graph;
  if (!graph->conditions.empty()) {
    if (graph->num_instances > 0) return kInvalidValue;
    for (const auto& condition : graph->conditions) {
      if (condition->body_handle == nullptr) return kInvalidValue;
      const Graph& body = *static_cast<GraphHandle*>(condition->body_handle)->graph;
      if (!is_within(body, condition->context)) return kInvalidValue;
    }
    if (Status refused = logged(__func__)) return refused;
  }
  graph->num_instances++;
  *exec = new GraphHandle{graph};
  device().handles.insert(*exec);
  return kDone;
}
CALL(cuGraphExecDestroy, void* exec) {
  Lock lock(device().mutex);
  if (device().handles.erase(exec) == 0) return kInvalidHandle;
  auto* held = static_cast<GraphHandle*>(exec);
  held->graph->num_instances--;
  delete held;
  return kDone;
}
CALL(cuGraphLaunch, void* exec, void* handle) {
  Lock lock(device().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return no_stream(handle);
  if (!is_handle(exec)) return kInvalidHandle;
  if (stream->capture != nullptr) return kNotSupported;
  if (fails_now(__func__)) return device().failure = kLaunchFailed;
  auto graph = static_cast<GraphHandle*>(exec)->graph;
  if (!has_contexts(*graph)) return kContextDestroyed;
  count_graph(stream);
  std::vector<Work> items;
  if (!graph->conditions.empty()) {
    items.push_back({"conditions", [graph] {
                       for (const auto& condition : graph->conditions) {
                         condition->is_set = condition->has_initial;
                         condition->value = condition->initial;
                       }
                       return kDone;
                     }});
  }
  add_items(graph, *graph, false, &items);
  for (const Work& item : items) {
    if (Status status = enqueue(stream, item)) return status;
  }
  return kDone;
}
// cudaGraphSetConditional, for emulated kernels. What it does wrong fails the device.
CALL(virtual_gpu_set_conditional, void* handle, unsigned value) {
  Lock lock(device().mutex);
  auto condition = running == nullptr ? nullptr : find_condition(*running->graph, handle);
  if (condition == nullptr) {
    say("a kernel sets a condition that is not its graph's");
  } else if (condition->context != running->context) {
    say("a kernel sets a condition of another context");
  } else if (condition->setter == running->number) {
    say("threads of a kernel race to set a condition");
  } else {
    condition->value = value;
    condition->is_set = true;
    condition->setter = running->number;
    return kDone;
  }
  return device().failure = kLaunchFailed;
}
