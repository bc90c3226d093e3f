#include "transfer/tiers/crc32c.h"
#include "transfer/tiers/segment.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

namespace kvtier::tiers {
namespace {

constexpr std::size_t kMaxThreads = 8;
constexpr std::size_t kSearchBytes = std::size_t{1} << 20U;

class Scan {
 public:
  Scan(Segment& segment, const AlignedBuffer& buffer) : segment_(segment), buffer_(buffer) {}

  std::vector<RecordHeader> run() {
    std::vector<RecordHeader> found;
    std::uint64_t at = kBlockBytes;
    while (const auto record = next(at)) {
      at = record->offset + record_bytes(record->length);
      segment_.durable_end = std::max(segment_.durable_end, record->durable_end);
      if (record->kind == RecordKind::kSeal) {
        segment_.end = record->offset;
        continue;  // it was written over if records follow
      }
      segment_.end = at;
      if (record->kind == RecordKind::kPage) found.push_back(*record);
    }
    const std::uint64_t durable_end = segment_.durable_end;
    std::erase_if(found, [&](const RecordHeader& record) {
      return record.offset >= durable_end && !verified(record);
    });
    // What was verified may be in the page cache only, as after a kill.
    if (durable_end < segment_.end && segment_.ops.fdatasync(segment_.fd) != 0) {
      segment_.doubtful = true;
    }
    if (!segment_.doubtful) segment_.durable_end = segment_.end;
    return found;
  }

 private:
  // The first whole header from `at` on. One block, as a rule; else it searches.
  std::optional<RecordHeader> next(std::uint64_t at) {
    std::size_t wanted = kBlockBytes;
    while (at + kBlockBytes <= segment_.header.bytes) {
      const std::size_t size = std::min<std::uint64_t>(wanted, segment_.header.bytes - at);
      const auto bytes = buffer_.bytes().first(size / kBlockBytes * kBlockBytes);
      const std::size_t count = read(bytes, at);
      for (std::size_t i = 0; i + kBlockBytes <= count; i += kBlockBytes) {
        const ConstBlock block(bytes.data() + i, kBlockBytes);
        if (auto record = decode_record(block, segment_.header, at + i)) return record;
      }
      if (count < bytes.size() && !segment_.doubtful) return std::nullopt;  // end of the file
      at += bytes.size();
      wanted = kSearchBytes;
    }
    return std::nullopt;
  }

  // Whole blocks, fewer at the end of the file. What the disk refuses to read is skipped.
  std::size_t read(std::span<std::byte> to, std::uint64_t offset) {
    const int error = segment_.ops.read_all(segment_.fd, to, offset);
    if (error == 0) return to.size();
    std::size_t count = 0;
    for (; count < to.size(); count += kBlockBytes) {
      const int block_error =
          segment_.ops.read_all(segment_.fd, to.subspan(count, kBlockBytes), offset + count);
      if (block_error == FileOps::kEndOfFile) return count;
      if (block_error == 0) continue;
      segment_.doubtful = true;
      std::fill_n(to.begin() + static_cast<std::ptrdiff_t>(count), kBlockBytes, std::byte{0});
    }
    return count;
  }

  bool verified(const RecordHeader& record) {
    std::uint32_t crc = 0;
    bool whole = true;
    for (std::uint64_t done = 0; done < record.length && whole; done += buffer_.bytes().size()) {
      const std::uint64_t left = record.length - done;
      const auto bytes = buffer_.bytes().first(static_cast<std::size_t>(
          std::min<std::uint64_t>(buffer_.bytes().size(), round_to_blocks(left))));
      whole = segment_.ops.read_all(segment_.fd, bytes, record.offset + kBlockBytes + done) == 0;
      crc = crc32c(
          bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(left, bytes.size()))), crc);
    }
    if (whole && crc == record.page_crc) return true;
    const Block block(buffer_.bytes().data(), kBlockBytes);
    encode_dead(record, segment_.header, block);
    if (segment_.ops.write_all(segment_.fd, block, record.offset) != 0) segment_.doubtful = true;
    return false;
  }

  Segment& segment_;
  const AlignedBuffer& buffer_;
};

}  // namespace

std::vector<std::vector<RecordHeader>> scan_segments(
    std::span<const std::shared_ptr<Segment>> segments) {
  std::vector<std::vector<RecordHeader>> results(segments.size());
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // guards failure
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      const AlignedBuffer buffer(kSearchBytes);
      for (std::size_t i = next++; i < segments.size(); i = next++) {
        results[i] = Scan(*segments[i], buffer).run();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (std::size_t i = 1; i < std::min(kMaxThreads, segments.size()); ++i) {
        threads.emplace_back(work);
      }
    } catch (const std::system_error&) {
      // The threads that there are do it, this one at least.
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return results;
}

}  // namespace kvtier::tiers
