// A library with definitions of google.rpc, as those of cloud services have them.
#include <google/rpc/status.pb.h>

namespace other_library {

int code_of(int code) {
  google::rpc::Status status;
  status.set_code(code);
  return status.code();
}

}  // namespace other_library
