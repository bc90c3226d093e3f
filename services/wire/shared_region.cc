#include "services/wire/shared_region.h"

#include "include/types/failure.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

namespace kvtier::services {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kSealFutureWrite = 0x0010;  // from Linux 5.1; glibc 2.36 may lack the name

}  // namespace

SharedRegion::Mapping SharedRegion::map_file(int file, std::size_t bytes, bool writable) {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
  Mapping mapping(data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data), Unmap{bytes});
  if (mapping && ::madvise(data, bytes, MADV_DONTDUMP) == 0) return mapping;
  throw_error(ErrorCode::kResourceExhausted, "shared memory: expected to map ", bytes,
              " bytes, found: ", std::strerror(errno));
}

void SharedRegion::Unmap::operator()(std::byte* data) const noexcept { ::munmap(data, bytes); }

SharedRegion SharedRegion::create(std::size_t bytes, Others others) {
  SharedRegion region;
  region.file_ = Descriptor(::memfd_create("kvtier", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int file = region.file_.get();
  const auto fail = [bytes] {
    throw_error(ErrorCode::kResourceExhausted, "shared memory: expected a file of ", bytes,
                " bytes, found: ", std::strerror(errno));
  };
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) fail();
  region.data_ = map_file(file, bytes, true);
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
    throw_invalid("shared memory", join("a file of at least ", bytes, " bytes"), status.st_size);
  }
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw_invalid("shared memory", "a file whose size is sealed", "one that may shrink");
  }
  SharedRegion region;
  region.data_ = map_file(file.get(), bytes, writable);
  region.file_ = std::move(file);
  return region;
}

}  // namespace kvtier::services
