#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/status.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvtier::services::testing {

struct RawReply {
  grpc::Status status;
  std::string bytes;
};

/// Sends `bytes`, whatever they are, as the one message of a call, and waits for the end.
/// `metadata` goes with it.
RawReply raw_call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& bytes,
                  const std::vector<std::pair<std::string, std::string>>& metadata = {});

/// A channel of its own, over plaintext, without a limit on what it sends.
std::shared_ptr<grpc::Channel> raw_channel(const std::string& target);

/// Reason of a status, by its details; empty when it has none.
std::string reason_of(const grpc::Status& status);

}  // namespace kvtier::services::testing
