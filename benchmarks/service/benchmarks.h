#pragma once

#include "benchmarks/service/server_process.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

/// Each compares a path of the service with what it is to be held against, in turn, and returns
/// rows of the report.
namespace kvtier::bench {

struct Settings {
  int rounds = 7;
  std::filesystem::path model = "data/needle-llama/model";
  std::int64_t tokens = 8192;
};

/// Shared memory against memcpy, frames against sendmsg; every page read is compared once.
[[nodiscard]] nlohmann::json page_rows(const ServerProcess& server, const Settings& settings);
/// Shared memory against GET of a redis-server that is started for it; an error without one.
[[nodiscard]] nlohmann::json redis_rows(const ServerProcess& server, const Settings& settings);
/// A small unary call against an empty one.
[[nodiscard]] nlohmann::json call_rows(const ServerProcess& server, const Settings& settings);
/// ReadPages, whose bytes go by gRPC's slices, against the same pages in messages of protobuf.
[[nodiscard]] nlohmann::json stream_rows(const ServerProcess& server, const Settings& settings);
/// Calls at five times the rate that the server completes, against that rate.
[[nodiscard]] nlohmann::json overload_rows(const ServerProcess& server, const Settings& settings);
/// Decoder steps over the data plane, and over gRPC, against an engine in this process.
[[nodiscard]] nlohmann::json decode_rows(const ServerProcess& server, const Settings& settings);

/// How well the time of a lookup separates hashes that another tenant has stored from hashes that
/// no tenant has, and, to show that the probe works, the same of the tenant's own.
[[nodiscard]] nlohmann::json isolation_rows(const ServerProcess& server, const Settings& settings);

/// Round trips of two processes that wake each other by a frame on a socket, and by an eventfd with
/// the frame in shared memory: what the data plane could win at most.
[[nodiscard]] nlohmann::json wakeup_rows(const ServerProcess& server, const Settings& settings);

}  // namespace kvtier::bench
