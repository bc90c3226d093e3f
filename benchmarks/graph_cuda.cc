#include "benchmarks/harness_cuda.h"
#include "transfer/device/cuda_check.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cxxabi.h>
#include <memory>
#include <unordered_map>
#include <utility>

namespace kvtier::bench {
namespace {

class Executable {
 public:
  explicit Executable(cudaGraph_t graph) {
    KVTIER_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
  }
  ~Executable() { cudaGraphExecDestroy(exec_); }
  Executable(const Executable&) = delete;  // owns it
  Executable& operator=(const Executable&) = delete;
  void launch(cudaStream_t stream) const { KVTIER_CUDA_CHECK(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_{};
};

/// Nodes so that each comes after those that it depends on.
std::vector<cudaGraphNode_t> sorted_nodes(cudaGraph_t graph) {
  std::size_t count = 0, num_edges = 0;
  KVTIER_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  KVTIER_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  KVTIER_CUDA_CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &num_edges));
  std::vector<cudaGraphNode_t> from(num_edges), to(num_edges);
  std::vector<cudaGraphEdgeData> data(num_edges);
  KVTIER_CUDA_CHECK(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &num_edges));
  std::unordered_map<cudaGraphNode_t, int> open;
  for (const cudaGraphNode_t node : to) ++open[node];
  std::vector<cudaGraphNode_t> sorted;
  std::vector<bool> taken(count, false);
  while (sorted.size() < count) {
    for (std::size_t i = 0; i < count; ++i) {
      if (taken[i] || open[nodes[i]] > 0) continue;
      taken[i] = true;
      sorted.push_back(nodes[i]);
      for (std::size_t e = 0; e < num_edges; ++e) {
        if (from[e] == nodes[i]) --open[to[e]];
      }
      break;
    }
  }
  return sorted;
}

/// The kernel's name without return type, template arguments and parameters.
std::string node_name(cudaGraphNode_t node) {
  cudaGraphNodeType type{};
  KVTIER_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
  if (type == cudaGraphNodeTypeMemset) return "memset";
  if (type == cudaGraphNodeTypeMemcpy) return "memcpy";
  if (type != cudaGraphNodeTypeKernel) return "other";
  cudaKernelNodeParams parameters{};
  const char* mangled = nullptr;
  if (cudaGraphKernelNodeGetParams(node, &parameters) != cudaSuccess ||
      cudaFuncGetName(&mangled, parameters.func) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "kernel";
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  if (status != 0) return mangled;
  std::string name = text.get();
  const std::string unnamed = "(anonymous namespace)::";
  for (std::size_t at = name.find(unnamed); at != std::string::npos; at = name.find(unnamed)) {
    name.erase(at, unnamed.size());
  }
  name.resize(std::min(name.find_first_of("<("), name.size()));
  const std::size_t begin = name.find_last_of(" :");
  return begin == std::string::npos ? name : name.substr(begin + 1);
}

}  // namespace

Graph::Graph(cudaStream_t stream, const std::function<void()>& work) {
  KVTIER_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  work();
  KVTIER_CUDA_CHECK(cudaStreamEndCapture(stream, &graph_));
  KVTIER_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
}

Graph::~Graph() {
  cudaGraphExecDestroy(exec_);
  cudaGraphDestroy(graph_);
}

void Graph::launch(cudaStream_t stream) const { KVTIER_CUDA_CHECK(cudaGraphLaunch(exec_, stream)); }

std::vector<Graph::Stage> Graph::stages(cudaStream_t stream, int repeats,
                                        const std::function<void()>& before) const {
  const std::vector<cudaGraphNode_t> nodes = sorted_nodes(graph_);
  std::vector<Stage> stages;
  double shorter = 0.0;
  // The empty prefix is the cost of a launch, which no kernel is charged.
  for (std::size_t kept = 0; kept <= nodes.size(); ++kept) {
    cudaGraph_t prefix{};
    KVTIER_CUDA_CHECK(cudaGraphClone(&prefix, graph_));
    for (std::size_t i = nodes.size(); i > kept; --i) {
      cudaGraphNode_t copy{};
      KVTIER_CUDA_CHECK(cudaGraphNodeFindInClone(&copy, nodes[i - 1], prefix));
      KVTIER_CUDA_CHECK(cudaGraphDestroyNode(copy));
    }
    double us = 0.0;
    {
      const Executable executable(prefix);
      std::vector<double> values;
      for (int i = 0; i < repeats; ++i) {
        before();
        values.push_back(time_once(stream, [&] { executable.launch(stream); }));
      }
      std::sort(values.begin(), values.end());
      us = values[values.size() / 2];
    }
    KVTIER_CUDA_CHECK(cudaGraphDestroy(prefix));
    if (kept > 0) stages.push_back({node_name(nodes[kept - 1]), us - shorter});
    shorter = us;
  }
  return stages;
}

Times time_graph(cudaStream_t stream, int units, int repeats, const std::function<void()>& work,
                 int passes) {
  const Graph graph(stream, [&] {
    for (int pass = 0; pass < passes; ++pass) work();
  });
  const Times times = time_events(stream, repeats, [&] { graph.launch(stream); });
  const int things = units * passes;
  return {times.median / things, times.min / things, times.max / things};
}

}  // namespace kvtier::bench
