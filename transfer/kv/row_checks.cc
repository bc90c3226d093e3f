#include "transfer/kv/row_checks.h"

#include "transfer/device/parallel.h"
#include "transfer/device/simd.h"
#include "transfer/device/with_cuda.h"
#include "transfer/kv/rows_kernels.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

namespace kvtier::transfer {
namespace {

KVTIER_SIMD_CLONES std::uint32_t check_of_words(const std::uint32_t* words, std::uint32_t count) {
  std::uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::uint32_t i = 0; i < count; ++i) sum += check_of_word(words[i], i);
  return sum;
}

bool is_whole(const KvGeometry& geometry, const std::byte* page, int kv_head, std::int64_t token,
              const std::byte* row) {
  const std::uint32_t check = *check_in_page<const std::uint32_t>(geometry, page, kv_head, token);
  return check == kNotChecked || check == cpu::row_check(geometry, page, kv_head, token, row);
}

/// One (query, KV head) of a launch.
class Lane {
 public:
  Lane(const KvGeometry& geometry, const RowReading& reading, int query_index, int kv_head)
      : geometry_(geometry),
        reading_(reading),
        query_(reading.query_batch[query_index]),
        kv_head_(kv_head),
        list_(std::int64_t{query_index} * geometry.kv_heads + kv_head),
        sequence_(reading.sequences[query_.sequence]) {}

  void verify() {
    const AttendedSpans spans = attended_spans(reading_.rule, sequence_.counters->length, query_);
    for (std::int64_t token = 0; token < spans.sink_end; ++token) verify_in_place(token);
    for (std::int64_t t = spans.tail_begin; t < spans.visible; ++t) verify_in_place(t);
    const SelectionView& selection = reading_.selection;
    if (selection.ids != nullptr) {
      const std::int32_t* ids = selection.ids + list_ * selection.capacity;
      const std::int64_t count = selection.counts[list_];
      const std::int64_t staged = std::min(count, selection.staged_capacity);
      for (std::int64_t i = 0; i < staged; ++i) verify_staged(ids[i], i);
      for (std::int64_t i = staged; i < count; ++i) verify_in_place(ids[i]);
    }
    cpu::count(reading_.flags[query_.sequence], &StepFlags::rows_corrupt, corrupt_);
  }

 private:
  [[nodiscard]] const std::byte* page_of(std::int64_t token) const {
    return sequence_.pages[geometry_.page_of(token)];
  }
  [[nodiscard]] bool in_page(std::int64_t token) const {
    return !row_is_resident(geometry_, sequence_.counters->resident_begin, token);
  }
  void verify_in_place(std::int64_t token) {
    if (in_page(token) && !row_is_whole(geometry_, page_of(token), kv_head_, token)) ++corrupt_;
  }
  void verify_staged(std::int64_t token, std::int64_t i) {
    if (!in_page(token)) return;
    const SelectionView& selection = reading_.selection;
    std::byte* row =
        selection.staged + (list_ * selection.staged_capacity + i) * geometry_.row_bytes();
    if (is_whole(geometry_, page_of(token), kv_head_, token, row)) return;
    std::memset(row, 0xFF, static_cast<std::size_t>(geometry_.row_bytes()));  // NaN
    ++corrupt_;
  }

  const KvGeometry& geometry_;
  const RowReading& reading_;
  const QueryToken& query_;
  int kv_head_;
  std::int64_t list_;
  const SequenceView& sequence_;
  std::int64_t corrupt_ = 0;
};

}  // namespace

void load_frame_checks(Stream& stream, const KvGeometry& geometry, const FrameChecks& frames,
                       const std::byte* page) {
  const std::size_t bytes = sizeof(std::uint32_t) * static_cast<std::size_t>(geometry.kv_heads) *
                            static_cast<std::size_t>(geometry.page_tokens);
  const CopyRun run{frames.of_frame(geometry, page),
                    check_in_page<const std::uint32_t>(geometry, page, 0, 0), bytes};
  stream.copy({&run, 1});
}

void write_row_checks(Stream& stream, const KvGeometry& geometry, const AppendBatch& batch,
                      const FrameChecks& frames) {
  assert(geometry.row_checks);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      cuda::write_row_checks(stream.native(), geometry, batch, frames);
    }
  }
}

void verify_rows(Stream& stream, const KvGeometry& geometry, const RowReading& reading) {
  assert(geometry.row_checks && reading.flags.count == reading.sequences.count);
  enqueue<cpu::verify_rows, cuda::verify_rows>(stream, geometry, reading);
}

void gather_whole_rows(Stream& stream, const KvGeometry& geometry, const RowReading& reading,
                       StepFlags* flags) {
  assert(geometry.row_checks && reading.flags.count == reading.sequences.count);
  if constexpr (kWithCuda) {
    if (stream.native() != nullptr) {
      return cuda::gather_whole_rows(stream.native(), geometry, reading, flags);
    }
  }
  gather_rows(stream, geometry, reading.sequences, reading.query_batch, reading.selection, false,
              flags);
  verify_rows(stream, geometry, reading);
}

bool row_is_whole(const KvGeometry& geometry, const std::byte* page, int kv_head,
                  std::int64_t token) {
  std::byte row[4 * 256];
  assert(geometry.row_bytes() <= static_cast<std::int64_t>(sizeof row));
  cpu::read_page_row(geometry, page, kv_head, token, row);
  return is_whole(geometry, page, kv_head, token, row);
}

std::int64_t num_changed_rows(const KvGeometry& geometry, const std::byte* page, std::int64_t begin,
                              std::int64_t end) {
  std::int64_t changed = 0;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    for (std::int64_t token = begin; token < end; ++token) {
      if (!row_is_whole(geometry, page, head, token)) ++changed;
    }
  }
  return changed;
}

namespace cpu {

std::uint32_t row_check(const KvGeometry& geometry, const std::byte* page, int kv_head,
                        std::int64_t token, const std::byte* row) {
  std::uint32_t words[256];
  const auto count = static_cast<std::uint32_t>(geometry.head_dim);
  std::memcpy(words, row, std::size_t{4} * count);
  std::uint32_t check = check_of_place(token, kv_head) + check_of_words(words, count);
  if (geometry.int8_pages) {
    const float* scales = page_row<const float>(geometry, page, kv_head, token).scales;
    check += check_of_word(std::bit_cast<std::uint32_t>(scales[0]), count);
    check += check_of_word(std::bit_cast<std::uint32_t>(scales[1]), count + 1);
  }
  return check;
}

void verify_rows(const KvGeometry& geometry, const RowReading& reading) {
  const std::int64_t lanes = std::int64_t{reading.query_batch.count} * geometry.kv_heads;
  parallel_for_each(lanes, 1, [&](std::int64_t lane) {
    Lane(geometry, reading, static_cast<int>(lane / geometry.kv_heads),
         static_cast<int>(lane % geometry.kv_heads))
        .verify();
  });
}

}  // namespace cpu

}  // namespace kvtier::transfer
