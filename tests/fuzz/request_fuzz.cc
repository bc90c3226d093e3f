// Requests: a sequence of messages, as bytes, into the service without its transport. Each call
// ends once, with a reply or an error that tells nothing it should not; one that fails has changed
// nothing; at the end nothing is left.

#include "services/base/executor.h"
#include "services/core/service_core.h"
#include "services/wire/each_tensor.h"
#include "tests/fuzz/fuzz.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <string>

namespace {

using kvtier::MiB;
using kvtier::fuzz::Input;
using kvtier::fuzz::require;
using namespace kvtier::services;  // NOLINT(google-build-using-namespace): a program
namespace v1 = kvtier::v1;

constexpr int kCalls = 8;
constexpr int kLayers = 2;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kPlanes = 64;
constexpr std::int64_t kTokens = 12;
constexpr std::size_t kRegionBytes = 8 << 10;
constexpr std::int64_t kReplyBytes = std::int64_t{1} << 20;

/// Runs what was posted on request.
class Queue final : public Executor {
 public:
  std::unique_ptr<Strand> make_strand(const Lane& /*lane*/) override {
    return std::make_unique<Line>(*this);
  }
  void finish() override { run(); }
  void run() {
    while (!tasks_.empty()) {
      Strand::Task task = std::move(tasks_.front());
      tasks_.pop_front();
      while (!task()) {
      }
    }
  }

 private:
  class Line final : public Strand {
   public:
    explicit Line(Queue& queue) : queue_(queue) {}
    void add(Start /*start*/, Task task) override { queue_.tasks_.push_back(std::move(task)); }

   private:
    Queue& queue_;
  };
  std::deque<Strand::Task> tasks_;
};

ServiceCoreOptions options() {
  ServiceCoreOptions options;
  options.models.backend = kvtier::Backend::kCpu;
  options.models.max_models = 2;
  options.models.memory.host_bytes = 1 * MiB;
  options.models.memory.device_bytes = 12 * MiB;
  options.models.memory.max_session_tokens = 256;
  options.retrieval.top_k = 4;
  options.retrieval.sink_tokens = 2;
  options.retrieval.recent_tokens = 2;
  options.max_session_memory = 64 * static_cast<std::int64_t>(MiB);
  return options;
}

/// A service with one session, to which calls without a name go, and one region of device memory,
/// to which places without a name do.
class Service {
 public:
  Service() : core_(options(), queue_) {
    region_ = caller().tenant->regions().add({shared_, kRegionBytes});
    open();
    fill();
    memory_ = core_.session_memory();
  }
  ~Service() { queue_.run(); }
  Service(const Service&) = delete;  // tasks hold its address
  Service& operator=(const Service&) = delete;

  void run(std::size_t kind, std::string_view bytes) {
    const std::vector<std::int64_t> before = lengths();
    const bool ok = dispatch(kind, bytes);
    require(core_.inflight_bytes() == 0, "nothing is in flight after a call");
    if (!ok) require(lengths() == before, "a call that fails has changed nothing");
  }

  /// As it was at the start.
  void reset() {
    v1::ListSessionsRequest list;
    list.set_page_size(1000);
    v1::ListSessionsResponse names;
    core_.list_sessions(caller(), list, names);
    for (const std::string& name : names.names()) {
      if (name == name_) continue;
      v1::ReleaseSessionRequest request;
      request.set_name(name);
      v1::ReleaseSessionResponse released;
      require(call([&](Done done) { core_.run(caller(), request, released, std::move(done)); }),
              "a session can be released");
    }
    if (lengths().empty()) open();  // a call has released it
    v1::TruncateSessionRequest empty;
    empty.set_name(name_);
    v1::TruncateSessionResponse emptied;
    require(call([&](Done done) { core_.run(caller(), empty, emptied, std::move(done)); }),
            "a session can be emptied");
    fill();
    require(core_.num_sessions() == 1, "released sessions are gone");
    // A last reply that is kept may add to it.
    require(core_.session_memory() <= memory_ + kReplyBytes, "their memory has come back");
  }

 private:
  void open() {
    v1::CreateSessionRequest request;
    request.mutable_geometry()->set_layers(kLayers);
    request.mutable_geometry()->set_query_heads(2 * kKvHeads);
    request.mutable_geometry()->set_kv_heads(kKvHeads);
    request.mutable_geometry()->set_head_dim(kHeadDim);
    v1::Sketch& sketch = *request.add_extra_sketches();  // for calls that are norm-aware
    sketch.set_kind(v1::PLANE_KIND_ORTHOGONAL);
    sketch.set_num_planes(kPlanes);
    v1::CreateSessionResponse response;
    require(call([&](Done done) { core_.run(caller(), request, response, std::move(done)); }),
            "a session can be created");
    name_ = response.session().name();
  }

  /// Stores the tokens that the session has at the start of an input, and what the region has.
  void fill() {
    std::fill_n(shared_.get(), kRegionBytes, std::byte{'x'});
    for (int layer = 0; layer < kLayers; ++layer) {
      v1::AppendRequest chunk;
      chunk.set_layer(layer);
      for (v1::Tensor* tensor : {chunk.mutable_key(), chunk.mutable_value()}) {
        tensor->set_dtype(v1::DATA_TYPE_FLOAT16);
        for (const std::int64_t extent : {kTokens, std::int64_t{kKvHeads}, std::int64_t{kHeadDim}})
          tensor->add_shape(extent);
        tensor->mutable_data()->assign(kTokens * kKvHeads * kHeadDim * 2, 'x');
      }
      v1::AppendResponse stored;
      require(
          call([&](Done done) { core_.run_in(name_, caller(), chunk, stored, std::move(done)); }),
          "tokens can be stored");
    }
  }

  [[nodiscard]] Call caller() const { return {.tenant = core_.tenants().all()[0].get()}; }

  /// Makes a call and checks how it ends; returns whether it succeeded.
  template <typename Start>
  bool call(Start start) {
    int endings = 0;
    bool ok = true;
    start([&](const ServiceError* error) {
      ++endings;
      ok = error == nullptr;
      if (!ok) check(*error);
    });
    queue_.run();
    require(endings == 1, "a call ends once");
    return ok;
  }

  static void check(const ServiceError& error) {
    require(!error.reason().empty(), "an error has a reason");
    require(error.reason() != "FAULT" && error.reason() != "DEVICE_LOST",
            "a request is no fault of the server");
    require(error_details(error).size() < 4096, "details fit a trailer");
    require(sanitized_message(error).size() <= 1024, "a message fits a trailer");
  }

  std::vector<std::int64_t> lengths() {
    v1::GetSessionRequest request;
    request.set_name(name_);
    v1::GetSessionResponse response;
    const bool there =
        call([&](Done done) { core_.run(caller(), request, response, std::move(done)); });
    if (!there) return {};
    return {response.session().layer_lengths().begin(), response.session().layer_lengths().end()};
  }

  void address(v1::DeviceMemory& place) const {
    if (place.region().empty()) place.set_region(region_);
  }
  /// The places that a request names.
  template <typename Request>
  void address_places(Request& request) const {
    if constexpr (requires { request.has_out_memory(); }) {
      if (request.has_out_memory()) address(*request.mutable_out_memory());
      if (request.has_lse_memory()) address(*request.mutable_lse_memory());
    }
    if constexpr (requires { each_tensor(request, [](v1::Tensor&) {}); }) {
      each_tensor(request, [&](v1::Tensor& tensor) {
        if (tensor.has_memory()) address(*tensor.mutable_memory());
      });
    }
  }

  template <typename Request>
  void address(Request& request) const {
    address_places(request);
    if constexpr (requires { request.session(); }) {
      if (request.session().empty()) request.set_session(name_);
    } else if constexpr (requires { request.names(); }) {
      if (request.names().empty()) request.add_names(name_);
    } else if constexpr (requires { request.items(); }) {
      for (auto& item : *request.mutable_items()) address(item);
    } else if constexpr (requires { request.name(); }) {
      if (request.name().empty()) request.set_name(name_);
    }
  }

  /// Parses a request and makes its call, if it parses: gRPC refuses it otherwise.
  template <typename Request, typename Response, typename Method>
  bool make(std::string_view bytes, Method method) {
    Request request;
    if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return true;
    address(request);
    Response response;
    return call([&](Done done) { method(request, response, std::move(done)); });
  }

  /// A call that throws instead of telling.
  template <typename Call>
  static void direct(Done& done, Call call) {
    try {
      call();
    } catch (const ServiceError& error) {
      done(&error);
      return;
    }
    done(nullptr);
  }

  bool dispatch(std::size_t kind, std::string_view bytes);

  // Of the size that the request states, so that AddressSanitizer sees what goes beyond it.
  const std::shared_ptr<std::byte> shared_{new std::byte[kRegionBytes],
                                           std::default_delete<std::byte[]>()};
  std::string region_;
  Queue queue_;
  ServiceCore core_;
  std::string name_;
  std::int64_t memory_ = 0;
};

constexpr std::size_t kKinds = 17;

bool Service::dispatch(std::size_t kind, std::string_view bytes) {
  const Call caller = this->caller();
  switch (kind) {
    case 0:
      return make<v1::CreateSessionRequest, v1::CreateSessionResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 1:
      return make<v1::GetSessionRequest, v1::GetSessionResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 2:
      return make<v1::TruncateSessionRequest, v1::TruncateSessionResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 3:
      return make<v1::ReleaseSessionRequest, v1::ReleaseSessionResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 4:
      return make<v1::ListSessionsRequest, v1::ListSessionsResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            direct(done, [&] { core_.list_sessions(caller, request, response); });
          });
    case 5:
      return make<v1::KeepAliveRequest, v1::KeepAliveResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            direct(done, [&] { core_.keep_alive(caller, request, response); });
          });
    case 6:
      return make<v1::AppendRequest, v1::AppendResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 7:
      return make<v1::SelectRequest, v1::SelectResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 8:
      return make<v1::AttendRequest, v1::AttendResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 9:
      return make<v1::DecodeRequest, v1::DecodeResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 10:
      return make<v1::BatchSelectRequest, v1::BatchSelectResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 11:
      return make<v1::BatchAttendRequest, v1::BatchAttendResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 14:
      return make<v1::FetchRequest, v1::FetchResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 15:
      return make<v1::BatchFetchRequest, v1::BatchFetchResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 16:
      return make<v1::PublishPrefixRequest, v1::PublishPrefixResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    case 12:
      return make<v1::ForkSessionRequest, v1::ForkSessionResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
    default:
      return make<v1::BatchDecodeRequest, v1::BatchDecodeResponse>(
          bytes, [&](auto& request, auto& response, Done done) {
            core_.run(caller, request, response, std::move(done));
          });
  }
}

}  // namespace

/// For each call: a byte for its kind, two for the length of the message, the message.
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Service service;
  Input input(data, size);
  for (int i = 0; i < kCalls && !input.empty(); ++i) {
    const std::size_t kind = input.number(kKinds);
    const std::size_t bytes = input.number16();
    service.run(kind, input.take(bytes));
  }
  service.reset();
  return 0;
}
