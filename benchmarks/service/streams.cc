#include "kvtier/client.h"
#include "kvtier/v1/transfer.pb.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvtier::bench {
namespace {

constexpr std::size_t kBytesPerRound = std::size_t{256} << 20;
constexpr std::size_t kBytesPerCall = std::size_t{64} << 20;
/// Wake-ups of threads differ from one round to the next by more than what is compared.
constexpr int kRoundsOfRounds = 5;

/// Pages in a random order, and where they go: memory of one call, used again by the next.
std::vector<RemotePages::Get> random_gets(const PageSet& pages, std::span<std::byte> memory,
                                          std::size_t bytes, std::mt19937_64& random) {
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < bytes / pages.page_bytes; ++i) {
    gets.push_back({.handle = pages.handles[random() % pages.handles.size()],
                    .to = memory.subspan(i * pages.page_bytes % memory.size(), pages.page_bytes)});
  }
  return gets;
}

/// Reads as many bytes and drops them: what any stream is held to, whatever it does with them.
void read_bare(grpc::Channel& channel, std::size_t bytes) {
  v1::ReadPagesRequest request;
  for (std::size_t i = 0; i < bytes >> 20U; ++i) request.add_handles("");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::internal::RpcMethod method(kBareMethod, grpc::internal::RpcMethod::SERVER_STREAMING);
  const std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(&channel, method, &context,
                                                                    request));
  std::size_t arrived = 0;
  for (grpc::ByteBuffer message; stream->Read(&message);) arrived += message.Length();
  if (!stream->Finish().ok() || arrived != bytes) {
    throw std::runtime_error("expected " + std::to_string(bytes) + " bytes, found " +
                             std::to_string(arrived));
  }
}

/// With the frames and windows of the client library.
std::shared_ptr<grpc::Channel> wide_channel(const std::string& endpoint) {
  constexpr int kWindow = 4 << 20;
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindow);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kWindow);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

/// Reads of pages of one size, divided among `threads`, each with a client of its own whose reads
/// take `page_streams`.
class Reads {
 public:
  Reads(const ServerProcess& server, const PageSet& pages, int threads, int page_streams,
        std::span<std::byte> memory, std::mt19937_64& random)
      : server_(server),
        page_bytes_(pages.page_bytes),
        threads_(static_cast<std::size_t>(threads)) {
    for (int i = 0; i < threads; ++i) {
      const auto at = static_cast<std::size_t>(i);
      Thread& thread = threads_[at];
      thread.client = std::make_unique<Client>(ClientOptions{
          .server = server.endpoint(), .data_plane = false, .page_streams = page_streams});
      thread.wide = wide_channel(server.endpoint());
      thread.messages = &server.messages(i);
      thread.gets = random_gets(pages, memory.subspan(at * kBytesPerCall, kBytesPerCall),
                                kBytesPerRound / threads_.size(), random);
      thread.pages.emplace(thread.client->open_pages(
          {.model = "benchmark", .page_bytes = static_cast<std::int64_t>(page_bytes_)}));
    }
  }

  void messages() {
    each_call([this](Thread& thread, std::span<const RemotePages::Get> gets) {
      std::vector<std::string> handles;
      for (const RemotePages::Get& page : gets) handles.push_back(page.handle);
      thread.messages->read(thread.pages->name(), page_bytes_, handles);
    });
  }
  void raw() {
    each_call([](Thread& thread, std::span<const RemotePages::Get> gets) {
      for (const RemotePages::Result& result : thread.pages->get(gets)) {
        if (!result.ok()) throw std::runtime_error("a page: " + result.reason);
      }
    });
  }
  void bare() {
    each_call([this](Thread& thread, std::span<const RemotePages::Get> gets) {
      read_bare(*thread.wide, gets.size() * page_bytes_);
    });
  }
  /// Seconds of CPU of all that take part.
  [[nodiscard]] double cpu() const {
    double seconds = server_.cpu_seconds() + cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (const Thread& thread : threads_) seconds += thread.messages->cpu_seconds();
    return seconds;
  }

 private:
  struct Thread {
    std::unique_ptr<Client> client;
    std::shared_ptr<grpc::Channel> wide;
    const MessageReader* messages = nullptr;
    std::vector<RemotePages::Get> gets;
    std::optional<RemotePages> pages;
  };

  template <typename Part>
  void each_call(const Part& part) {
    const std::size_t per_call = kBytesPerCall / page_bytes_;
    const auto work = [&](Thread& thread) {
      const std::span<const RemotePages::Get> gets(thread.gets);
      for (std::size_t first = 0; first < gets.size(); first += per_call) {
        part(thread, gets.subspan(first, std::min(per_call, gets.size() - first)));
      }
    };
    std::vector<std::future<void>> others;
    for (std::size_t i = 1; i < threads_.size(); ++i) {
      others.push_back(std::async(std::launch::async, [&, i] { work(threads_[i]); }));
    }
    work(threads_.front());
    for (std::future<void>& other : others) other.get();
  }

  const ServerProcess& server_;
  std::size_t page_bytes_;
  std::vector<Thread> threads_;
};

nlohmann::json row_of(const char* what, std::size_t page_bytes, int streams,
                      const Comparison& comparison) {
  const auto gbps = [](double seconds) {
    return static_cast<double>(kBytesPerRound) / seconds / 1e9;
  };
  return {{"what", what},
          {"page_bytes", page_bytes},
          {"streams", streams},
          {"gbps", gbps(comparison.second)},
          {"baseline_gbps", gbps(comparison.first)},
          {"times", comparison.ratio},
          {"times_least", comparison.least},
          {"times_most", comparison.most},
          {"cpu_seconds_per_gb", 1 / gbps(comparison.second_cpu)},
          {"baseline_cpu_seconds_per_gb", 1 / gbps(comparison.first_cpu)},
          {"cpu_times", comparison.cpu_ratio}};
}

}  // namespace

nlohmann::json stream_rows(const ServerProcess& server, const Settings& settings) {
  nlohmann::json rows = nlohmann::json::array();
  std::vector<std::byte> memory(kMaxStreams * kBytesPerCall);
  std::mt19937_64 random(3);
  for (const PageSet* set : {&server.small(), &server.large()}) {
    for (int streams = 1; streams <= kMaxStreams; ++streams) {
      Reads alone(server, *set, streams, 1, memory, random);
      Reads client(server, *set, 1, ClientOptions{}.page_streams, memory, random);  // as it comes
      const auto compared = [&](const char* what, const std::function<void()>& work) {
        rows.push_back(row_of(what, set->page_bytes, streams,
                              compare(
                                  kRoundsOfRounds * settings.rounds, [&] { alone.messages(); },
                                  work, [&] { return alone.cpu(); })));
      };
      compared("client_over_messages", [&] { client.raw(); });
      compared("raw_stream_over_messages", [&] { alone.raw(); });
      compared("bare_stream_over_messages", [&] { alone.bare(); });
    }
  }
  return rows;
}

}  // namespace kvtier::bench
