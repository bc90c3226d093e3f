#include "kvtier/client.h"

#include "benchmarks/service/benchmarks.h"
#include "benchmarks/service/measure.h"
#include "llama/decoder.h"
#include "llama/model_config.h"
#include "llama/server_session.h"

#include <random>

namespace kvtier::bench {
namespace {

constexpr int kSteps = 96;

/// The same keys and values everywhere: the time of a step does not depend on what they are.
void fill(llama::KvSession& session, const llama::ModelConfig& model, std::int64_t tokens) {
  std::minstd_rand random(1);
  std::vector<std::uint16_t> values(
      static_cast<std::size_t>(tokens * model.kv_heads * model.head_dim));
  for (int layer = 0; layer < model.layers; ++layer) {
    for (auto& value : values) {
      value = static_cast<std::uint16_t>(0x3E00U | (random() & 0x80FFU));
    }
    const TensorView view{
        values.data(), DType::kBFloat16, {tokens, model.kv_heads, model.head_dim}};
    session.append(layer, view, view, {});
  }
}

/// Seconds of every step, of all sessions in turn.
std::vector<std::vector<double>> time_steps(llama::Decoder& decoder,
                                            const std::vector<llama::KvSession*>& sessions,
                                            const AttendOptions& options,
                                            std::vector<std::vector<float>>& logits) {
  std::vector<std::vector<double>> seconds(sessions.size());
  logits.resize(sessions.size());
  for (int step = 0; step < kSteps + 8; ++step) {
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      const std::int32_t token = 10 + step;
      const double time = seconds_of([&] {
        logits[i] = decoder.decode(*sessions[i], {&token, 1}, options);
      });
      if (step >= 8) seconds[i].push_back(time);
    }
  }
  return seconds;
}

}  // namespace

nlohmann::json decode_rows(const ServerProcess& server, const Settings& settings) {
  llama::Decoder decoder = llama::load_decoder(settings.model, llama::make_cpu_compute());
  const llama::ModelConfig& model = decoder.config();
  Config config;
  config.backend = Backend::kCpu;
  config.model = {.layers = model.layers,
                  .query_heads = model.query_heads,
                  .kv_heads = model.kv_heads,
                  .head_dim = model.head_dim};
  config.memory.host_bytes = 512 * MiB;
  config.memory.device_bytes = 256 * MiB;
  config.memory.max_session_tokens = 16384;
  config.retrieval.estimator = Estimator::kNormAware;
  config.retrieval.sparsity = 33.0;
  config.retrieval.sink_tokens = 64;
  config.retrieval.recent_tokens = 64;
  Engine engine(config);
  Session own = engine.open();
  llama::EmbeddedSession embedded(own);
  Client plane({.server = server.endpoint()});
  Client grpc({.server = server.endpoint(), .data_plane = false});
  const RemoteSessionConfig remote{.model = config.model,
                                   .retrieval = config.retrieval,
                                   .extra_sketches = {},
                                   .capacity_tokens = 16384};
  llama::ServerSession shared(plane.open(remote));
  llama::ServerSession streamed(grpc.open(remote));
  for (llama::KvSession* session :
       {static_cast<llama::KvSession*>(&embedded), static_cast<llama::KvSession*>(&shared),
        static_cast<llama::KvSession*>(&streamed)}) {
    fill(*session, model, settings.tokens);
  }

  std::vector<std::vector<float>> logits;
  const auto seconds = time_steps(decoder, {&embedded, &shared, &streamed}, {}, logits);

  const double base = median(seconds[0]);
  nlohmann::json rows = nlohmann::json::array();
  const std::vector<std::string> names{"decode_shared_memory_over_embedded",
                                       "decode_grpc_over_embedded"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t step = 0; step < seconds[0].size(); ++step) {
      ratios.push_back(seconds[i + 1][step] / seconds[0][step]);
    }
    rows.push_back({{"what", names[i]},
                    {"tokens", settings.tokens},
                    {"steps", kSteps},
                    {"token_ms", median(seconds[i + 1]) * 1e3},
                    {"baseline_token_ms", base * 1e3},
                    {"overhead", median(ratios) - 1},
                    {"same_logits", logits[i + 1] == logits[0]}});
  }
  return rows;
}

}  // namespace kvtier::bench
