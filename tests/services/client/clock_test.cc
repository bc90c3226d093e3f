#include "tests/services/client/client_fixture.h"
#include "tests/support/eventually.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <dlfcn.h>
#include <future>

namespace kvtier::services::testing {
namespace {

/// Seconds by which the clock of the wall is turned each time that it is read, and how
/// often it was.
std::atomic<std::int64_t> turn_per_look{0}, looks{0};

/// Turns the clock of the wall of this process, not that of the machine.
class TurningWallClock {
 public:
  explicit TurningWallClock(std::int64_t seconds_per_look) {
    looks = 0;
    turn_per_look = seconds_per_look;
  }
  ~TurningWallClock() { turn_per_look = 0; }
  TurningWallClock(const TurningWallClock&) = delete;  // one clock
  TurningWallClock& operator=(const TurningWallClock&) = delete;
};

}  // namespace
}  // namespace kvtier::services::testing

/// In the place of the C library's, also for gRPC.
extern "C" [[gnu::visibility("default")]] int clock_gettime(clockid_t clock,
                                                            timespec* time) noexcept {
  using Function = int (*)(clockid_t, timespec*);
  static const auto original = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = original(clock, time);
  const std::int64_t turn = kvtier::services::testing::turn_per_look;
  if (clock == CLOCK_REALTIME && turn != 0)
    time->tv_sec += ++kvtier::services::testing::looks * turn;
  return result;
}

namespace kvtier::services::testing {
namespace {

/// One look at the wall shows another hour than the look before.
class TurningClockTest : public ServerTest, public ::testing::WithParamInterface<std::int64_t> {
 protected:
  v1::CreateSessionResponse create(const v1::CreateSessionRequest& request) {
    v1::CreateSessionResponse response;
    std::promise<bool> ok;
    ServiceCore& core = server_->core();
    core.run({.tenant = core.tenants().all()[0].get()}, request, response,
             [&ok](const ServiceError* error) { ok.set_value(error == nullptr); });
    EXPECT_TRUE(kvtier::testing::await(ok));
    return response;
  }
};

TEST_P(TurningClockTest, NoDeadlineLeaseOrWindowFollowsIt) {
  ServerOptions options = this->options();
  options.data.listen = {parse_endpoint(socket() + ".data")};
  start(options);
  const std::vector<float> rows = random_floats(kQueryHeads * kHeadDim, 1);
  const TensorView query = tokens_view(rows, DType::kFloat32, 1, kQueryHeads);
  const TensorView row = tokens_view(rows, DType::kFloat32, 1, kKvHeads);
  RemoteSessionConfig config;
  config.model = {
      .layers = kLayers, .query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};

  const TurningWallClock turning(GetParam());
  v1::CreateSessionRequest request;
  request.set_request_id("6f1c2d1e-0000-4000-8000-000000000001");
  *request.mutable_geometry() = small_geometry();
  const std::string name = create(request).session().name();
  for (const bool data_plane : {false, true}) {
    Client client({.server = socket(), .attempts = 1, .data_plane = data_plane});
    RemoteSession session = client.open(config);
    RemotePages pages = client.open_pages({.model = "m", .page_bytes = 4096});
    const std::vector<std::byte> page(4096, std::byte{7});
    const RemotePages::Put put{.hash = data_plane ? "b" : "a", .bytes = page};
    EXPECT_TRUE(pages.put({&put, 1}).at(0).ok());
    for (int step = 0; step < 3; ++step) {
      std::vector<float> out(rows.size());
      session.decode(0, {.query = query, .key = row, .value = row},
                     {.out = {out.data(), DType::kFloat32, {1, kQueryHeads, kHeadDim}}});
      server_->sweep(std::chrono::steady_clock::now());
    }
    const std::string hashes[] = {put.hash};
    const int layers[] = {0};
    const auto found = pages.lookup(hashes, layers);
    ASSERT_EQ(found.size(), 1U);
    std::vector<std::byte> read(4096);
    const RemotePages::Get get{.handle = found[0].handle, .to = read};
    EXPECT_TRUE(pages.get({&get, 1}).at(0).ok());
    EXPECT_EQ(read, page);
    session.append(1, row, row);
    session.refresh();
    EXPECT_EQ(session.length(0), 3);
    EXPECT_EQ(session.length(1), 1);
  }
  EXPECT_EQ(create(request).session().name(), name) << "the request that it repeats";
  EXPECT_EQ(server_->core().num_sessions(), 1U);
  const auto look = std::chrono::system_clock::now();
  EXPECT_GE(std::chrono::abs(std::chrono::system_clock::now() - look), std::chrono::minutes(59))
      << "the clock is not turned: nothing was shown";
  server_->drain(std::chrono::seconds(30));
}

INSTANTIATE_TEST_SUITE_P(Hours, TurningClockTest, ::testing::Values(3600, -3600),
                         [](const auto& test) {
                           return std::string(test.param > 0 ? "Forwards" : "Backwards");
                         });

}  // namespace
}  // namespace kvtier::services::testing
