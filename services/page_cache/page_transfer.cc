#include "services/page_cache/page_transfer.h"

#include "kvtier/error.h"

#include "services/base/from_message.h"
#include "services/page_cache/tenant_pages.h"

#include <algorithm>
#include <limits>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxName = 128;
constexpr std::size_t kHeadBytes = 160;  // of a chunk, about

/// A negative or too large number cannot be an offset or an index.
std::int64_t number_of(std::uint64_t value, const char* field) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    throw ServiceError::invalid(field, "at least 0", "less");
  }
  return static_cast<std::int64_t>(value);
}

WriteChunk parse_chunk(const ByteRuns& bytes) {
  using Chunk = v1::WritePagesRequest::Chunk;
  WriteChunk chunk;
  for (MessageCursor cursor(bytes); cursor.next();) {
    switch (cursor.field()) {
      case Chunk::kIndexFieldNumber:
        chunk.index = static_cast<int>(std::min<std::int64_t>(
            number_of(cursor.varint(), "chunks.index"), std::numeric_limits<int>::max()));
        break;
      case Chunk::kHandleFieldNumber:
        chunk.handle = cursor.text(kMaxName);
        break;
      case Chunk::kOffsetFieldNumber:
        chunk.offset = number_of(cursor.varint(), "chunks.offset");
        break;
      case Chunk::kLastFieldNumber:
        chunk.last = cursor.varint() != 0;
        break;
      case Chunk::kCrc32CFieldNumber:
        chunk.crc = cursor.fixed32();
        break;
      case Chunk::kDataFieldNumber:
        chunk.data = cursor.bytes();
        break;
      default:
        cursor.skip();
    }
  }
  return chunk;
}

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

void settle_pages(TenantPages& pages, google::protobuf::RepeatedPtrField<v1::PageResult>& items) {
  pages.settle();
  for (v1::PageResult& item : items) {
    if (item.has_page()) {
      item.mutable_page()->set_durable(pages.is_durable(item.page().handle()));
    }
  }
}

WriteMessage parse_write_message(const ByteRuns& bytes) {
  WriteMessage message;
  for (MessageCursor cursor(bytes); cursor.next();) {
    switch (cursor.field()) {
      case v1::WritePagesRequest::kLeaseFieldNumber:
        message.lease = cursor.text(kMaxName);
        break;
      case v1::WritePagesRequest::kChunksFieldNumber:
        message.chunks.push_back(parse_chunk(cursor.bytes()));
        break;
      default:
        cursor.skip();
    }
  }
  return message;
}

void PageWriter::write(PageLease& lease, const WriteMessage& message, int max_pages) {
  pages_ = &lease.pages;
  for (const WriteChunk& chunk : message.chunks) {
    const int count = response_.items_size();
    if (chunk.index != count - 1) {
      if (chunk.index != count || count >= max_pages) {
        throw ServiceError::invalid("chunks.index",
                                    std::to_string(std::max(count - 1, 0)) +
                                        " or the next, below " + std::to_string(max_pages),
                                    std::to_string(chunk.index));
      }
      if (count > 0 && !ended_) end_incomplete();
      response_.add_items();
      transfer_.page();
      handle_ = chunk.handle;
      ended_ = false;
    }
    if (ended_) continue;
    try {
      write_chunk(lease, chunk);
    } catch (...) {
      auto& item = *response_.mutable_items(chunk.index);
      item.clear_page();
      set_status(to_service_error(std::current_exception()), *item.mutable_status());
      ended_ = true;
    }
  }
}

void PageWriter::write_chunk(PageLease& lease, const WriteChunk& chunk) {
  auto offset = static_cast<std::uint64_t>(chunk.offset);
  for (const auto& run : chunk.data) {
    lease.pages.write(lease, handle_, offset, run);
    transfer_.moved(run.size());
    offset += run.size();
  }
  if (!chunk.last) return;
  fill_page(lease.pages.commit(lease, handle_, chunk.crc),
            *response_.mutable_items(chunk.index)->mutable_page());
  ended_ = true;
}

void PageWriter::end_incomplete() {
  set_status(ServiceError(Code::kFailedPrecondition, "PAGE_INCOMPLETE",
                          "expected a last chunk of the page, found none"),
             *response_.mutable_items(response_.items_size() - 1)->mutable_status());
}

v1::WritePagesResponse PageWriter::finish() {
  if (response_.items_size() > 0 && !ended_) end_incomplete();
  ended_ = true;
  if (pages_ != nullptr) settle_pages(*pages_, *response_.mutable_items());
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
