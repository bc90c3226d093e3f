#include "services/wire/shared_region.h"

#include "kvtier/error.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>

namespace kvtier::services {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kSealFutureWrite = 0x0010;  // from Linux 5.1; glibc 2.36 may lack the name

std::byte* map_file(int file, std::size_t bytes, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  if (data != MAP_FAILED && ::madvise(data, bytes, MADV_DONTDUMP) == 0) {
    return static_cast<std::byte*>(data);
  }
  const std::string why = std::strerror(errno);
  if (data != MAP_FAILED) ::munmap(data, bytes);
  throw Error(ErrorCode::kResourceExhausted,
              "shared memory: expected to map " + std::to_string(bytes) + " bytes, found: " + why);
}

}  // namespace

SharedRegion SharedRegion::create(std::size_t bytes, Others others) {
  SharedRegion region;
  region.file_ = Descriptor(::memfd_create("kvtier", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int file = region.file_.get();
  const auto fail = [bytes] {
    throw Error(ErrorCode::kResourceExhausted, "shared memory: expected a file of " +
                                                   std::to_string(bytes) +
                                                   " bytes, found: " + std::strerror(errno));
  };
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) fail();
  region.data_ = map_file(file, bytes, true);
  region.size_ = bytes;
  // The seal against writing spares mappings that are there already: this one.
  const int seals = others == Others::kWrite ? kSizeSeals : kSizeSeals | kSealFutureWrite;
  if (::fcntl(file, F_ADD_SEALS, seals) != 0) fail();
  return region;
}

SharedRegion SharedRegion::map(Descriptor file, std::size_t bytes, bool writable) {
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || bytes == 0 ||
      status.st_size < static_cast<off_t>(bytes)) {
    throw Error(ErrorCode::kInvalidArgument, "shared memory: expected a file of at least " +
                                                 std::to_string(bytes) + " bytes, found " +
                                                 std::to_string(status.st_size));
  }
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw Error(ErrorCode::kInvalidArgument,
                "shared memory: expected a file whose size is sealed, found one that may shrink");
  }
  SharedRegion region;
  region.data_ = map_file(file.get(), bytes, writable);
  region.size_ = bytes;
  region.file_ = std::move(file);
  return region;
}

SharedRegion::~SharedRegion() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

SharedRegion::SharedRegion(SharedRegion&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedRegion& SharedRegion::operator=(SharedRegion&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, size_);
    file_ = std::move(other.file_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

}  // namespace kvtier::services
