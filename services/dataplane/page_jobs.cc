#include "services/dataplane/page_jobs.h"

#include "services/dataplane/connection.h"
#include "services/page_cache/tenant_pages.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::size_t kLookUpsPerStep = 512;
constexpr std::uint64_t kBytesPerStep = std::uint64_t{4} << 20;
/// Header and control go with them.
constexpr std::size_t kPagesPerFrame = kMaxPieces - 2;

std::string_view handle_of(const PageDescriptor& descriptor) {
  return {descriptor.handle.data(), descriptor.handle.size()};
}

TransferPlane plane_of(const PageRequest& request) {
  if (!request.shares_memory) return TransferPlane::kTcp;
  const bool is_inline = (request.header.flags & kInline) != 0;
  return is_inline ? TransferPlane::kUnix : TransferPlane::kShared;
}

/// Runs `work`, whose error becomes the item's.
template <typename Work>
PageOutcome outcome_of(Work work) {
  try {
    return work();
  } catch (...) {
    PageOutcome outcome;
    outcome.code = static_cast<std::uint32_t>(to_service_error(std::current_exception()).code());
    return outcome;
  }
}

class ReadJob final : public PageJob {
 public:
  ReadJob(const PageRequest& request, std::vector<PageDescriptor> descriptors)
      : pages_(request.pages),
        tenant_(request.tenant),
        request_id_(request.header.request_id),
        charge_(request.charge),
        verify_((request.header.flags & kServerSums) != 0 ? Verify::kYes : Verify::kNo),
        is_inline_((request.header.flags & kInline) != 0),
        is_mapped_(request.shares_memory),
        descriptors_(std::move(descriptors)),
        transfer_(request.pages.transfers(), plane_of(request), TransferDirection::kRead) {}

  bool step(DataConnection& connection) override {
    using Kept = std::pair<std::vector<PinnedPage>, std::shared_ptr<void>>;
    const auto kept = std::make_shared<Kept>(std::vector<PinnedPage>(), charge_);
    std::vector<PageOutcome> outcomes;
    std::vector<iovec> payload;
    std::uint64_t bytes = 0, checked = 0;
    const auto has_room = [&] {
      return bytes < kBytesPerStep && checked < kBytesPerStep && payload.size() < kPagesPerFrame &&
             outcomes.size() < kLookUpsPerStep;
    };
    for (; next_ < descriptors_.size() && has_room(); ++next_) {
      const PageDescriptor& wanted = descriptors_[next_];
      outcomes.push_back(outcome_of([&] {
        transfer_.page();  // whether it is there or not
        PinnedPage page = pages_.read(tenant_, handle_of(wanted), verify_);
        if (verify_ == Verify::kYes) checked += page.bytes().size();
        PageOutcome outcome{.crc = page.crc(),
                            .slot = page.slot(),
                            .generation = page.generation(),
                            .bytes = page.bytes().size()};
        if (!is_inline_) {
          if (is_mapped_) transfer_.moved(outcome.bytes);
          return outcome;
        }
        if (!lies_within({wanted.offset, wanted.bytes}, page.bytes().size())) {
          throw ServiceError::invalid("bytes", "a range of the page", std::to_string(wanted.bytes));
        }
        outcome.offset = bytes;
        outcome.bytes = wanted.bytes;
        const std::span<const std::byte> range = page.bytes().subspan(wanted.offset, wanted.bytes);
        if (!range.empty()) {
          payload.push_back({const_cast<std::byte*>(range.data()), range.size()});
        }
        bytes += range.size();
        transfer_.moved(range.size());
        kept->first.push_back(std::move(page));
        return outcome;
      }));
    }
    const bool ends = next_ == descriptors_.size();
    connection.send(make_outgoing(
        FrameType::kPages, (is_inline_ ? kInline : 0U) | (ends ? 0U : kMore), request_id_,
        encode(std::span(std::as_const(outcomes))), std::move(payload), kept));
    return ends;
  }

 private:
  PageStore& pages_;
  const Tenant& tenant_;
  const std::uint64_t request_id_;
  const std::shared_ptr<void> charge_;
  const Verify verify_;
  const bool is_inline_;
  const bool is_mapped_;  ///< The client can read the arena.
  const std::vector<PageDescriptor> descriptors_;
  Transfer transfer_;
  std::size_t next_ = 0;
};

class WriteJob final : public PageJob {
 public:
  WriteJob(const PageRequest& request, WriteBody body, std::span<const std::byte> source,
           std::shared_ptr<void> keep)
      : pages_(request.pages),
        request_id_(request.header.request_id),
        bytes_(static_cast<std::int64_t>(request.header.body_bytes)),
        charge_(request.charge),
        has_sums_((request.header.flags & kServerSums) == 0),
        body_(std::move(body)),
        source_(source),
        keep_(std::move(keep)),
        lease_(pages_.find(request.tenant, body_.lease)),
        transfer_(pages_.transfers(), plane_of(request), TransferDirection::kWrite) {}

  bool step(DataConnection& connection) override {
    const std::span<const PageDescriptor> left = std::span(body_.pages).subspan(outcomes_.size());
    for (const PageDescriptor& page : left.first(pages_of_step(left, source_.size()))) {
      outcomes_.push_back(outcome_of([&] { return write(page); }));
    }
    if (outcomes_.size() < body_.pages.size()) return false;
    // The disk may take its time, for which this thread has others to serve.
    struct Written {
      std::vector<PageDescriptor> pages;
      std::vector<PageOutcome> outcomes;
    };
    lease_->pages.when_settled([connection = connection.shared_from_this(), lease = lease_,
                                id = request_id_, charge = charge_, held = connection.hold(bytes_),
                                written = std::make_shared<Written>(
                                    Written{std::move(body_.pages), std::move(outcomes_)})] {
      const auto failure = failure_of([&, &pages = written->pages, &outcomes = written->outcomes] {
        for (std::size_t i = 0; i < outcomes.size(); ++i) {
          const bool durable =
              outcomes[i].code == 0 && lease->pages.is_durable(handle_of(pages[i]));
          outcomes[i].offset = durable ? kDurable : 0;
        }
        connection->send(make_outgoing(FrameType::kWritten, 0, id,
                                       encode(std::span(std::as_const(outcomes))), {}, charge));
      });
      // No memory for the reply: the client is to notice, and this thread has others to serve.
      if (failure) (void)failure_of([&] { connection->close_now(); });
    });
    return true;
  }

 private:
  PageOutcome write(const PageDescriptor& page) {
    transfer_.page();
    if (page.offset != 0 || !lies_within({page.destination, page.bytes}, source_.size())) {
      throw ServiceError::invalid("bytes", "a whole page within the memory at hand",
                                  std::to_string(page.bytes));
    }
    const PageInfo info = lease_->pages.commit(*lease_, handle_of(page),
                                               source_.subspan(page.destination, page.bytes),
                                               has_sums_ ? std::optional(page.crc) : std::nullopt);
    transfer_.moved(page.bytes);
    return {.code = info.existed ? kPageExisted : 0U,
            .crc = info.crc32c,
            .slot = info.slot,
            .generation = info.generation,
            .bytes = info.length};
  }

  PageStore& pages_;
  const std::uint64_t request_id_;
  const std::int64_t bytes_;  ///< Of the request.
  const std::shared_ptr<void> charge_;
  const bool has_sums_;
  WriteBody body_;
  const std::span<const std::byte> source_;
  const std::shared_ptr<void> keep_;
  const std::shared_ptr<PageLease> lease_;
  Transfer transfer_;
  std::vector<PageOutcome> outcomes_;
};

}  // namespace

std::size_t pages_of_step(std::span<const PageDescriptor> pages, std::uint64_t source_bytes) {
  std::size_t count = 0;
  for (std::uint64_t bytes = 0; count < pages.size() && bytes < kBytesPerStep; ++count) {
    bytes += std::min(pages[count].bytes, source_bytes);  // what a client says may not fit
  }
  return count;
}

std::unique_ptr<PageJob> make_read_job(const PageRequest& request,
                                       std::vector<PageDescriptor> descriptors) {
  return std::make_unique<ReadJob>(request, std::move(descriptors));
}

std::unique_ptr<PageJob> make_write_job(const PageRequest& request, WriteBody body,
                                        std::span<const std::byte> source,
                                        std::shared_ptr<void> keep) {
  return std::make_unique<WriteJob>(request, std::move(body), source, std::move(keep));
}

}  // namespace kvtier::services
