#include "services/page_cache/page_transfer.h"

#include "services/base/from_message.h"
#include "services/page_cache/tenant_pages.h"

#include <algorithm>
#include <utility>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxName = 128;
constexpr std::size_t kHeadBytes = 160;  // of a chunk, about

}  // namespace

void fill_page(const PageInfo& from, v1::Page& to) {
  to.set_handle(from.handle);
  to.set_length(static_cast<std::int64_t>(from.length));
  to.set_crc32c(from.crc32c);
  to.set_existed(from.existed);
  to.set_slot(from.slot);
  to.set_generation(from.generation);
  to.set_durable(from.durable);
}

void set_durable(TenantPages& pages, google::protobuf::RepeatedPtrField<v1::PageResult>& items) {
  for (v1::PageResult& item : items) {
    if (item.has_page()) {
      item.mutable_page()->set_durable(pages.is_durable(item.page().handle()));
    }
  }
}

WriteMessage parse_write_message(const ByteRuns& bytes) {
  using Request = v1::WritePagesRequest;
  WriteMessage message;
  Request rest;
  read_message(bytes, Request::kChunksFieldNumber, rest, [&](const ByteRuns& chunk) {
    WriteChunk& to = message.chunks.emplace_back();
    read_message(chunk, Request::Chunk::kDataFieldNumber, to.fields,
                 [&](const ByteRuns& data) { to.data = data; });
    check_at_most("chunks.handle", to.fields.handle().size(), kMaxName, " bytes");
    check_at_least("chunks.index", to.fields.index(), 0);
    check_at_least("chunks.offset", to.fields.offset(), 0);
  });
  check_at_most("lease", rest.lease().size(), kMaxName, " bytes");
  message.lease = rest.lease();
  return message;
}

void PageWriter::write(PageLease& lease, const WriteMessage& message, int max_pages) {
  pages_ = &lease.pages;
  for (const WriteChunk& chunk : message.chunks) {
    const int index = chunk.fields.index();
    const int count = response_.items_size();
    if (index != count - 1) {
      if (index != count || count >= max_pages) {
        throw ServiceError::invalid("chunks.index",
                                    std::to_string(std::max(count - 1, 0)) +
                                        " or the next, below " + std::to_string(max_pages),
                                    std::to_string(index));
      }
      if (count > 0 && !ended_) end_incomplete();
      response_.add_items();
      transfer_.page();
      handle_ = chunk.fields.handle();
      ended_ = false;
    }
    if (ended_) continue;
    try {
      write_chunk(lease, chunk);
    } catch (...) {
      auto& item = *response_.mutable_items(index);
      item.clear_page();
      set_status(to_service_error(std::current_exception()), *item.mutable_status());
      ended_ = true;
    }
  }
}

void PageWriter::write_chunk(PageLease& lease, const WriteChunk& chunk) {
  auto offset = static_cast<std::uint64_t>(chunk.fields.offset());
  for (const auto& run : chunk.data) {
    lease.pages.write(lease, handle_, offset, run);
    transfer_.moved(run.size());
    offset += run.size();
  }
  if (!chunk.fields.last()) return;
  std::optional<std::uint32_t> crc;
  if (chunk.fields.has_crc32c()) crc = chunk.fields.crc32c();
  fill_page(lease.pages.commit(lease, handle_, crc),
            *response_.mutable_items(chunk.fields.index())->mutable_page());
  ended_ = true;
}

void PageWriter::end_incomplete() {
  set_status(ServiceError(Code::kFailedPrecondition, "PAGE_INCOMPLETE",
                          "expected a last chunk of the page, found none"),
             *response_.mutable_items(response_.items_size() - 1)->mutable_status());
}

void PageWriter::when_settled(std::function<void()> act) const {
  if (pages_ == nullptr) return act();
  pages_->when_settled(std::move(act));
}

v1::WritePagesResponse PageWriter::finish() {
  if (response_.items_size() > 0 && !ended_) end_incomplete();
  ended_ = true;
  if (pages_ != nullptr) set_durable(*pages_, *response_.mutable_items());
  return std::move(response_);
}

std::vector<ReadPiece> PageReader::next(std::size_t max_bytes) {
  std::vector<ReadPiece> pieces;
  std::size_t bytes = 0;
  while (index_ < handles_.size() && bytes + kHeadBytes < max_bytes) {
    pieces.push_back(next_piece(max_bytes - bytes - kHeadBytes));
    bytes += pieces.back().head.size() + pieces.back().data.size();
  }
  return pieces;
}

ReadPiece PageReader::next_piece(std::size_t max_bytes) {
  v1::ReadPagesResponse::Chunk chunk;
  chunk.set_index(static_cast<int>(index_));
  ReadPiece piece;
  if (page_ == nullptr) {
    transfer_.page();
    try {
      page_ = std::make_shared<const PinnedPage>(store_.read(tenant_, handles_[index_], verify_));
      chunk.mutable_page()->set_handle(handles_[index_]);
      chunk.mutable_page()->set_length(static_cast<std::int64_t>(page_->bytes().size()));
      chunk.mutable_page()->set_crc32c(page_->crc());
      chunk.mutable_page()->set_slot(page_->slot());
      chunk.mutable_page()->set_generation(page_->generation());
    } catch (...) {
      set_status(to_service_error(std::current_exception()), *chunk.mutable_status());
    }
  }
  if (page_ != nullptr) {
    chunk.set_offset(static_cast<std::int64_t>(offset_));
    piece.page = page_;
    piece.data = page_->bytes().subspan(offset_);
    piece.data = piece.data.first(std::min(piece.data.size(), max_bytes));
    offset_ += piece.data.size();
    transfer_.moved(piece.data.size());
  }
  if (page_ == nullptr || offset_ == page_->bytes().size()) {
    chunk.set_last(true);
    page_ = nullptr;
    offset_ = 0;
    ++index_;
  }
  std::string fields = chunk.SerializeAsString();
  if (!piece.data.empty()) {
    append_bytes_head(fields, v1::ReadPagesResponse::Chunk::kDataFieldNumber, piece.data.size());
  }
  append_bytes_head(piece.head, v1::ReadPagesResponse::kChunksFieldNumber,
                    fields.size() + piece.data.size());
  piece.head += fields;
  return piece;
}

}  // namespace kvtier::services
