// Tutorial 00: store keys and values, decode a token over the few tokens that matter, and compare
// with dense attention. docs/tutorials/00-append-and-decode.md explains it.

#include "kvtier/engine.h"
#include "kvtier/error.h"

#include "tutorials/tensors.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() try {
  constexpr std::int64_t kTokens = 4000;
  kvtier::Config config;
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  config.memory.host_bytes = 16 * kvtier::MiB;
  config.memory.max_session_tokens = kTokens + 1;
  kvtier::Engine engine(config);
  kvtier::Session session = engine.open();

  // Prefill: keys and values of the prompt, here random ones.
  using tutorial::Tensor;
  const Tensor keys = Tensor::random(kTokens + 1, 2, 64, 1);
  const Tensor values = Tensor::random(kTokens + 1, 2, 64, 2);
  kvtier::TensorView prompt_keys = keys.view(), prompt_values = values.view();
  prompt_keys.shape[0] = prompt_values.shape[0] = kTokens;  // all but the last token
  session.append(0, prompt_keys, prompt_values);

  // A query that looks for token 1234: attention is sharp, as that of trained models often is.
  Tensor query = Tensor::random(1, 8, 64, 3, 0.3F);
  for (int head = 0; head < 8; ++head) {
    for (int i = 0; i < 64; ++i) query.row(0, head)[i] += 2.0F * keys.row(1234, head / 4)[i];
  }

  // Decode: append the last token, select for each KV head as many tokens as the error needs,
  // attend.
  Tensor out(1, 8, 64);
  const std::int64_t most = config.retrieval.most_selected(kTokens + 1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * most));
  std::vector<float> missed(8);
  kvtier::DecodeInputs inputs;
  inputs.query = query.view();
  inputs.key = {keys.row(kTokens, 0), kvtier::DType::kFloat32, {1, 2, 64}};
  inputs.value = {values.row(kTokens, 0), kvtier::DType::kFloat32, {1, 2, 64}};
  kvtier::AttendOutputs outputs;
  outputs.out = out.view();
  outputs.selected = {ids.data(), kvtier::DType::kInt32, {1, 2, most}};
  outputs.missed = {missed.data(), kvtier::DType::kFloat32, {1, 8}};
  session.decode(0, inputs, outputs);

  const Tensor dense =
      tutorial::dense_attention(config.model, query, keys, values, session.length());
  const double sparse_error = tutorial::relative_error(out, dense);
  const auto selected = std::ranges::count_if(ids, [](std::int32_t id) { return id >= 0; });
  std::printf(
      "%lld of %lld tokens for 2 KV heads: relative error %.4f, missed mass of head 0 %.4f\n",
      static_cast<long long>(selected), static_cast<long long>(session.length()), sparse_error,
      double{missed[0]});

  // With k above the length, every token is attended: the result is dense attention.
  kvtier::RetrievalConfig everything = config.retrieval;
  everything.top_k = kTokens;
  kvtier::AttendOptions options;
  options.retrieval = &everything;
  kvtier::AttendInputs attend_inputs;
  attend_inputs.query = query.view();
  kvtier::AttendOutputs attend_outputs;
  attend_outputs.out = out.view();
  session.attend(0, attend_inputs, attend_outputs, {}, options);
  const double full_error = tutorial::relative_error(out, dense);
  std::printf("all tokens: relative error %.4f, the rounding of bf16\n", full_error);

  return sparse_error < 0.1 && full_error < 0.01 ? 0 : 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
