#pragma once

#include "services/base/executor.h"
#include "services/core/service_core.h"
#include "support/retrieval.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace kvtier::services::testing {

/// An executor without threads: what was posted runs when the test says so.
class ManualExecutor final : public Executor {
 public:
  using Executor::make_strand;
  std::unique_ptr<Strand> make_strand(const Lane& lane) override {
    last_lane = lane;
    return std::make_unique<Queue>(*this);
  }
  void finish() override { run_all(); }
  void run_all() {
    while (run_one()) {
    }
  }
  bool run_one() {
    if (tasks_.empty()) return false;
    Strand::Task task = std::move(tasks_.front());
    tasks_.pop_front();
    while (!task()) {
    }
    return true;
  }
  /// Runs what was posted last, as if all else took long.
  bool run_last() {
    if (tasks_.empty()) return false;
    std::rotate(tasks_.begin(), tasks_.end() - 1, tasks_.end());
    return run_one();
  }
  [[nodiscard]] std::size_t num_waiting() const { return tasks_.size(); }

  Lane last_lane;  ///< Of the last strand that was made.

 private:
  class Queue final : public Strand {
   public:
    explicit Queue(ManualExecutor& executor) : executor_(executor) {}
    void add(Start /*start*/, Task task) override { executor_.tasks_.push_back(std::move(task)); }

   private:
    ManualExecutor& executor_;
  };

  std::deque<Strand::Task> tasks_;
};

inline constexpr int kLayers = 2;
inline constexpr int kQueryHeads = 4;
inline constexpr int kKvHeads = 2;
inline constexpr int kHeadDim = 64;
inline constexpr std::int64_t kMaxTokens = 4096;

inline constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

inline void set_shape(v1::Tensor& tensor, std::initializer_list<std::int64_t> shape) {
  tensor.clear_shape();
  for (const std::int64_t extent : shape) tensor.add_shape(extent);
}

inline v1::Geometry small_geometry() {
  v1::Geometry geometry;
  geometry.set_layers(kLayers);
  geometry.set_query_heads(kQueryHeads);
  geometry.set_kv_heads(kKvHeads);
  geometry.set_head_dim(kHeadDim);
  return geometry;
}

inline ServiceCoreOptions small_options() {
  ServiceCoreOptions options;
  options.models.backend = Backend::kCpu;
  options.models.memory.host_bytes = 8 * MiB;
  options.models.memory.device_bytes = 64 * MiB;
  options.models.memory.max_session_tokens = kMaxTokens;
  options.retrieval = kvtier::testing::top_k_of_signs();
  options.retrieval.top_k = 16;
  options.retrieval.sink_tokens = 4;
  options.retrieval.recent_tokens = 4;
  return options;
}

/// Of a core with threads and the real clock, whose calls wait as long as a busy machine makes
/// them.
inline ServiceCoreOptions patient_options() {
  ServiceCoreOptions options = small_options();
  options.max_call_time = std::chrono::minutes(10);
  return options;
}

/// A tensor message of random fp32 `[tokens, heads, kHeadDim]`.
inline v1::Tensor random_tensor(std::int64_t tokens, int heads, std::uint64_t seed) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  for (const std::int64_t extent : {tokens, std::int64_t{heads}, std::int64_t{kHeadDim}}) {
    tensor.add_shape(extent);
  }
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) *
                            kHeadDim);
  for (float& value : values) value = normal(random);
  tensor.mutable_data()->assign(reinterpret_cast<const char*>(values.data()),
                                values.size() * sizeof(float));
  return tensor;
}

inline v1::AppendRequest append_request(int layer, std::int64_t tokens, std::uint64_t seed) {
  v1::AppendRequest request;
  request.set_layer(layer);
  *request.mutable_key() = random_tensor(tokens, kKvHeads, seed);
  *request.mutable_value() = random_tensor(tokens, kKvHeads, seed + 1000);
  return request;
}

inline v1::DecodeRequest decode_request(const std::string& session, int layer, std::int64_t step,
                                        std::uint64_t seed) {
  v1::DecodeRequest request;
  request.set_session(session);
  request.set_layer(layer);
  request.set_step(step);
  *request.mutable_query() = random_tensor(1, kQueryHeads, seed);
  *request.mutable_key() = random_tensor(1, kKvHeads, seed + 1);
  *request.mutable_value() = random_tensor(1, kKvHeads, seed + 2);
  return request;
}

/// How a call ended.
struct Ending {
  bool done = false;
  std::optional<ServiceError> error;

  [[nodiscard]] bool ok() const { return done && !error; }
  [[nodiscard]] std::string reason() const {
    return !done ? "NOT DONE" : error ? error->reason() : "OK";
  }
  [[nodiscard]] Done listener() {
    return [this](const ServiceError* failure) {
      EXPECT_FALSE(done) << "answered twice";
      done = true;
      if (failure != nullptr) error = *failure;
    };
  }
};

/// A core over a manual executor and a clock that the test moves.
class CoreTest : public ::testing::Test {
 protected:
  void make_core(ServiceCoreOptions options) {
    options.now = [this] { return now_; };
    core_ = std::make_unique<ServiceCore>(std::move(options), executor_);
  }
  void TearDown() override { executor_.run_all(); }

  [[nodiscard]] Call call(std::size_t tenant = 0) {
    return {.tenant = core_->tenants().all()[tenant].get()};
  }
  [[nodiscard]] v1::CreateSessionRequest create_request() const {
    v1::CreateSessionRequest request;
    *request.mutable_geometry() = small_geometry();
    return request;
  }
  Ending create(const v1::CreateSessionRequest& request, v1::CreateSessionResponse& response,
                std::size_t tenant = 0) {
    Ending ending;
    core_->run(call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  /// Returns the name of a new session.
  std::string open(std::size_t tenant = 0) {
    v1::CreateSessionResponse response;
    const Ending ending = create(create_request(), response, tenant);
    EXPECT_EQ(ending.reason(), "OK") << (ending.error ? ending.error->what() : "");
    return response.session().name();
  }
  Ending get(const std::string& name, v1::GetSessionResponse& response, std::size_t tenant = 0) {
    v1::GetSessionRequest request;
    request.set_name(name);
    Ending ending;
    core_->run(call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  std::string reason_of_get(const std::string& name, std::size_t tenant = 0) {
    v1::GetSessionResponse response;
    return get(name, response, tenant).reason();
  }
  Ending append(const std::string& name, const v1::AppendRequest& request, std::size_t tenant = 0) {
    v1::AppendResponse response;
    Ending ending;
    core_->run_in(name, call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  Ending decode(const v1::DecodeRequest& request, v1::DecodeResponse& response) {
    Ending ending;
    core_->run(call(), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  Ending release(const std::string& name, const std::string& request_id = "",
                 std::size_t tenant = 0) {
    v1::ReleaseSessionRequest request;
    request.set_name(name);
    request.set_request_id(request_id);
    v1::ReleaseSessionResponse response;
    Ending ending;
    core_->run(call(tenant), request, response, ending.listener());
    executor_.run_all();
    return ending;
  }
  [[nodiscard]] std::vector<std::int64_t> lengths(const std::string& name) {
    v1::GetSessionResponse response;
    EXPECT_EQ(get(name, response).reason(), "OK");
    return {response.session().layer_lengths().begin(), response.session().layer_lengths().end()};
  }
  [[nodiscard]] Tenant& tenant(std::size_t index = 0) { return *core_->tenants().all()[index]; }

  TimePoint now_ = TimePoint(std::chrono::hours(1));
  ManualExecutor executor_;
  std::unique_ptr<ServiceCore> core_;
};

inline constexpr const char* kUuid = "01234567-89ab-4cde-8f01-23456789abcd";
inline constexpr const char* kOtherUuid = "11234567-89ab-4cde-8f01-23456789abcd";

/// Two tenants, distinguished by token.
inline std::vector<TenantConfig> two_tenants() {
  TenantConfig first;
  first.name = "first";
  first.token_sha256 = std::string(64, '1');
  TenantConfig second;
  second.name = "second";
  second.token_sha256 = std::string(64, '2');
  return {first, second};
}

}  // namespace kvtier::services::testing
