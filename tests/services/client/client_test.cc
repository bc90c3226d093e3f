#include "tests/services/client/client_fixture.h"
#include "tests/support/program.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <unistd.h>
#include <utility>

namespace kvtier::services::testing {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

TEST_P(ClientTest, DecodesTheSameBitsInEveryDtype) {
  fill(150);
  std::uint64_t seed = 1;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto query = random_halves(3 * kQueryHeads * kHeadDim, ++seed);
      const auto key = random_halves(3 * kKvHeads * kHeadDim, ++seed);
      const auto value = random_halves(3 * kKvHeads * kHeadDim, ++seed);
      const DecodeInputs inputs{.query = tokens_view(query, dtype, 3, kQueryHeads),
                                .key = tokens_view(key, dtype, 3, kKvHeads),
                                .value = tokens_view(value, dtype, 3, kKvHeads)};
      std::vector<std::uint16_t> out(query.size());
      std::vector<std::uint16_t> expected(query.size());
      std::vector<float> lse(3 * kQueryHeads);
      std::vector<float> expected_lse(lse.size());
      AttendOutputs outputs;
      outputs.out = MutableTensorView(out.data(), dtype, {3, kQueryHeads, kHeadDim});
      outputs.lse = MutableTensorView(lse.data(), DType::kFloat32, {3, kQueryHeads});
      remote_->decode(layer, inputs, outputs);
      outputs.out.data = expected.data();
      outputs.lse.data = expected_lse.data();
      local_->decode(layer, inputs, outputs);

      EXPECT_THAT(out, ElementsAreArray(expected));
      EXPECT_THAT(lse, ElementsAreArray(expected_lse));
    }
  }
  EXPECT_EQ(remote_->length(), local_->length());
}

TEST_P(ClientTest, TakesStridedTensorsAndOptionsOfTheCall) {
  fill(400);
  // One of two heads' worth of every row: strides that are not dense, in and out.
  const auto wide = random_floats(2 * kQueryHeads * 2 * kHeadDim, 9);
  TensorView query(wide.data(), DType::kFloat32, {2, kQueryHeads, kHeadDim});
  query.strides = {kQueryHeads * 2 * kHeadDim, 2 * kHeadDim, 1, 0};
  RetrievalConfig retrieval = session_config().retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.num_planes = 128;
  retrieval.selection = Selection::kPerQueryHead;
  AttendOptions options;
  options.retrieval = &retrieval;
  options.dense_from = 395;
  options.logit_softcap = 20.0F;
  std::vector<float> out(wide.size(), 7.0F);
  std::vector<float> expected(wide.size(), 7.0F);
  AttendOutputs outputs;
  outputs.out = MutableTensorView(out.data(), DType::kFloat32, {2, kQueryHeads, kHeadDim});
  outputs.out.strides = query.strides;
  remote_->attend(1, {.query = query}, outputs, options);
  outputs.out.data = expected.data();
  local_->attend(1, {.query = query}, outputs, {}, options);
  EXPECT_THAT(out, ElementsAreArray(expected));

  std::vector<std::int32_t> ids(2 * kQueryHeads * 16);
  std::vector<std::int32_t> expected_ids(ids.size());
  std::vector<float> scores(ids.size());
  std::vector<float> expected_scores(ids.size());
  SelectOutputs selected;
  selected.ids = MutableTensorView(ids.data(), DType::kInt32, {2, kQueryHeads, 16});
  selected.scores = MutableTensorView(scores.data(), DType::kFloat32, {2, kQueryHeads, 16});
  remote_->select(1, query, selected, options);
  selected.ids.data = expected_ids.data();
  selected.scores.data = expected_scores.data();
  local_->select(1, query, selected, {}, options);
  EXPECT_THAT(ids, ElementsAreArray(expected_ids));
  EXPECT_THAT(scores, ElementsAreArray(expected_scores));
}

TEST_P(ClientTest, LargeAppendsGoInChunks) {
  const std::int64_t tokens = kMaxTokens;  // 4 MiB of keys and values, four messages
  fill(tokens);
  EXPECT_EQ(remote_->length(), tokens);
  EXPECT_EQ(code_of([this] { fill(1); }), ErrorCode::kResourceExhausted) << message_;
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), tokens);
}

TEST_P(ClientTest, FetchesTheRowsThatWereAppended) {
  const std::int64_t tokens = 3000;
  const auto keys = random_halves(tokens * kKvHeads * kHeadDim, 1);
  const auto values = random_halves(tokens * kKvHeads * kHeadDim, 2);
  remote_->append(1, tokens_view(keys, DType::kBFloat16, tokens, kKvHeads),
                  tokens_view(values, DType::kBFloat16, tokens, kKvHeads));
  constexpr std::int64_t kIds = 9001;  // rows of 2 MiB: more than one piece
  std::mt19937_64 random(3);
  std::uniform_int_distribution<std::int32_t> id(-1, tokens - 1);
  std::vector<std::int32_t> ids(kKvHeads * kIds);
  for (std::int32_t& each : ids) each = id(random);
  std::vector<std::uint16_t> key_rows(kKvHeads * kIds * kHeadDim, 7), value_rows = key_rows;
  const TensorView tokens_of_heads(ids.data(), DType::kInt32, {kKvHeads, kIds});
  FetchOutputs outputs;
  outputs.keys = MutableTensorView(key_rows.data(), DType::kBFloat16, {kKvHeads, kIds, kHeadDim});
  outputs.values =
      MutableTensorView(value_rows.data(), DType::kBFloat16, {kKvHeads, kIds, kHeadDim});
  remote_->fetch(1, tokens_of_heads, outputs);

  for (std::size_t row = 0; row < ids.size(); ++row) {
    const std::size_t head = row / kIds;
    for (std::size_t i = 0; i < kHeadDim; ++i) {
      const std::int32_t token = ids[row];
      const std::size_t at = (static_cast<std::size_t>(token) * kKvHeads + head) * kHeadDim + i;
      ASSERT_EQ(key_rows[row * kHeadDim + i], token < 0 ? 0 : keys[at]) << row << ' ' << i;
      ASSERT_EQ(value_rows[row * kHeadDim + i], token < 0 ? 0 : values[at]) << row << ' ' << i;
    }
  }

  ids[5] = tokens;
  EXPECT_EQ(code_of([&] { remote_->fetch(1, tokens_of_heads, outputs); }),
            ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("tokens[0, 5]: expected -1 or 0..2999, found 3000"));
  ids[5] = 0;
  EXPECT_EQ(code_of([&] { remote_->fetch(0, tokens_of_heads, outputs); }),
            ErrorCode::kFailedPrecondition)
      << "an empty layer";
  outputs.keys.dtype = DType::kFloat16;
  EXPECT_EQ(code_of([&] { remote_->fetch(1, tokens_of_heads, outputs); }),
            ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("of DATA_TYPE_BFLOAT16, found fp16"));
  outputs.values = {};
  EXPECT_EQ(code_of([&] { remote_->fetch(1, tokens_of_heads, outputs); }),
            ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("values: expected"));
}

TEST_P(ClientTest, TruncatesAndForgets) {
  fill(30);
  remote_->truncate(12);
  EXPECT_EQ(remote_->length(0), 12);
  remote_->refresh();
  EXPECT_EQ(remote_->length(1), 12);
  EXPECT_EQ(code_of([this] { remote_->truncate(31); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(server_->core().num_sessions(), 1U);
  remote_.reset();
  EXPECT_EQ(server_->core().num_sessions(), 0U);
}

TEST_P(ClientTest, ForksSeeTheirParentsTokensAndNoOthers) {
  fill(30);
  std::vector<RemoteSession> children = remote_->fork(2);
  EXPECT_EQ(server_->core().num_sessions(), 3U);
  remote_->truncate(12);
  const auto values = random_floats(kKvHeads * kHeadDim, 2);
  const TensorView row = tokens_view(values, DType::kFloat32, 1, kKvHeads);
  children[0].append(0, row, row);
  EXPECT_EQ(children[0].length(0), 31);
  EXPECT_EQ(children[1].length(0), 30);

  const auto query = random_floats(kQueryHeads * kHeadDim, 1);
  const AttendInputs inputs{.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads)};
  std::vector<float> found(query.size()), expected(query.size());
  AttendOutputs outputs;
  outputs.out = MutableTensorView(found.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
  children[1].attend(0, inputs, outputs);
  outputs.out.data = expected.data();
  local_->attend(0, inputs, outputs);
  EXPECT_THAT(found, ElementsAreArray(expected));

  EXPECT_EQ(code_of([this] { (void)remote_->fork(65); }), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("count: expected 1 to 64, found 65"));
  children.clear();
  EXPECT_EQ(server_->core().num_sessions(), 1U);
}

TEST_P(ClientTest, SessionsOfOtherClientsAreListedAndReleased) {
  Client other(client_options());
  RemoteSessionConfig config = session_config();
  config.capacity_tokens = 100;
  RemoteSession left = other.open(config);
  const auto values = random_floats(10 * kKvHeads * kHeadDim, 2);
  const TensorView rows = tokens_view(values, DType::kFloat32, 10, kKvHeads);
  left.append(1, rows, rows);
  EXPECT_THAT(client_->list_sessions(), ::testing::ElementsAre(remote_->name(), left.name()));
  const RemoteSessionInfo info = client_->session_info(left.name());
  EXPECT_EQ(info.name, left.name());
  EXPECT_THAT(info.layer_lengths, ::testing::ElementsAre(0, 10));
  EXPECT_EQ(info.capacity_tokens, 100);
  EXPECT_EQ(info.kv_bytes, std::int64_t{10} * kKvHeads * kHeadDim * 4);
  EXPECT_GT(info.lease.count(), 0);
  EXPECT_GT(info.memory.pages, 0U);
  EXPECT_EQ(info.memory,
            session_memory(engine_->config(), 100, engine_->stats().snapshot.row_cache_rows));

  client_->release(left.name());
  EXPECT_THAT(client_->list_sessions(), ::testing::ElementsAre(remote_->name()));
  EXPECT_EQ(code_of([&] { left.refresh(); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { (void)client_->session_info(left.name()); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { client_->release(left.name()); }), ErrorCode::kNotFound);
}

TEST_P(ClientTest, ListsMoreSessionsThanAReplyNames) {
  const std::vector<std::string> first = client_->list_sessions();
  std::vector<std::string> expected = first;
  std::vector<RemoteSession> forks;
  for (int i = 0; i < 16; ++i) {
    for (RemoteSession& fork : remote_->fork(63)) {
      expected.push_back(fork.name());
      forks.push_back(std::move(fork));
    }
  }
  EXPECT_EQ(client_->list_sessions(), expected);  // 1,009
}

TEST_P(ClientTest, StepsGoOnAfterTheServerHasEndedTheStream) {
  fill(20);
  const auto query = random_floats(kQueryHeads * kHeadDim, 1);
  const auto key = random_floats(kKvHeads * kHeadDim, 2);
  std::vector<float> out(query.size());
  AttendOutputs outputs;
  outputs.out = MutableTensorView(out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
  const DecodeInputs inputs{.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads),
                            .key = tokens_view(key, DType::kFloat32, 1, kKvHeads),
                            .value = tokens_view(key, DType::kFloat32, 1, kKvHeads)};
  for (int i = 0; i < 5; ++i) {
    remote_->decode(0, inputs, outputs);
    server_->sweep(std::chrono::steady_clock::now() + std::chrono::hours(1));
  }
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), 25);
}

TEST_P(ClientTest, StepsGoOnAfterTheirConnectionHasEnded) {
  fill(20);
  const auto query = random_floats(kQueryHeads * kHeadDim, 1);
  const auto key = random_floats(kKvHeads * kHeadDim, 2);
  std::vector<float> out(query.size()), expected(query.size());
  const DecodeInputs inputs{.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads),
                            .key = tokens_view(key, DType::kFloat32, 1, kKvHeads),
                            .value = tokens_view(key, DType::kFloat32, 1, kKvHeads)};
  AttendOutputs outputs;
  for (int i = 0; i < 3; ++i) {
    outputs.out = MutableTensorView(out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim});
    remote_->decode(0, inputs, outputs);
    outputs.out.data = expected.data();
    local_->decode(0, inputs, outputs);
    EXPECT_EQ(out, expected);
    if (server_->data_plane() == nullptr) continue;
    Attachments& attachments = server_->data_plane()->attachments();
    const Tenant& tenant = *server_->core().tenants().all()[0];
    v1::ListAttachmentsResponse list;
    attachments.list(tenant, {}, list);
    EXPECT_EQ(list.attachments_size(), i == 1 ? 0 : 1);  // a step over gRPC, then a new one
    for (const auto& attachment : list.attachments()) attachments.remove(tenant, attachment.name());
  }
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), 23);
}

TEST_P(ClientTest, CallsTakeTheWayThatTheyAreAskedToTake) {
  fill(5);
  ClientOptions options = client_options();
  options.data_plane = false;
  Client client(options);
  RemoteSession session = client.open(session_config());
  const auto values = random_floats(kKvHeads * kHeadDim, 2);
  const TensorView row = tokens_view(values, DType::kFloat32, 1, kKvHeads);
  session.append(0, row, row);

  EXPECT_EQ(session.length(0), 1);
  EXPECT_EQ(server_->data_plane() != nullptr, over_plane());
  if (over_plane()) {
    EXPECT_EQ(server_->data_plane()->counters().attached, 1U);
    EXPECT_GT(server_->data_plane()->counters().frames_read, 1U);
  }
}

TEST_P(ClientTest, TellsTheServersErrors) {
  fill(5);
  const auto values = random_floats(kKvHeads * kHeadDim, 2);
  const TensorView row = tokens_view(values, DType::kFloat32, 1, kKvHeads);
  EXPECT_EQ(code_of([&] { remote_->append(7, row, row); }), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("layer: expected 0 to 1, found 7"));
  EXPECT_EQ(code_of([&] { remote_->append(-1, row, row); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { (void)remote_->length(2); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { remote_->append(0, row, TensorView()); }), ErrorCode::kInvalidArgument);
  std::vector<std::uint16_t> halves(kQueryHeads * kHeadDim);
  const auto query = random_floats(kQueryHeads * kHeadDim, 3);
  AttendOutputs outputs;
  outputs.out = MutableTensorView(halves.data(), DType::kFloat16, {1, kQueryHeads, kHeadDim});
  const AttendInputs inputs{.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads)};
  EXPECT_EQ(code_of([&] { remote_->attend(0, inputs, outputs); }), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("out: expected the dtype of the query"));
  EXPECT_EQ(code_of([this] {
              RemoteSessionConfig config = session_config();
              config.model.head_dim = 65;
              (void)client_->open(config);
            }),
            ErrorCode::kInvalidArgument);
}

TEST_P(ClientTest, OutputsThatDoNotFitAreRefusedBeforeAStepIsStored) {
  fill(5);
  const auto rows = random_floats(2 * kQueryHeads * kHeadDim, 3);
  const TensorView row = tokens_view(rows, DType::kFloat32, 1, kKvHeads);
  const DecodeInputs inputs{
      .query = tokens_view(rows, DType::kFloat32, 1, kQueryHeads), .key = row, .value = row};
  std::vector<float> out(rows.size(), 7.0F);
  const auto refused = [&](const std::string& message, auto change) {
    AttendOutputs outputs{.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}},
                          .lse = {out.data(), DType::kFloat32, {1, kQueryHeads}}};
    change(outputs);
    EXPECT_EQ(code_of([&] { remote_->decode(0, inputs, outputs); }), ErrorCode::kInvalidArgument);
    EXPECT_THAT(message_, HasSubstr(message));
  };
  refused("out: expected fp32 [1, 4, 64], found fp32 [2, 4, 64]",
          [](AttendOutputs& outputs) { outputs.out.shape[0] = 2; });
  refused("out: expected host memory with rows that are dense",
          [](AttendOutputs& outputs) { outputs.out.strides[2] = 2; });
  refused("out: expected host memory",
          [](AttendOutputs& outputs) { outputs.out.space = MemorySpace::kDevice; });
  refused("lse: expected fp32 [1, 4], found fp32 [1, 3]",
          [](AttendOutputs& outputs) { outputs.lse.shape[1] = 3; });
  EXPECT_THAT(out, ::testing::Each(7.0F));
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), 5);
}

TEST_P(ClientTest, SessionBeginsWithWhatAnotherHasPublished) {
  std::vector<std::int32_t> ids(150);
  std::iota(ids.begin(), ids.end(), 7);
  RemoteSessionConfig config = session_config();
  config.token_ids = ids;
  config.model_fingerprint = "m";
  remote_ = std::make_unique<RemoteSession>(client_->open(config));
  EXPECT_EQ(remote_->length(), 0);
  fill(150);
  remote_->publish(ids);
  remote_ = std::make_unique<RemoteSession>(client_->open(config));

  ASSERT_EQ(remote_->length(), 128);  // whole pages of 64

  local_->truncate(128);
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto query = random_floats(std::size_t{kQueryHeads} * kHeadDim, 5);
    const AttendInputs inputs{.query = tokens_view(query, DType::kFloat32, 1, kQueryHeads),
                              .selected = {}};
    std::vector<float> out(query.size()), expected(query.size());
    remote_->attend(layer, inputs,
                    {.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}}});
    local_->attend(layer, inputs,
                   {.out = {expected.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}}});
    EXPECT_THAT(out, ElementsAreArray(expected));
  }
  EXPECT_EQ(code_of([&] { remote_->publish(ids); }), ErrorCode::kInvalidArgument);
  EXPECT_THAT(message_, HasSubstr("token_ids: expected at most 128"));
  RemoteSession nameless = client_->open(session_config());
  EXPECT_EQ(code_of([&] { nameless.publish({}); }), ErrorCode::kFailedPrecondition);
  config.model_fingerprint.clear();
  EXPECT_EQ(code_of([&] { (void)client_->open(config); }), ErrorCode::kInvalidArgument);
}

TEST_P(ClientTest, RecallTargetsAndMissedSharesAreThoseOfASessionHere) {
  fill(600);
  constexpr std::size_t kTokens = 3;
  const auto query = random_floats(kTokens * kQueryHeads * kHeadDim, 5);
  const AttendInputs inputs{.query = tokens_view(query, DType::kFloat32, kTokens, kQueryHeads),
                            .selected = {}};
  RetrievalConfig retrieval = session_config().retrieval;
  retrieval.estimator = Estimator::kNormAware;
  retrieval.num_planes = 128;
  retrieval.top_k = 400;
  std::vector<float> shares;
  for (const double recall : {0.5, 0.9}) {
    const AttendOptions options{.retrieval = &retrieval,
                                .recall_target = RecallTarget{.recall = recall, .min_top_k = 3}};
    std::vector<float> out(query.size()), expected(query.size());
    std::vector<float> missed(kTokens * kQueryHeads), expected_missed(missed.size());
    const auto outputs = [&](std::vector<float>& to, std::vector<float>& share) {
      AttendOutputs result;
      result.out = {to.data(), DType::kFloat32, {kTokens, kQueryHeads, kHeadDim}};
      result.missed = {share.data(), DType::kFloat32, {kTokens, kQueryHeads}};
      return result;
    };
    remote_->attend(0, inputs, outputs(out, missed), options);
    local_->attend(0, inputs, outputs(expected, expected_missed), {}, options);
    EXPECT_THAT(out, ElementsAreArray(expected));
    EXPECT_THAT(missed, ElementsAreArray(expected_missed));
    shares.push_back(std::accumulate(missed.begin(), missed.end(), 0.0F));

    const auto rows = random_floats(kTokens * kKvHeads * kHeadDim, 6);
    const TensorView row = tokens_view(rows, DType::kFloat32, kTokens, kKvHeads);
    const DecodeInputs step{.query = inputs.query, .key = row, .value = row, .selected = {}};
    remote_->decode(0, step, outputs(out, missed), options);
    local_->decode(0, step, outputs(expected, expected_missed), {}, options);
    EXPECT_THAT(out, ElementsAreArray(expected));
    EXPECT_THAT(missed, ElementsAreArray(expected_missed));

    std::vector<std::int32_t> ids(kTokens * kKvHeads * 400), expected_ids(ids.size());
    const auto chosen = [](std::vector<std::int32_t>& to) {
      return SelectOutputs{.ids = {to.data(), DType::kInt32, {kTokens, kKvHeads, 400}}};
    };
    remote_->select(0, inputs.query, chosen(ids), options);
    local_->select(0, inputs.query, chosen(expected_ids), {}, options);
    EXPECT_EQ(ids, expected_ids);
  }
  EXPECT_GT(shares[0], shares[1]);

  // What the estimator cannot tell is refused, by the server.
  retrieval.estimator = Estimator::kSoftCollision;
  std::vector<float> out(query.size());
  AttendOutputs outputs;
  outputs.out = {out.data(), DType::kFloat32, {kTokens, kQueryHeads, kHeadDim}};
  for (const double recall : {0.9, 1.5, std::nan("")}) {
    const AttendOptions options{.recall_target = RecallTarget{.recall = recall}};
    EXPECT_EQ(code_of([&] { remote_->attend(0, inputs, outputs, options); }),
              ErrorCode::kInvalidArgument);
    EXPECT_THAT(message_, HasSubstr("recall_target"));
  }
}

TEST_P(ClientTest, SessionOfAServerThatStartedAnewIsAborted) {
  server_.reset();
  start_server();
  const ErrorCode code = code_of([this] { remote_->refresh(); });
  EXPECT_EQ(code, ErrorCode::kAborted) << message_;
}

TEST_P(ClientTest, ChunksBeforeOneThatFailsStayAndCount) {
  constexpr std::int64_t kTokens = 4000;
  constexpr std::int64_t kWrong = 3999;
  const std::size_t row = static_cast<std::size_t>(kKvHeads) * kHeadDim;
  std::vector<float> keys = random_floats(kTokens * row, 1);
  const std::vector<float> values = random_floats(kTokens * row, 2);
  const float good = std::exchange(keys[kWrong * row], std::numeric_limits<float>::quiet_NaN());
  const auto append = [&](std::int64_t first) {
    const auto rows = [&](const std::vector<float>& all) {
      TensorView view = tokens_view(all, DType::kFloat32, kTokens - first, kKvHeads);
      view.data = all.data() + static_cast<std::size_t>(first) * row;
      return view;
    };
    remote_->append(0, rows(keys), rows(values));
  };
  EXPECT_EQ(code_of([&] { append(0); }), ErrorCode::kInvalidArgument) << message_;
  const std::int64_t stored = remote_->length(0);
  EXPECT_GT(stored, 0);
  EXPECT_LT(stored, kWrong);
  remote_->refresh();
  EXPECT_EQ(remote_->length(0), stored);
  keys[kWrong * row] = good;
  append(stored);
  EXPECT_EQ(remote_->length(0), kTokens);
}

TEST_P(ClientTest, TokensThatNoHeaderTakesAreRefused) {
  for (const char* token : {"x\n", "a b", "\xC3\xA9", "\x7F"}) {
    EXPECT_EQ(code_of([&] { const Client client({.server = socket(), .token = token}); }),
              ErrorCode::kInvalidArgument);
    EXPECT_THAT(message_, HasSubstr("token: expected printable ASCII without white space"));
  }
}

TEST_P(ClientTest, CallsEndWhereNoServerIs) {
  ClientOptions options{.server = "unix:" + (folder_ / "none.sock").string(), .attempts = 1};
  const std::string missing = "server: expected kvtier serve at " + options.server +
                              ", found none (start it: kvtier serve)";
  Client client(options);
  EXPECT_EQ(code_of([&] { (void)client.open(session_config()); }), ErrorCode::kUnavailable);
  EXPECT_EQ(message_, missing);

  options = {.server = "tcp:127.0.0.1:1", .insecure_tcp = true, .attempts = 1};
  Client tcp(options);
  EXPECT_EQ(code_of([&] { (void)tcp.open(session_config()); }), ErrorCode::kUnavailable);
  EXPECT_THAT(message_, HasSubstr("server: expected kvtier serve at tcp:127.0.0.1:1, found none "
                                  "(start it: kvtier serve): failed to connect"));
}

TEST_P(ClientTest, OptionsThatDoNotGoTogetherAreRefused) {
  for (const ClientOptions& options :
       std::vector<ClientOptions>{{.server = ""},
                                  {.server = "/x.sock"},
                                  {.server = "tcp:127.0.0.1:1"},
                                  {.server = "tcp:127.0.0.1:1", .tls_key = "/x"},
                                  {.server = socket(), .timeout = std::chrono::milliseconds(0)},
                                  {.server = socket(), .timeout = std::chrono::milliseconds::max()},
                                  {.server = socket(), .attempts = 0}}) {
    EXPECT_EQ(code_of([&] { const Client client(options); }), ErrorCode::kInvalidArgument);
  }
}

TEST_P(ClientTest, IsOfNoUseInAForkAndEndsNothingThere) {
  fill(10);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const std::vector<float> row(kKvHeads * kHeadDim, 1.0F);
    const TensorView token = tokens_view(row, DType::kFloat32, 1, kKvHeads);
    int used = 0;
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { (void)client_->list_sessions(); }, [&] { remote_->append(0, token, token); },
             [&] { remote_->truncate(0); }}) {
      used += code_of(call) == ErrorCode::kFailedPrecondition ? 0 : 1;
    }
    remote_.reset();
    client_.reset();
    ::_exit(used);
  }
  EXPECT_EQ(kvtier::testing::wait_for_exit(pid), 0);
  remote_->refresh();
  EXPECT_EQ(remote_->length(), 10);
}

TEST_P(ClientTest, PlaintextTcpIsForLoopback) {
  ServerOptions options = this->options();
  options.admin.clear();
  options.listen = {parse_endpoint("tcp:127.0.0.1:0")};
  options.insecure_tcp = true;
  Server server(options);
  ASSERT_GT(server.endpoints()[0].port, 0);
  Client client({.server = server.endpoints()[0].text(), .insecure_tcp = true});
  EXPECT_EQ(client.open(session_config()).length(), 0);
}

INSTANTIATE_TEST_SUITE_P(Ways, ClientTest, ::testing::Values("Grpc", "DataPlane"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace kvtier::services::testing
