#include "kvtier/client.h"
#include "kvtier/v1/transfer.pb.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <ctime>
#include <memory>
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
                                          std::mt19937_64& random) {
  std::vector<RemotePages::Get> gets;
  for (std::size_t i = 0; i < kBytesPerRound / pages.page_bytes; ++i) {
    gets.push_back({.handle = pages.handles[random() % pages.handles.size()],
                    .to = memory.subspan(i * pages.page_bytes % kBytesPerCall, pages.page_bytes)});
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

nlohmann::json row_of(const char* what, std::size_t page_bytes, const Comparison& comparison) {
  const auto gbps = [](double seconds) {
    return static_cast<double>(kBytesPerRound) / seconds / 1e9;
  };
  return {{"what", what},
          {"page_bytes", page_bytes},
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
  Client client({.server = server.endpoint(), .data_plane = false});
  const auto wide = wide_channel(server.endpoint());
  std::vector<std::byte> memory(kBytesPerCall);
  std::mt19937_64 random(3);
  for (const PageSet* set : {&server.small(), &server.large()}) {
    RemotePages pages = client.open_pages(
        {.model = "benchmark", .page_bytes = static_cast<std::int64_t>(set->page_bytes)});
    const std::vector<RemotePages::Get> gets = random_gets(*set, memory, random);
    const std::size_t per_call = kBytesPerCall / set->page_bytes;
    const auto read = [&](const auto& part) {
      for (std::size_t first = 0; first < gets.size(); first += per_call) {
        part(std::span(gets).subspan(first, std::min(per_call, gets.size() - first)));
      }
    };
    const auto messages = [&] {
      read([&](auto part) {
        std::vector<std::string> handles;
        for (const RemotePages::Get& page : part) handles.push_back(page.handle);
        server.messages().read(pages.name(), set->page_bytes, handles);
      });
    };
    const auto raw = [&] {
      read([&](auto part) {
        for (const RemotePages::Result& result : pages.get(part)) {
          if (!result.ok()) throw std::runtime_error("a page: " + result.reason);
        }
      });
    };
    const auto bare = [&] {
      read([&](auto part) { read_bare(*wide, part.size() * set->page_bytes); });
    };
    const auto cpu = [&server] {
      return server.cpu_seconds() + server.messages().cpu_seconds() +
             cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
    };
    const int rounds_of_rounds = kRoundsOfRounds * settings.rounds;
    rows.push_back(row_of("raw_stream_over_messages", set->page_bytes,
                          compare(rounds_of_rounds, messages, raw, cpu)));
    rows.push_back(row_of("bare_stream_over_messages", set->page_bytes,
                          compare(rounds_of_rounds, messages, bare, cpu)));
  }
  return rows;
}

}  // namespace kvtier::bench
