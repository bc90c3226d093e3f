#include "tests/services/serve/serve_fixture.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <openssl/sha.h>
#include <thread>

namespace kvtier::services {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kQueryHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 128;
constexpr int kNoTokens = 0;

/// The long form, which `scripts/soak.sh` runs, has loads as real ones.
bool is_long() { return std::getenv("KVTIER_HOSTILE_LONG") != nullptr; }
int sized(int small, int large) { return is_long() ? large : small; }

std::string sha256(const std::string& text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::string hex;
  for (const unsigned char byte : digest) {
    constexpr std::string_view kHex = "0123456789abcdef";
    hex += kHex[byte >> 4U];
    hex += kHex[byte & 15U];
  }
  return hex;
}

/// 16-bit floats between 0.5 and 2 of either sign.
std::vector<std::uint16_t> halves(std::int64_t count, unsigned seed) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (auto& value : values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<std::uint16_t>(0x3F00U | ((seed >> 16U) & 0x80FFU));
  }
  return values;
}

/// One session and the tensors of its calls.
struct User {
  User(Client& client, int layers, std::int64_t stored, std::int64_t query_tokens)
      : query_tokens_(query_tokens),
        query_(halves(query_tokens * kQueryHeads * kHeadDim, 1)),
        key_(halves(kKvHeads * kHeadDim, 2)),
        out_(query_.size()),
        session_(client.open(config(layers))) {
    constexpr std::int64_t kChunk = 4096;
    const auto chunk = halves(kChunk * kKvHeads * kHeadDim, 3);
    for (std::int64_t done = 0; done < stored; done += kChunk) {
      const std::int64_t count = std::min(kChunk, stored - done);
      const TensorView tokens{chunk.data(), DType::kBFloat16, {count, kKvHeads, kHeadDim}};
      session_.append(0, tokens, tokens);
    }
  }
  static RemoteSessionConfig config(int layers) {
    RemoteSessionConfig config;
    config.model = {
        .layers = layers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
    config.retrieval.top_k = 16;
    return config;
  }
  void attend_dense() {
    AttendOptions dense;
    dense.mode = LayerMode::kDense;
    session_.attend(0, {.query = query()}, {.out = out()}, dense);
  }
  void step() {
    const TensorView row{key_.data(), DType::kBFloat16, {1, kKvHeads, kHeadDim}};
    session_.decode(0, {.query = query(), .key = row, .value = row}, {.out = out()});
  }

 private:
  TensorView query() {
    return {query_.data(), DType::kBFloat16, {query_tokens_, kQueryHeads, kHeadDim}};
  }
  MutableTensorView out() {
    return {out_.data(), DType::kBFloat16, {query_tokens_, kQueryHeads, kHeadDim}};
  }

  const std::int64_t query_tokens_;
  std::vector<std::uint16_t> query_, key_, out_;
  RemoteSession session_;
};

/// A server of two tenants, of which one makes all the load that it may and the other little.
class StarvationTest : public ServeTest {
 protected:
  void start(std::vector<std::string> options = {}, const std::string& limits = "") {
    const std::string tenants =
        write("tenants", R"({"tenants": [{"name": "quiet", "token_sha256": ")" + sha256("quiet") +
                             R"("}, {"name": "busy", "token_sha256": ")" + sha256("busy") + "\"" +
                             limits + "}]}");
    socket_ = "unix:" + (folder_ / "s").string();
    for (const char* option : {"--backend", "cpu", "--worker", "off", "--tenants"}) {
      options.emplace_back(option);
    }
    options.push_back(tenants);
    options.insert(options.end(), {"--listen", socket_});
    server_ = serve(options);
    ASSERT_EQ(server_->read_line(), "listening on " + socket_) << err();
  }
  void TearDown() override {
    server_.reset();
    ServeTest::TearDown();
  }
  [[nodiscard]] ClientOptions options(const std::string& tenant) const {
    return {.server = socket_, .token = tenant, .timeout = std::chrono::minutes(10), .attempts = 1};
  }
  /// Makes `load` on threads of their own until `work` is done; what either throws fails the test.
  void under(int threads, const std::function<void(int)>& load, const std::function<void()>& work) {
    std::atomic<bool> over{false};
    std::atomic<int> loads{0};
    std::vector<std::thread> loaders;
    for (int i = 0; i < threads; ++i) {
      loaders.emplace_back([&, i] {
        while (!over) {
          try {
            load(i);
          } catch (const ClientError& error) {
            ++refused_;
            if (error.reason() != "TOO_MANY_MODELS") ADD_FAILURE() << error.what();
          }
          ++loads;
        }
      });
    }
    work();
    over = true;
    for (std::thread& loader : loaders) loader.join();
    std::printf("  %d calls of the other tenant, %d refused\n", loads.load(), refused_.load());
  }
  /// Makes a call so many times, and says how long each took. No test depends on that.
  void measure(const char* what, int times, const std::function<void()>& call) {
    std::vector<double> milliseconds;
    for (int i = 0; i < times; ++i) {
      const auto begin = Clock::now();
      ASSERT_NO_THROW(call()) << what;
      milliseconds.push_back(
          std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    const auto at = [&](double share) {
      return milliseconds[static_cast<std::size_t>(share * static_cast<double>(times - 1))];
    };
    std::printf("  %s: p50 %.1f ms, p99 %.1f ms, max %.1f ms of %d\n", what, at(.5), at(.99),
                milliseconds.back(), times);
  }

  std::string socket_;
  std::unique_ptr<testing::Program> server_;
  std::atomic<int> refused_{0};
};

TEST_F(StarvationTest, OneCallOverALongContextOnTheSameEngine) {
  start({"--host-memory-mib", std::to_string(sized(64, 512)), "--device-timeout-seconds", "1"});
  Client busy(options("busy"));
  Client quiet(options("quiet"));
  User heavy(busy, 1, sized(8192, 131072 - 4096), 256);
  User light(quiet, 1, 256, 1);
  measure("a step alone", sized(20, 200), [&] { light.step(); });
  under(
      1, [&](int) { heavy.attend_dense(); },
      [&] { measure("a step beside it", sized(20, 200), [&] { light.step(); }); });
}

TEST_F(StarvationTest, ManyHeavyCallsOnAnotherEngine) {
  constexpr int kCalls = 24;
  start({"--host-memory-mib", std::to_string(sized(128, 2048)), "--device-timeout-seconds", "1"});
  Client busy(options("busy"));
  Client quiet(options("quiet"));
  std::vector<std::unique_ptr<User>> heavy;
  for (int i = 0; i < kCalls; ++i) {
    heavy.push_back(std::make_unique<User>(busy, 1, sized(1024, 32000), sized(64, 760)));
  }
  User light(quiet, 2, 256, 1);
  measure("a step alone", sized(20, 200), [&] { light.step(); });
  under(
      kCalls, [&](int i) { heavy[static_cast<std::size_t>(i)]->attend_dense(); },
      [&] { measure("a step beside them", sized(20, 400), [&] { light.step(); }); });
}

TEST_F(StarvationTest, EnginesThatAreMadeAndLeft) {
  start({"--host-memory-mib", std::to_string(sized(16, 512)), "--max-models", "4"});
  Client busy(options("busy"));
  Client quiet(options("quiet"));
  const User stays(quiet, 1, kNoTokens, 1);
  const auto open = [&] { const User user(quiet, 1, kNoTokens, 1); };
  measure("CreateSession alone", sized(20, 200), open);
  std::atomic<int> layers{2};
  under(
      3, [&](int) { const User user(busy, 2 + layers++ % 200, kNoTokens, 1); },
      [&] { measure("CreateSession beside them", sized(20, 1000), open); });
}

TEST_F(StarvationTest, LeasesWithoutEnd) {
  start({}, is_long() ? "" : R"(, "max_leases": 50)");
  Client busy(options("busy"));
  Client quiet(options("quiet"));
  const RemotePagesConfig config{.model = "m", .page_bytes = 4096};
  std::vector<RemotePages> held;
  const auto refusal = [&]() -> std::string {
    try {
      while (held.size() < 16000) held.push_back(busy.open_pages(config));
    } catch (const ClientError& error) {
      return error.reason();
    }
    return "none";
  }();
  EXPECT_EQ(refusal, "TOO_MANY_LEASES");
  EXPECT_EQ(held.size(), static_cast<std::size_t>(sized(50, 8000)));
  measure("OpenLease beside them", 20, [&] { (void)quiet.open_pages(config); });
}

}  // namespace
}  // namespace kvtier::services
