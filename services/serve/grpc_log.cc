#include "services/serve/grpc_log.h"

#include "services/console/log.h"

#include <grpc/support/log.h>

#include <mutex>
#include <shared_mutex>
#include <string_view>

namespace kvtier::services {
namespace {

constexpr std::size_t kMostBytes = 512;

/// Guards `grpc_sink`, which threads of gRPC may use when its owner ends.
std::shared_mutex& log_mutex() {
  static auto* const mutex = new std::shared_mutex;
  return *mutex;
}
Log* grpc_sink = nullptr;

void take(gpr_log_func_args* line) {
  const std::shared_lock lock(log_mutex());
  if (grpc_sink == nullptr) return;
  LogLevel level = LogLevel::kWarning;
  if (line->severity == GPR_LOG_SEVERITY_DEBUG) level = LogLevel::kDebug;
  if (line->severity == GPR_LOG_SEVERITY_INFO) level = LogLevel::kInfo;
  grpc_sink->write({.level = level,
                    .event = "grpc",
                    .message = std::string_view(line->message).substr(0, kMostBytes)});
}

}  // namespace

GrpcLog::GrpcLog(Log& to) {
  {
    const std::unique_lock lock(log_mutex());
    grpc_sink = &to;
  }
  gpr_set_log_function(&take);
}

GrpcLog::~GrpcLog() {
  const std::unique_lock lock(log_mutex());
  grpc_sink = nullptr;
}

}  // namespace kvtier::services
