#include "kvtier/client.h"

#include <cstdint>
#include <iostream>
#include <vector>

/// Opens a session on the server given, prints its name, and decodes until it is killed.
int main(int /*argc*/, char** argv) {
  using kvtier::DType;
  kvtier::Client client({.server = argv[1]});
  kvtier::RemoteSessionConfig config;
  config.model = {.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
  kvtier::RemoteSession session = client.open(config);
  std::cout << session.name() << std::endl;
  const std::vector<float> rows(2 * 64, 0.5F);
  std::vector<float> out(2 * 64);
  kvtier::AttendOutputs outputs;
  outputs.out = kvtier::MutableTensorView(out.data(), DType::kFloat32, {1, 2, 64});
  for (;;) {
    if (session.length() > 1000) session.truncate(0);
    session.decode(0,
                   {.query = {rows.data(), DType::kFloat32, {1, 2, 64}},
                    .key = {rows.data(), DType::kFloat32, {1, 1, 64}},
                    .value = {rows.data(), DType::kFloat32, {1, 1, 64}}},
                   outputs);
  }
}
