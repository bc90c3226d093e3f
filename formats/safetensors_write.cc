#include "kvtier/error.h"

#include "formats/safetensors.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace kvtier::formats {
namespace {

using nlohmann::json;
using Entry = std::pair<const std::string, Tensor>;

constexpr std::size_t kDataAlignment = 64;
constexpr std::size_t kLengthBytes = 8;

std::string_view format_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "F16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kInt32:
      return "I32";
    case DType::kFloat32:
      break;
  }
  return "F32";
}

void check_tensor(const std::string& name, const Tensor& tensor) {
  std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(tensor.dtype));
  bool fits = true;
  for (const std::int64_t extent : tensor.shape) {
    fits = fits && extent >= 0 && !__builtin_mul_overflow(bytes, extent, &bytes);
  }
  fits = fits && static_cast<std::uint64_t>(bytes) == tensor.bytes;
  if (!fits || (tensor.bytes > 0 && tensor.data == nullptr)) {
    throw Error(ErrorCode::kInvalidArgument, "tensor '" + name +
                                                 "': expected the bytes of its shape, found " +
                                                 std::to_string(tensor.bytes));
  }
  if (name == "__metadata__") {
    throw Error(ErrorCode::kInvalidArgument,
                "tensor name: expected any but __metadata__, found __metadata__");
  }
}

/// Wide elements first: then each tensor is aligned to its elements without padding.
std::vector<const Entry*> in_file_order(const std::map<std::string, Tensor>& tensors) {
  std::vector<const Entry*> order;
  for (const Entry& entry : tensors) order.push_back(&entry);
  std::ranges::stable_sort(order, [](const Entry* a, const Entry* b) {
    return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
  });
  return order;
}

/// Returns the length and the JSON, padded with blanks.
std::string make_header(const std::vector<const Entry*>& order,
                        const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const auto* entry : order) {
    const Tensor& tensor = entry->second;
    header[entry->first] = {{"dtype", format_name(tensor.dtype)},
                            {"shape", tensor.shape},
                            {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("names and metadata: expected UTF-8, found ") + error.what());
  }
  const std::size_t end = kLengthBytes + text.size();
  text.append((kDataAlignment - end % kDataAlignment) % kDataAlignment, ' ');
  const auto length = static_cast<std::uint64_t>(text.size());
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, kLengthBytes);
  return head + text;
}

/// A file that is removed unless `publish` renames it.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) : target_(target) {
    static std::atomic<unsigned> serial = 0;
    name_ = target;
    name_ += ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial++);
    file_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0) fail();
  }
  TemporaryFile(const TemporaryFile&) = delete;  // one owner removes the file
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (file_ >= 0) ::close(file_);
    if (!published_) ::unlink(name_.c_str());
  }

  void write(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(file_, from, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail();
      from += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
  void publish() {
    if (::fsync(file_) != 0 || ::close(std::exchange(file_, -1)) != 0) fail();
    if (::rename(name_.c_str(), target_.c_str()) != 0) fail();
    published_ = true;
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(ErrorCode::kUnavailable,
                target_.string() + ": cannot be written: " + std::strerror(errno));
  }

  const std::filesystem::path& target_;
  std::filesystem::path name_;
  int file_ = -1;
  bool published_ = false;
};

}  // namespace

void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, tensor] : tensors) check_tensor(name, tensor);
  const std::vector<const Entry*> order = in_file_order(tensors);
  const std::string header = make_header(order, metadata);

  TemporaryFile file(path);
  file.write(header.data(), header.size());
  for (const auto* entry : order) file.write(entry->second.data, entry->second.bytes);
  file.publish();
}

}  // namespace kvtier::formats
