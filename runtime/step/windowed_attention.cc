#include "runtime/step/windowed_attention.h"

#include "transfer/kv/row_checks.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace kvtier::runtime {
namespace {

constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();
/// Capacities of lists are multiples of it, so that what follows them is aligned.
constexpr std::int64_t kListUnit = 64;

/// Bytes of an entry of a list on the device.
std::size_t entry_bytes(const WindowedLaunch& launch) {
  const int biases = launch.biases.empty() ? 0 : launch.bias_heads;
  return sizeof(std::int32_t) + sizeof(std::uint16_t) +
         static_cast<std::size_t>(biases) * sizeof(float);
}

/// The tokens of one (query, KV head), ascending, and how many have been attended to.
struct List {
  transfer::AttendedSpans spans;
  std::span<const std::int32_t> ids;
  std::span<const std::uint16_t> masks;
  std::span<const float> biases;
  int sequence = 0;
  std::int64_t done = 0;

  [[nodiscard]] std::int64_t size() const {
    return spans.num_static() + static_cast<std::int64_t>(ids.size());
  }

  [[nodiscard]] std::int64_t token(std::int64_t i) const {
    if (i < spans.sink_end) return i;
    i -= spans.sink_end;
    const auto listed = static_cast<std::int64_t>(ids.size());
    if (i < listed) return ids[static_cast<std::size_t>(i)];
    return spans.tail_begin + i - listed;
  }

  /// Returns whether query head h of the group attends the token in bit h.
  [[nodiscard]] std::uint16_t mask(std::int64_t i) const {
    const std::int64_t listed = i - spans.sink_end;
    if (listed < 0 || listed >= static_cast<std::int64_t>(masks.size())) return 0xFFFF;
    return masks[static_cast<std::size_t>(listed)];
  }

  /// Writes what is added to the logits of the token, for each head that has its own.
  void write_bias(std::int64_t i, int heads, float* to) const {
    const std::int64_t listed = i - spans.sink_end;
    for (int h = 0; h < heads; ++h) {
      const std::int64_t at = listed * heads + h;
      const bool has = listed >= 0 && at < static_cast<std::int64_t>(biases.size());
      to[h] = has ? biases[static_cast<std::size_t>(at)] : 0.0F;
    }
  }

  /// How many of the next `most` tokens are before `end`.
  [[nodiscard]] std::int64_t before(std::int64_t end, std::int64_t most) const {
    std::int64_t low = done;
    std::int64_t high = std::min(size(), done + most);
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (token(middle) < end) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low - done;
  }
};

class WindowedAttention {
 public:
  WindowedAttention(transfer::Stream& stream, EngineState& engine, const WindowedLaunch& launch)
      : stream_(stream),
        engine_(engine),
        request_(launch.request),
        launch_(launch),
        memory_(engine.workspace.packed.data()),
        bytes_left_(engine.workspace.packed.bytes()) {
    request_.rule = {};
    request_.flags = nullptr;  // `count_rows` does
    request_.k_known = false;
    for (int r = 0; r < launch.request.query_batch.count; ++r) {
      request_.query_batch[r].dense_from = kEverything;
      for (int head = 0; head < launch.request.kv.kv_heads; ++head) {
        const transfer::QueryToken& query = launch.request.query_batch[r];
        const std::size_t i = lists_.size();
        const std::int64_t length =
            launch.counters[static_cast<std::size_t>(query.sequence)].length;
        List list{.spans = attended_spans(launch.request.rule, length, query),
                  .ids = {},
                  .masks = {},
                  .biases = {},
                  .sequence = query.sequence};
        if (!launch.ids.empty()) {
          list.ids = launch.ids[i];
          list.masks = launch.masks[i];
          if (!launch.biases.empty()) list.biases = launch.biases[i];
        }
        lists_.push_back(list);
      }
    }
    const std::size_t least =
        2 * results_bytes() + lists_.size() * (2 * kListUnit * entry_bytes(launch));
    if (bytes_left_ < least) {  // short sessions pack few rows
      own_ = engine.device->allocate(transfer::Space::kDevice, least);
      memory_ = own_.data();
      bytes_left_ = own_.bytes();
    }
    sum_ = take_results();
    part_ = take_results();
  }

  void attend(const std::function<std::size_t(std::span<const PageIndex>)>& hold) {
    count_rows();
    std::span<const PageIndex> left = launch_.pages;
    std::vector<std::int64_t> ends(launch_.counters.size());
    while (!left.empty()) {
      left = left.subspan(hold(left));
      for (std::size_t s = 0; s < ends.size(); ++s) {
        // Sequences follow one another; what is not in pages goes with the pages before it.
        const auto next = left.empty() ? ends.size() : static_cast<std::size_t>(left[0].sequence);
        ends[s] = s < next ? kEverything : 0;
        if (s == next) ends[s] = left[0].page * request_.kv.page_tokens;
      }
      attend_until(ends);
    }
    write(launch_.outputs);
    if (own_.bytes() > 0) engine_.submission.wait(stream_);
  }

 private:
  /// Results of all queries, contiguous.
  struct Results {
    float* out = nullptr;
    float* lse = nullptr;
  };

  [[nodiscard]] std::size_t results_bytes() const {
    const std::int64_t heads = std::int64_t{request_.query_batch.count} * request_.kv.query_heads();
    const std::int64_t floats =
        heads * request_.kv.head_dim + ceil_div(heads, kListUnit) * kListUnit;
    return static_cast<std::size_t>(floats) * sizeof(float);
  }

  [[nodiscard]] Results take_results() {
    Results results;
    results.out = reinterpret_cast<float*>(memory_);
    results.lse = results.out + std::int64_t{request_.query_batch.count} *
                                    request_.kv.query_heads() * request_.kv.head_dim;
    memory_ += results_bytes();
    bytes_left_ -= results_bytes();
    return results;
  }

  void count_rows() const {
    std::int64_t selected = 0, resident = 0, all = 0;
    for (const List& list : lists_) {
      const auto s = static_cast<std::size_t>(list.sequence);
      const std::int64_t begin = request_.kv.sink_capacity;
      const std::int64_t end =
          request_.kv.recent_capacity > 0 ? launch_.counters[s].resident_begin : kEverything;
      const std::int64_t in_pages = std::max<std::int64_t>(
          list.before(end, kEverything) - list.before(begin, kEverything), 0);
      selected += std::ssize(list.ids);
      all += list.size();
      resident += list.size() - in_pages;
    }
    transfer::cpu::count(launch_.request.flags, &transfer::StepFlags::rows_selected, selected);
    transfer::cpu::count(launch_.request.flags, &transfer::StepFlags::rows_resident, resident);
    transfer::cpu::count(launch_.request.flags, &transfer::StepFlags::rows_fetched_host,
                         all - resident);
  }

  /// Attends to what the lists have before these tokens, by sequence.
  void attend_until(std::span<const std::int64_t> ends) {
    while (true) {
      const transfer::SelectionView selection = next_lists(ends);
      if (selection.capacity == 0) return;
      launch(selection, begun_ ? part_ : sum_);
      if (begun_) {
        attention::MergeBatch both;
        both.push({sum_.out, sum_.lse});
        both.push({part_.out, part_.lse});
        attention::merge_results(
            stream_, both, std::int64_t{request_.query_batch.count} * request_.kv.query_heads(),
            request_.kv.head_dim, sum_.out, DType::kFloat32, sum_.lse);
      }
      begun_ = true;
      engine_.submission.wait(stream_);  // then the lists are written anew, and pages leave
    }
  }

  /// Writes the next tokens of every list for the device. Returns none when there are none.
  [[nodiscard]] transfer::SelectionView next_lists(std::span<const std::int64_t> ends) {
    const auto lists = static_cast<std::int64_t>(lists_.size());
    const auto room = static_cast<std::int64_t>(bytes_left_) - lists * 2 * kListUnit;
    const std::int64_t most =
        room / (lists * static_cast<std::int64_t>(entry_bytes(launch_))) / kListUnit * kListUnit;
    std::vector<std::int64_t> counts;
    std::int64_t longest = 0;
    for (const List& list : lists_) {
      counts.push_back(list.before(ends[static_cast<std::size_t>(list.sequence)], most));
      longest = std::max(longest, counts.back());
    }
    transfer::SelectionView selection;
    if (longest == 0) return selection;
    selection.capacity = ceil_div(longest, kListUnit) * kListUnit;

    const std::int64_t entries = lists * selection.capacity;
    const std::size_t bytes = static_cast<std::size_t>(entries) * entry_bytes(launch_) +
                              static_cast<std::size_t>(lists) * sizeof(std::int32_t);
    std::byte* const staged = engine_.workspace.read_back(bytes);
    // Of the widest elements first, so that all are aligned.
    const int bias_heads = launch_.biases.empty() ? 0 : launch_.bias_heads;
    auto* const biases = reinterpret_cast<float*>(staged);
    auto* const ids = reinterpret_cast<std::int32_t*>(biases + entries * bias_heads);
    auto* const list_counts = ids + entries;
    auto* const masks = reinterpret_cast<std::uint16_t*>(list_counts + lists);
    for (std::size_t i = 0; i < lists_.size(); ++i) {
      List& list = lists_[i];
      list_counts[i] = static_cast<std::int32_t>(counts[i]);
      const std::int64_t first = static_cast<std::int64_t>(i) * selection.capacity;
      for (std::int64_t j = 0; j < counts[i]; ++j, ++list.done) {
        ids[first + j] = static_cast<std::int32_t>(list.token(list.done));
        masks[first + j] = list.mask(list.done);
        list.write_bias(list.done, bias_heads, biases + (first + j) * bias_heads);
      }
    }
    const transfer::CopyRun run{memory_, staged, bytes};
    stream_.copy({&run, 1});
    if (bias_heads > 0) {
      selection.bias = reinterpret_cast<float*>(memory_);
      selection.bias_heads = bias_heads;
    }
    selection.ids = reinterpret_cast<std::int32_t*>(memory_) + entries * bias_heads;
    selection.counts = selection.ids + entries;
    selection.head_mask = reinterpret_cast<std::uint16_t*>(selection.counts + lists);
    return selection;
  }

  void launch(const transfer::SelectionView& selection, const Results& to) {
    if (engine_.kv.row_checks) {
      transfer::verify_rows(stream_, engine_.kv,
                            {.sequences = request_.sequences,
                             .flags = launch_.session_flags,
                             .query_batch = request_.query_batch,
                             .selection = selection,
                             .rule = request_.rule,
                             .frames = engine_.pools.frame_checks});
    }
    attention::OutputBatch outputs;
    const std::int64_t heads = request_.kv.query_heads();
    for (std::int64_t r = 0; r < request_.query_batch.count; ++r) {
      outputs.push({.out = to.out + r * heads * request_.kv.head_dim,
                    .dtype = DType::kFloat32,
                    .head_stride = request_.kv.head_dim,
                    .lse = to.lse + r * heads,
                    .lse_stride = 1});
    }
    engine_.workspace.flash.attend(stream_, request_, selection, selection.capacity, outputs);
  }

  void write(const attention::OutputBatch& outputs) {
    const std::int64_t heads = request_.kv.query_heads();
    const std::int64_t head_dim = request_.kv.head_dim;
    for (int r = 0; r < outputs.count; ++r) {
      const attention::OutputItem& item = outputs[r];
      const bool contiguous =
          item.head_stride == head_dim && (item.lse == nullptr || item.lse_stride == 1);
      const std::int64_t step = contiguous ? heads : 1;
      for (std::int64_t head = 0; head < heads; head += step) {
        const std::int64_t from = r * heads + head;
        attention::MergeBatch one;
        one.push({sum_.out + from * head_dim, sum_.lse + from});
        auto* const out =
            static_cast<std::byte*>(item.out) +
            static_cast<std::size_t>(head * item.head_stride) * dtype_bytes(item.dtype);
        attention::merge_results(stream_, one, step, request_.kv.head_dim, out, item.dtype,
                                 item.lse == nullptr ? nullptr : item.lse + head * item.lse_stride);
      }
    }
  }

  transfer::Stream& stream_;
  EngineState& engine_;
  attention::AttendRequest request_;  ///< Of which nothing is attended to but lists.
  const WindowedLaunch& launch_;
  std::vector<List> lists_;
  transfer::Buffer own_;  ///< Where an append's memory is too small.
  std::byte* memory_;     ///< What is left on the device.
  std::size_t bytes_left_;
  Results sum_, part_;
  bool begun_ = false;  ///< `sum_` has results.
};

}  // namespace

void attend_in_windows(transfer::Stream& stream, EngineState& engine, const WindowedLaunch& launch,
                       const std::function<std::size_t(std::span<const PageIndex>)>& hold) {
  WindowedAttention(stream, engine, launch).attend(hold);
}

}  // namespace kvtier::runtime
