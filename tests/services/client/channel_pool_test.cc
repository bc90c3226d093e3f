#include "services/client/channel_pool.h"

#include "tests/services/server/server_fixture.h"

#include <chrono>
#include <memory>

namespace kvtier::services::testing {
namespace {

TEST_F(ServerTest, ClientsThatLostTheDataPlaneAskForItAgain) {
  ServerOptions with_plane = options();
  with_plane.data.listen = {parse_endpoint(socket() + ".data")};
  with_plane.data.attachments.max_attachments = 1;
  start(with_plane);
  Connection connection({.server = socket()});
  ChannelPool::Clock::time_point now{};
  auto first = std::make_unique<ChannelPool>(connection);
  ChannelPool second(connection, [&now] { return now; });
  EXPECT_TRUE(first->borrow());

  EXPECT_FALSE(second.borrow());  // the only attachment is the other's
  first.reset();

  EXPECT_FALSE(second.borrow());  // asked lately
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool lent = false;
  while (!lent && std::chrono::steady_clock::now() < give_up) {  // the server sees the end
    now += std::chrono::seconds(6);
    lent = static_cast<bool>(second.borrow());
  }
  EXPECT_TRUE(lent);
}

}  // namespace
}  // namespace kvtier::services::testing
