#include "runtime/rejection_fixture.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

/// Calls that the state of a session or of the engine forbids, and host data that is not finite.
namespace kvtier::testing {
namespace {

class StateErrorsTest : public RejectionTest {};

TEST_P(StateErrorsTest, AnEmptyLayerCannotBeAttendedOrSelected) {
  Session empty = engine_->open();
  CallTensors call(model(), 1, 5);
  const ErrorCode code = ErrorCode::kFailedPrecondition;
  expect_rejected(code, {"layer 1", "empty layer"},
                  [&] { empty.attend(1, call.attend_inputs(), call.outputs()); });
  expect_rejected(code, {"layer 1", "empty layer"}, [&] {
    empty.select(1, call.query.view(), {.ids = call.ids.view(), .scores = {}});
  });
  append_random(empty, model(), 0, 5, 1);  // the other layer's tokens do not count
  expect_rejected(code, {"layer 1", "empty layer"},
                  [&] { empty.attend(1, call.attend_inputs(), call.outputs()); });
  append_random(empty, model(), 1, 1, 1);
  empty.attend(1, call.attend_inputs(), call.outputs());  // the same call succeeds later
}

TEST_P(StateErrorsTest, AQueryCannotBeLongerThanTheSession) {
  Session brief = engine_->open();
  append_random(brief, model(), 0, 3, 1);
  CallTensors call(model(), 4, 5);
  expect_rejected(ErrorCode::kInvalidArgument, {"query", "at most 3 tokens", "found 4"},
                  [&] { brief.attend(0, call.attend_inputs(), call.outputs()); });
  expect_rejected(ErrorCode::kInvalidArgument, {"query", "at most 3 tokens", "found 4"}, [&] {
    brief.select(0, call.query.view(), {.ids = call.ids.view(), .scores = {}});
  });
  expect_rejected(ErrorCode::kInvalidArgument, {"query", "at most 2 tokens", "found 4"}, [&] {
    brief.decode(1,
                 {.query = call.query.view(),
                  .key = call.key.view(0, 2),
                  .value = call.value.view(0, 2),
                  .selected = {}},
                 call.outputs());
  });
  EXPECT_EQ(brief.length(0), 3);
  EXPECT_EQ(brief.length(1), 0);
}

TEST_P(StateErrorsTest, CountsMustBeInRange) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  const ErrorCode invalid = ErrorCode::kInvalidArgument;
  session_->reserve(0);
  for (const std::int64_t tokens : {std::int64_t{-1}, -kMax - 1}) {
    const std::string found = std::to_string(tokens);
    expect_rejected(invalid, {"at least 0", found}, [&] { session_->reserve(tokens); });
    expect_rejected(invalid, {"0..", found}, [&] { session_->truncate(tokens); });
    expect_rejected(invalid, {"0..", found}, [&] { session_->advance(0, tokens); });
    expect_rejected(invalid, {"capacity_tokens", "0..4096", found},
                    [&] { (void)engine_->open({.capacity_tokens = tokens}); });
  }
  const std::int64_t length = session_->length(0);
  for (const std::int64_t tokens : {length + 1 + 100, kMax}) {
    const std::string found = std::to_string(tokens);
    expect_rejected(invalid, {"0..", "longest", found}, [&] { session_->truncate(tokens); });
    expect_rejected(invalid, {"0..", "reserved", found}, [&] { session_->advance(0, tokens); });
  }
  for (const std::int64_t tokens : {std::int64_t{4097}, kMax}) {
    expect_rejected(invalid, {"0..4096", std::to_string(tokens)},
                    [&] { (void)engine_->open({.capacity_tokens = tokens}); });
    expect_rejected(ErrorCode::kResourceExhausted, {"4096"}, [&] { session_->reserve(tokens); });
  }
}

TEST_P(StateErrorsTest, AppendsStopAtTheSessionsCapacity) {
  open(two_layers(), 330);
  const CallTensors call(model(), 31, 5);
  session_->truncate(300);
  twin_->truncate(300);
  const ErrorCode code = ErrorCode::kResourceExhausted;
  expect_rejected(code, {"layer 1", "at most 330 tokens", "31 more"},
                  [&] { session_->append(1, call.key.view(), call.value.view()); });
  session_->truncate(300);  // each check above decodes a token
  twin_->truncate(300);
  expect_rejected(code, {"at most 330 tokens", "31 more"}, [&] { session_->reserve(31); });
  session_->truncate(300);
  twin_->truncate(300);
  append_random(*session_, model(), 1, 30, 5);
  append_random(*twin_, model(), 1, 30, 5);
  CallTensors one(model(), 1, 6);
  const std::int64_t full = session_->length(1);
  expect_error(error_of([&] { session_->decode(1, one.inputs(), one.outputs()); }), code);
  EXPECT_EQ(session_->length(1), full);
}

/// Pages for the two sessions of the fixture (10 each), and a few more.
Config few_pages(Config config, std::size_t pages) {
  config.memory.host_bytes = pages * 64 * 512;
  return config;
}

TEST_P(StateErrorsTest, AppendsStopWhenThePoolHasNoPage) {
  open(few_pages(two_layers(), 24));
  ASSERT_EQ(engine_->stats().snapshot.pages, 24);
  ASSERT_EQ(engine_->stats().snapshot.pages_used, 20);
  const CallTensors call(model(), 300, 5);
  const ErrorCode code = ErrorCode::kResourceExhausted;

  expect_rejected(code, {"page pool", "expected 5 free pages", "found 4 of 24"},
                  [&] { session_->append(0, call.key.view(), call.value.view()); });
  expect_rejected(code, {"page pool", "found 1 of 24"}, [&] { session_->reserve(200); });
  {
    Session other = engine_->open();
    expect_rejected(code, {"page pool", "found 4 of 24"},
                    [&] { other.append(0, call.key.view(), call.value.view()); });
    EXPECT_EQ(other.length(0), 0);
    append_random(other, model(), 0, 256, 1);
  }
  append_random(*session_, model(), 0, 200, 5);  // what was closed can be used again
  append_random(*twin_, model(), 0, 10, 5);
}

TEST_P(StateErrorsTest, ABatchTakesRoomForAllItemsOrForNone) {
  open(few_pages(two_layers(), 25));
  Session other = engine_->open();
  CallTensors a(model(), 150, 5);
  CallTensors b(model(), 192, 6);
  const BatchItem items[] = {{&*session_, a.inputs(), a.outputs(), {}},
                             {&other, b.inputs(), b.outputs(), {}}};

  expect_rejected(ErrorCode::kResourceExhausted, {"page pool", "expected 3 free pages"},
                  [&] { engine_->decode(0, items); });
  EXPECT_EQ(other.length(0), 0);
}

/// Sketch blocks hold 1,024 tokens of a layer, so that many layers of one token run out of them
/// before they run out of pages.
TEST_P(StateErrorsTest, AppendsStopWhenNoSketchBlockIsLeft) {
  constexpr int kLayers = 80;
  Config config = this->config();
  config.model.layers = kLayers;
  config.memory.page_tokens = 16;
  config.memory.host_bytes = 256 * 16 * 512;
  config.extra_sketches = {{.kind = PlaneKind::kOrthogonal, .num_planes = 128, .seed = 3}};
  Engine engine(config);
  const CallTensors call(config.model, 1, 5);
  Session session = engine.open();
  int layer = 0;
  std::optional<Error> error;
  Stats before;
  for (; layer < kLayers && !error; ++layer) {
    before = engine.stats();
    error = error_of([&] { session.append(layer, call.key.view(), call.value.view()); });
  }
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  EXPECT_THAT(error->what(), ::testing::HasSubstr("sketch blocks: expected 1 free"));
  EXPECT_EQ(session.length(layer - 1), 0);
  Stats after = engine.stats();
  EXPECT_EQ(after.snapshot.pages_used, before.snapshot.pages_used);
  EXPECT_EQ(after.snapshot.pages_used, static_cast<std::size_t>(layer) - 1);
  EXPECT_EQ(after.snapshot.sketch_bytes_used, before.snapshot.sketch_bytes_used);

  session.truncate(0);
  Session whole = engine.open();
  error = error_of([&] { whole.reserve(1); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kResourceExhausted);
  after = engine.stats();
  EXPECT_EQ(after.snapshot.pages_used, 0U);
  EXPECT_EQ(after.snapshot.sketch_bytes_used, 0U);
  session.append(layer - 1, call.key.view(), call.value.view());
}

/// Writes an element of a 16- or 32-bit float tensor from the bits of its fp32 value.
void poke(HostTensor& tensor, DType dtype, std::size_t element, float value) {
  auto* bytes = static_cast<std::byte*>(tensor.mutable_view().data);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes + element * 4, &bits, 4);
    return;
  }
  const std::uint32_t nan = bits & 0x7FFFFFU;
  const std::uint32_t sign = bits >> 31 << 15;
  const std::uint32_t top = dtype == DType::kBFloat16 ? 0x7F80U : 0x7C00U;
  const auto half = static_cast<std::uint16_t>(sign | top | (nan != 0 ? 1U : 0U));
  std::memcpy(bytes + element * 2, &half, 2);
}

TEST_P(StateErrorsTest, HostTensorsMustBeFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const float value : {std::nanf(""), kInfinity, -kInfinity}) {
      for (const bool last : {false, true}) {
        for (const std::string name : {"query", "keys", "values"}) {
          SCOPED_TRACE(::testing::Message()
                       << name << " " << dtype_name(dtype) << " " << value << " last " << last);
          CallTensors call(model(), 3, 5, dtype);
          HostTensor& tensor = name == "query"  ? call.query
                               : name == "keys" ? call.key
                                                : call.value;
          poke(tensor, dtype, last ? tensor.values().size() - 1 : 0, value);
          const std::vector<std::string> parts = {name, "finite elements", "NaN or infinity"};
          const ErrorCode code = ErrorCode::kInvalidArgument;

          expect_rejected(code, parts,
                          [&] { session_->decode(0, call.inputs(), call.outputs(true)); });
          if (name == "query") {
            expect_rejected(code, parts,
                            [&] { session_->attend(0, call.attend_inputs(), call.outputs()); });
            expect_rejected(code, parts, [&] {
              session_->select(0, call.query.view(), {.ids = call.ids.view(), .scores = {}});
            });
          } else {
            expect_rejected(code, parts,
                            [&] { session_->append(0, call.key.view(), call.value.view()); });
          }
        }
      }
    }
  }
}

TEST_P(StateErrorsTest, ElementsThatStorageCannotHoldAreRefused) {
  ASSERT_EQ(model().kv_dtype, DType::kBFloat16);
  for (const bool last : {false, true}) {
    for (const std::string name : {"keys", "values"}) {
      SCOPED_TRACE(name);
      CallTensors call(model(), 3, 5, DType::kFloat32);
      HostTensor& tensor = name == "keys" ? call.key : call.value;
      // Finite, and infinite as bf16.
      poke(tensor, DType::kFloat32, last ? tensor.values().size() - 1 : 0, 3.4e38F);
      const std::vector<std::string> parts = {name, "at most 3.3895e38", "larger"};
      expect_rejected(ErrorCode::kInvalidArgument, parts,
                      [&] { session_->decode(0, call.inputs(), call.outputs(true)); });
      expect_rejected(ErrorCode::kInvalidArgument, parts,
                      [&] { session_->append(0, call.key.view(), call.value.view()); });
    }
  }
}

TEST_P(StateErrorsTest, FiniteTensorsWithOtherResultsNameLayerAndToken) {
  // Equal weights: the first of three tokens sees one such value, the second a sum beyond fp32.
  CallTensors call(model(), 3, 5, DType::kFloat32);
  const auto fill = [](HostTensor& tensor, float x) {
    for (std::size_t i = 0; i < tensor.values().size(); ++i) poke(tensor, DType::kFloat32, i, x);
  };
  fill(call.query, 0.0F);
  fill(call.value, 3e38F);
  const std::int64_t length = session_->length(1);
  const auto expect_named = [&](std::int64_t token, const std::function<void()>& step) {
    const std::vector<std::int64_t> lengths = all_lengths();
    expect_error(error_of(step), ErrorCode::kInvalidArgument,
                 "layer 1: expected finite results, found NaN "
                 "or infinity in out of token " +
                     std::to_string(token));
    EXPECT_EQ(all_lengths(), lengths);
  };
  expect_named(length + 1, [&] { session_->decode(1, call.inputs(), call.outputs()); });
  std::vector<BatchItem> items = {{&*session_, call.inputs(), call.outputs(), {}}};
  expect_named(length + 1, [&] { engine_->decode(1, items); });
  session_->append(1, call.key.view(), call.value.view());
  expect_named(length + 1, [&] { session_->attend(1, call.attend_inputs(), call.outputs()); });
  session_->truncate(length, {}, 1);

  CallTensors steep(model(), 1, 6, DType::kFloat32);  // a logit beyond fp32
  fill(steep.query, 1e20F);
  fill(steep.key, 1e20F);
  for (const LayerMode mode : {LayerMode::kSparse, LayerMode::kDense}) {
    expect_named(length,
                 [&] { session_->decode(1, steep.inputs(), steep.outputs(), {}, {.mode = mode}); });
  }
  expect_like_twin();
}

TEST_P(StateErrorsTest, AnAcceptedNonfiniteTokenThatIsAttendedToMakesItsHeadsNan) {
  constexpr std::int64_t kLength = 700;
  Config config = this->config();
  config.reject_nonfinite = false;
  Engine engine(config);
  Session session = engine.open();
  CallTensors call(config.model, kLength, 5);
  poke(call.key, DType::kBFloat16, (kLength - 1) * 2 * 64 + 17, std::nanf(""));  // of KV head 0
  session.append(0, call.key.view(), call.value.view());
  for (const LayerMode mode : {LayerMode::kSparse, LayerMode::kDense}) {
    CallTensors question(config.model, 1, 6);
    session.attend(0, question.attend_inputs(), question.outputs(), {}, {.mode = mode});
    for (int h = 0; h < 4; ++h) {
      const bool bad = h < 2;
      EXPECT_EQ(std::isnan(question.lse.get(static_cast<std::size_t>(h))), bad) << "head " << h;
      for (const float x : question.out.row(0, h)) EXPECT_EQ(std::isnan(x), bad) << "head " << h;
    }
  }
}

TEST_P(StateErrorsTest, AcceptedNonfiniteTokensAreCountedAndScoreLowest) {
  Config config = this->config();
  config.reject_nonfinite = false;
  for (const Selection selection : {Selection::kPerKvHead, Selection::kPerQueryHead}) {
    config.retrieval.selection = selection;
    Engine engine(config);
    std::optional<Session> session = engine.open();
    CallTensors call(config.model, 300, 5);
    const auto element = [](std::size_t token, std::size_t head) {
      return (token * 2 + head) * 64 + 17;
    };
    poke(call.key, DType::kBFloat16, element(100, 0), std::nanf(""));
    poke(call.value, DType::kBFloat16, element(150, 0), std::numeric_limits<float>::infinity());
    poke(call.key, DType::kBFloat16, element(200, 1), -std::numeric_limits<float>::infinity());
    poke(call.value, DType::kBFloat16, element(200, 1), std::nanf(""));
    session->append(0, call.key.view(), call.value.view());
    EXPECT_EQ(engine.stats().cumulative.nonfinite_tokens, 3U);

    // 268 eligible tokens; the query keeps all, then all but the non-finite ones.
    const int heads = selection == Selection::kPerKvHead ? 2 : 4;
    CallTensors question(config.model, 1, 6);
    HostIds ids(1, heads, 268);
    HostTensor scores(1, heads, 268, DType::kFloat32);
    RetrievalConfig retrieval = config.retrieval;
    retrieval.top_k = 268;
    session->select(0, question.query.view(), {.ids = ids.view(), .scores = scores.mutable_view()},
                    {}, {.retrieval = &retrieval});
    for (int h = 0; h < heads; ++h) {
      const bool first_kv_head = h < heads / 2;
      float lowest_finite = std::numeric_limits<float>::max();
      float highest_bad = std::numeric_limits<float>::lowest();
      ASSERT_EQ(ids.ids(0, h).size(), 268U);
      for (std::size_t i = 0; i < 268; ++i) {
        const std::int64_t id = ids.ids(0, h)[i];
        const float score = scores.row(0, h)[i];
        EXPECT_TRUE(std::isfinite(score)) << "token " << id;
        const bool bad = first_kv_head ? id == 100 || id == 150 : id == 200;
        if (bad) {
          highest_bad = std::max(highest_bad, score);
        } else {
          lowest_finite = std::min(lowest_finite, score);
        }
      }
      EXPECT_LT(highest_bad, lowest_finite) << "head " << h;
    }
    retrieval.top_k = 266;
    session->attend(0, question.attend_inputs(), question.outputs(), {}, {.retrieval = &retrieval});
    for (int h = 0; h < 2; ++h) {
      for (const float x : question.out.row(0, h)) EXPECT_TRUE(std::isfinite(x)) << "head " << h;
    }
    session.reset();
    EXPECT_EQ(engine.stats().cumulative.nonfinite_tokens, 3U) << "closing forgets nothing";
  }
}

TEST_P(StateErrorsTest, ABatchNamesTheItemThatIsWrong) {
  Session other = engine_->open();
  append_random(other, model(), 0, 20, 9);
  CallTensors a(model(), 1, 5), b(model(), 1, 6);
  std::vector<BatchItem> items = {{&*session_, a.inputs(), a.outputs(), {}},
                                  {&other, b.inputs(), b.outputs(), {}}};
  const auto expect_item_1 = [&](ErrorCode code, const std::vector<std::string>& parts) {
    std::vector<std::string> all = parts;
    all.emplace_back("items[1]: ");
    expect_rejected(code, all, [&] { engine_->decode(0, items); });
    EXPECT_EQ(other.length(0), 20);
  };
  const BatchItem good = items[1];

  items[1].inputs.key.shape[2] = 32;
  expect_item_1(ErrorCode::kInvalidArgument, {"keys", "[1, 2, 32]"});
  items[1] = good;
  items[1].session = &*session_;
  expect_item_1(ErrorCode::kInvalidArgument, {"each session once", "twice"});
  items[1].session = nullptr;
  expect_item_1(ErrorCode::kInvalidArgument, {"an open session", "none"});
  Session moved = std::move(other);
  items[1].session = &other;  // NOLINT(bugprone-use-after-move): what a moved-from session gives
  const std::optional<Error> closed = error_of([&] { engine_->decode(0, items); });
  ASSERT_TRUE(closed.has_value());
  EXPECT_EQ(closed->code(), ErrorCode::kInvalidArgument);
  other = std::move(moved);

  Engine second(two_layers());
  Session foreign = second.open();
  append_random(foreign, model(), 0, 20, 9);
  items[1].session = &foreign;
  expect_item_1(ErrorCode::kInvalidArgument, {"a session of this engine", "another engine's"});
  EXPECT_EQ(foreign.length(0), 20);

  items[1] = good;
  engine_->decode(0, items);
  EXPECT_EQ(other.length(0), 21);
  engine_->decode(0, {});
}

TEST_P(StateErrorsTest, TheCpuBackendTakesNoStream) {
  if (GetParam() != Backend::kCpu) GTEST_SKIP() << "streams are what the CUDA backend takes";
  int not_a_stream = 0;
  const StreamRef stream = StreamRef::of(&not_a_stream);
  CallTensors call(model(), 1, 5);
  const auto on_device = [](auto view) {
    view.space = MemorySpace::kDevice;
    return view;
  };
  const AttendOutputs out = {.out = on_device(call.outputs().out), .lse = {}, .selected = {}};
  const DecodeInputs in = {.query = on_device(call.query.view()),
                           .key = on_device(call.key.view()),
                           .value = on_device(call.value.view()),
                           .selected = {}};
  const std::vector<std::string> parts = {"stream", "CPU backend"};
  const ErrorCode code = ErrorCode::kInvalidArgument;
  const PartialResult part{on_device(call.outputs().out), on_device(call.lse_view())};
  const BatchItem item{&*session_, in, out, {}};

  expect_rejected(code, parts, [&] { session_->append(0, in.key, in.value, stream); });
  expect_rejected(code, parts, [&] { session_->reserve(1, stream); });
  expect_rejected(code, parts, [&] { session_->truncate(1, stream); });
  expect_rejected(code, parts, [&] {
    session_->select(0, in.query, {.ids = on_device(call.ids.view()), .scores = {}}, stream);
  });
  expect_rejected(code, parts,
                  [&] { session_->attend(0, {.query = in.query, .selected = {}}, out, stream); });
  expect_rejected(code, parts, [&] { session_->decode(0, in, out, stream); });
  expect_rejected(code, parts, [&] { engine_->decode(0, {&item, 1}, stream); });
  expect_rejected(code, parts, [&] { engine_->merge({&part, 1}, out, stream); });
  expect_rejected(code, parts, [&] { session_->decode(0, in, out, StreamRef::of(nullptr)); });
}

TEST_P(StateErrorsTest, MergeRejectsPartsThatDoNotFit) {
  CallTensors a(model(), 2, 5), b(model(), 2, 6), result(model(), 2, 7);
  const PartialResult good_a{a.out.view(), a.lse_view()};
  const PartialResult good_b{b.out.view(), b.lse_view()};
  struct Case {
    std::string part;
    std::function<void(PartialResult&, AttendOutputs&)> spoil;
  };
  const std::vector<Case> cases = {
      {"parts.out", [](PartialResult& p, AttendOutputs&) { p.out = {}; }},
      {"parts.lse", [](PartialResult& p, AttendOutputs&) { p.lse = {}; }},
      {"parts.out: expected fp32, found bf16",
       [](PartialResult& p, AttendOutputs&) { p.out.dtype = DType::kBFloat16; }},
      {"parts.lse: expected fp32, found fp16",
       [](PartialResult& p, AttendOutputs&) { p.lse.dtype = DType::kFloat16; }},
      {"found fp32 [1, 4, 64]", [](PartialResult& p, AttendOutputs&) { p.out.shape[0] = 1; }},
      {"parts.out", [](PartialResult& p, AttendOutputs&) { p.out.strides[0] = 512; }},
      {"found fp32 [2, 3]", [](PartialResult& p, AttendOutputs&) { p.lse.shape[1] = 3; }},
      {"parts.lse", [](PartialResult& p, AttendOutputs&) { p.lse.rank = 1; }},
      {"parts.lse", [](PartialResult& p, AttendOutputs&) { p.lse.strides[1] = 2; }},
      {"parts.out", [](PartialResult& p, AttendOutputs&) { p.out.space = MemorySpace::kDevice; }},
      {"parts.lse", [](PartialResult& p, AttendOutputs&) { p.lse.space = MemorySpace::kDevice; }},
      {"out: expected a tensor", [](PartialResult&, AttendOutputs& r) { r.out = {}; }},
      {"found int32", [](PartialResult&, AttendOutputs& r) { r.out.dtype = DType::kInt32; }},
      {"out", [](PartialResult&, AttendOutputs& r) { r.out.shape[1] = 2; }},
      {"out", [](PartialResult&, AttendOutputs& r) { r.out.strides[0] = 512; }},
      {"lse: expected fp32, found bf16",
       [](PartialResult&, AttendOutputs& r) { r.lse.dtype = DType::kBFloat16; }},
      {"lse", [](PartialResult&, AttendOutputs& r) { r.lse.shape[0] = 1; }},
      {"lse", [](PartialResult&, AttendOutputs& r) { r.lse.space = MemorySpace::kDevice; }},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (const std::size_t which : {0U, 1U}) {
      SCOPED_TRACE(::testing::Message() << "case " << i << ", part " << which);
      std::vector<PartialResult> parts = {good_a, good_b};
      AttendOutputs outputs = result.outputs();
      cases[i].spoil(parts[which], outputs);
      expect_rejected(ErrorCode::kInvalidArgument, {cases[i].part},
                      [&] { engine_->merge(parts, outputs); });
    }
  }
  expect_rejected(ErrorCode::kInvalidArgument, {"parts: expected 1..", "found 0"},
                  [&] { engine_->merge({}, result.outputs()); });
  const std::vector<PartialResult> many(17, good_a);
  expect_rejected(ErrorCode::kInvalidArgument, {"parts: expected 1..16", "found 17"},
                  [&] { engine_->merge(many, result.outputs()); });
}

KVTIER_INSTANTIATE_BACKENDS(StateErrorsTest);

TEST(EngineErrors, CudaIsRefusedWhereItCannotBeUsed) {
  if (!why_unusable(Backend::kCuda)) GTEST_SKIP() << "CUDA can be used here";
  expect_error(error_of([] { const Engine engine(small_config(Backend::kCuda)); }),
               ErrorCode::kUnimplemented, "CUDA");
  const Engine automatic(small_config(Backend::kAuto));
  EXPECT_EQ(automatic.backend(), Backend::kCpu);
}

TEST(EngineErrors, AllProblemsOfAConfigurationAreNamed) {
  Config config = small_config(Backend::kCpu);
  config.model.head_dim = 65;
  config.retrieval.top_k = -1;
  config.memory.page_tokens = 48;
  const std::optional<Error> error = error_of([&] { const Engine engine(config); });

  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error->what(), ::testing::HasSubstr("found 3 problems"));
  EXPECT_THAT(error->what(), ::testing::HasSubstr("model.head_dim"));
  EXPECT_THAT(
      error->what(),
      ::testing::HasSubstr("retrieval.top_k: expected at least 1, or 0 (not given), found -1"));
  EXPECT_THAT(error->what(), ::testing::HasSubstr("memory.page_tokens"));
}

}  // namespace
}  // namespace kvtier::testing
