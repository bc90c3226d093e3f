#include "services/tools/stress/progress.h"

#include "services/console/text.h"

#include <algorithm>

namespace kvtier::services {
namespace {

constexpr int kBarWidth = 30;
constexpr auto kBarInterval = std::chrono::milliseconds(100);

/// `rate`: of what `progress` counts, per second.
std::string describe(const StressProgress& progress, double rate) {
  const double left = rate > 0.0 ? (progress.total - progress.done) / rate : 0.0;
  std::string text = progress.bytes ? format("%.0f %%", 100.0 * progress.done / progress.total)
                                    : format("step %.0f of %.0f", progress.done, progress.total);
  if (rate > 0.0 && left > 0.0) {
    text += format(progress.bytes ? ", %.2f GB/s, %.0f s left" : ", %.2f steps/s, %.0f s left",
                   progress.bytes ? rate / 1e9 : rate, left);
  }
  return text;
}

}  // namespace

void ProgressWriter::show(const StressProgress& progress, Clock::time_point now) {
  if (progress.total <= 0.0) return;
  const bool begins = phase_ != progress.phase;
  if (begins) {
    finish();
    phase_ = progress.phase;
    start_ = now;
    done_at_start_ = progress.done;
    tenth_ = -1;
  }
  const double share = std::min(progress.done / progress.total, 1.0);
  const bool ends = progress.done >= progress.total;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const std::string text =
      describe(progress, seconds > 0.0 ? (progress.done - done_at_start_) / seconds : 0.0);
  if (terminal_) {
    if (!begins && !ends && now - shown_at_ < kBarInterval) return;
    shown_at_ = now;
    const auto filled = static_cast<std::size_t>(share * kBarWidth);
    err_ << '\r' << phase_ << " [" << std::string(filled, '#')
         << std::string(kBarWidth - filled, ' ') << "] " << text << "   " << std::flush;
    open_ = true;
    if (ends) finish();
    return;
  }
  const int tenth = static_cast<int>(share * 10.0);
  if (tenth == tenth_) return;
  tenth_ = tenth;
  err_ << phase_ << ": " << text << std::endl;
}

void ProgressWriter::finish() {
  if (open_) err_ << std::endl;
  open_ = false;
}

}  // namespace kvtier::services
