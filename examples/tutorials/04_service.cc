// Tutorial 04: the same calls, with the KV in a server. Start `kvtier serve --listen unix:PATH`,
// then run this program with unix:PATH. docs/tutorials/04-service.md explains it.

#include "kvtier/client.h"
#include "kvtier/error.h"

#include "tutorials/tensors.h"

#include <cstdint>
#include <cstdio>

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "expected the address of a server, such as unix:/tmp/kvtier.sock\n");
    return 2;
  }
  using tutorial::Tensor;
  constexpr std::int64_t kTokens = 2000;
  kvtier::ClientOptions options;
  options.server = argv[1];
  kvtier::Client client(options);

  kvtier::RemoteSessionConfig config;
  config.model = {.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  kvtier::RemoteSession session = client.open(config);  // its lease is renewed in the background

  const Tensor keys = Tensor::random(kTokens, 2, 64, 1), values = Tensor::random(kTokens, 2, 64, 2);
  session.append(0, keys.view(), values.view());

  // Queries that look for token 700, as in tutorial 00.
  Tensor query = Tensor::random(1, 8, 64, 3, 0.3F);
  for (int head = 0; head < 8; ++head) {
    for (int i = 0; i < 64; ++i) query.row(0, head)[i] += 2.0F * keys.row(700, head / 4)[i];
  }
  Tensor out(1, 8, 64);
  kvtier::AttendInputs inputs;
  inputs.query = query.view();
  kvtier::AttendOutputs outputs;
  outputs.out = out.view();
  session.attend(0, inputs, outputs);
  const double error = tutorial::relative_error(
      out, tutorial::dense_attention(config.model, query, keys, values, kTokens));
  std::printf("%lld tokens in %s: relative error %.4f\n", static_cast<long long>(session.length()),
              argv[1], error);

  // Errors of the server are ClientError, with its reason.
  try {
    session.append(7, keys.view(), values.view());
  } catch (const kvtier::ClientError& refused) {
    std::printf("refused as it should be: %s\n", refused.what());
    return error < 0.1 ? 0 : 1;
  }
  return 1;
} catch (const kvtier::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
