#pragma once

namespace kvtier::services {

class Log;

/// While it lives, what gRPC would write to standard error goes to a log, cut to 512 bytes. Its
/// errors are warnings there, since peers cause them at will. One at a time.
class GrpcLog {
 public:
  explicit GrpcLog(Log& log);
  ~GrpcLog();
  GrpcLog(const GrpcLog&) = delete;  // the process has one
  GrpcLog& operator=(const GrpcLog&) = delete;
};

}  // namespace kvtier::services
