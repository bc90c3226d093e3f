#pragma once

#include "kvtier/tensor.h"

#include "transfer/device/device.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// What the benchmarks share: memory with random contents, times of graph replays, the rates of
/// this machine, and the JSON rows of a run.
namespace kvtier::bench {

using nlohmann::json;

/// bf16 memory of the device, standard normal values times `scale`.
class DeviceTensor {
 public:
  DeviceTensor(std::int64_t count, std::uint64_t seed, float scale = 1.0F);
  ~DeviceTensor();
  DeviceTensor(const DeviceTensor&) = delete;  // owns memory
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  [[nodiscard]] __nv_bfloat16* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }

 private:
  __nv_bfloat16* data_ = nullptr;
  std::int64_t count_ = 0;
};

/// Fills any memory that the device can write. Enqueued.
void fill_normal(cudaStream_t stream, __nv_bfloat16* data, std::int64_t count, std::uint64_t seed,
                 float scale);
/// Widens bf16 to fp32. Enqueued.
void widen(cudaStream_t stream, const __nv_bfloat16* from, std::int64_t count, float* to);

/// Times of repeated work, microseconds.
struct Times {
  double median = 0.0;
  double min = 0.0;
  double max = 0.0;
};

/// Time between two events around `work`, microseconds.
[[nodiscard]] double time_once(cudaStream_t stream, const std::function<void()>& work);
/// Time between two events around `work`, `repeats` times after three that do not count.
[[nodiscard]] Times time_events(cudaStream_t stream, int repeats,
                                const std::function<void()>& work);

/// A captured graph.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;  // owns the graph
  Graph& operator=(const Graph&) = delete;

  void launch(cudaStream_t stream) const;

  struct Stage {
    std::string kernel;
    double us = 0.0;  ///< What the graph takes longer than without this kernel and those after it.
  };
  /// Time that each kernel adds, in the order of the graph. Before each measurement `before`
  /// enqueues all that this graph does, so that kernels find the state that they expect, and then
  /// reads enough else that the L2 cache keeps nothing of it, unless this graph does.
  [[nodiscard]] std::vector<Stage> stages(cudaStream_t stream, int repeats,
                                          const std::function<void()>& before) const;

 private:
  cudaGraph_t graph_{};
  cudaGraphExec_t exec_{};
};

/// Passes over `units` things that give a graph at least 16 of them. The events around a replay
/// hold the launch of the graph, several microseconds, which the times then have a 16th of at most.
[[nodiscard]] constexpr int graph_passes(int units) { return (15 + units) / units; }

/// Replays of a graph of `work`, which does `units` equal things, `passes` times; times are of one
/// thing.
[[nodiscard]] Times time_graph(cudaStream_t stream, int units, int repeats,
                               const std::function<void()>& work, int passes = 1);

/// Rates of the machine, in GB/s, measured when first asked for.
class Machine {
 public:
  explicit Machine(transfer::Device& device) : device_(&device) {}
  /// Device memory, read-only stream over 8 GiB.
  [[nodiscard]] double read_gbps();
  /// Copy engine between pinned and device memory, 256 MiB.
  [[nodiscard]] double host_to_device_gbps();
  [[nodiscard]] double device_to_host_gbps();
  /// All of them; hardware and driver.
  [[nodiscard]] json describe();

 private:
  [[nodiscard]] double copy_gbps(bool to_device);

  transfer::Device* device_;
  double read_ = 0.0, to_device_ = 0.0, to_host_ = 0.0;
};

/// What a benchmark is given, and where its rows go.
class Run {
 public:
  /// Writes the JSON file after every row, so that a run that dies leaves what it had. `prints`:
  /// rows go to standard output as well.
  Run(std::string file, std::string command, std::vector<std::string> cuda_libs, int replays,
      bool prints = true);
  ~Run();
  Run(const Run&) = delete;  // owns the stream
  Run& operator=(const Run&) = delete;

  [[nodiscard]] transfer::Device& device() { return *device_; }
  [[nodiscard]] transfer::Stream& queue() { return *queue_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] Machine& machine() { return machine_; }
  [[nodiscard]] int replays() const { return replays_; }
  [[nodiscard]] const std::vector<std::string>& cuda_libs() const { return cuda_libs_; }

  /// Adds a row: `what` is the benchmark, `parameters` name the case, the rest is measured.
  void add(const std::string& what, json parameters, const Times& times, json measured = {});
  /// As `add`, with the rate of `bytes` and its share of the read bandwidth.
  void add_bytes(const std::string& what, json parameters, const Times& times, double bytes,
                 json measured = {});
  /// Adds a row without a time.
  void note(const std::string& what, json parameters, json measured);
  /// Runs `work`; when it throws, the row says what went wrong and the run goes on.
  void attempt(const std::string& what, const json& parameters, const std::function<void()>& work);
  [[nodiscard]] bool failed() const { return failed_; }

 private:
  void push(json row);

  std::unique_ptr<transfer::Device> device_;
  cudaStream_t stream_{};
  std::unique_ptr<transfer::Stream> queue_;
  Machine machine_;
  std::string file_;
  std::vector<std::string> cuda_libs_;
  int replays_;
  bool prints_;
  json document_;
  bool failed_ = false;
};

}  // namespace kvtier::bench
