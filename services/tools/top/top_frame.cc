#include "services/tools/top/top_frame.h"

#include "services/console/text.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>

namespace kvtier::services {
namespace {

using LabelSet = MetricsReading::LabelSet;
using Row = std::vector<std::string>;
using Number = std::optional<double>;

constexpr const char* kNone = "-";

std::string scaled(Number value, double base, const std::vector<const char*>& units) {
  if (!value) return kNone;
  std::size_t unit = 0;
  double left = *value;
  while (left >= base && unit + 1 < units.size()) {
    left /= base;
    ++unit;
  }
  const int digits = left >= 100 || left == std::floor(left) ? 0 : left >= 10 ? 1 : 2;
  return format("%.*f%s", digits, left, units[unit]);
}
std::string bytes(Number value) {
  return scaled(value, 1024, {" B", " KiB", " MiB", " GiB", " TiB"});
}
std::string byte_rate(Number value) {
  return scaled(value, 1000, {" B/s", " kB/s", " MB/s", " GB/s"});
}
std::string count(Number value) { return scaled(value, 1000, {"", "k", "M", "G"}); }
std::string duration(Number seconds) {
  if (!seconds) return kNone;
  if (std::isinf(*seconds)) return "> 6.6 s";
  return scaled(*seconds * 1e6, 1000, {" us", " ms", " s"});
}
std::string share(double part, double whole) {
  return whole <= 0 ? kNone : format("%.1f %%", 100 * part / whole);
}
std::string uptime(double seconds) {
  const auto s = static_cast<long>(std::max(0.0, seconds));
  const std::string all =
      format("%ld d %02ld:%02ld:%02ld", s / 86400, s / 3600 % 24, s / 60 % 60, s % 60);
  return all.starts_with("0 d ") ? all.substr(4) : all;
}
std::string bar(double part, double whole) {
  constexpr std::size_t kWidth = 20;
  const double filled = whole > 0 ? std::clamp(part / whole, 0.0, 1.0) * kWidth : 0;
  std::string text(static_cast<std::size_t>(std::lround(filled)), '#');
  text.resize(kWidth, '.');
  return '[' + text + ']';
}

class Frame {
 public:
  Frame(const TopInterval& interval, const FrameStyle& style) : in_(interval), style_(style) {}

  std::vector<std::string> draw() {
    head();
    traffic();
    tiers();
    methods();
    tenants();
    if (style_.rows > 0 && lines_.size() > style_.rows) lines_.resize(style_.rows);
    return std::move(lines_);
  }

 private:
  [[nodiscard]] double sum(const std::string& name, const LabelSet& labels = {}) const {
    return in_.now.sum(name, labels);
  }
  /// Growth per second; nothing before there are two readings, or after a restart of the server.
  [[nodiscard]] Number rate(const std::string& name, const LabelSet& labels = {}) const {
    const double grown = sum(name, labels) - in_.before.sum(name, labels);
    if (in_.seconds <= 0 || grown < 0) return std::nullopt;
    return grown / in_.seconds;
  }
  void line(const std::string& text, const char* color = "") {
    std::string shown = text.substr(0, style_.columns);
    // Names come from elsewhere; a terminal must find nothing in them to obey.
    std::ranges::replace_if(
        shown, [](unsigned char c) { return c < 0x20 || c > 0x7E; }, '?');
    if (style_.color && *color != '\0')
      shown = std::string("\033[") + color + "m" + shown + "\033[0m";
    lines_.push_back(std::move(shown));
  }
  /// Of `rows` the first has the titles.
  void table(const std::vector<Row>& rows) {
    if (rows.size() == 1) return;
    const std::vector<std::string> lines = aligned(rows, 1);
    line("");
    line(lines.front(), "1");
    for (std::size_t i = 1; i < lines.size(); ++i) line(lines[i]);
  }

  void head() {
    std::string state = "unknown";
    for (const std::string& name : in_.now.values("kvtier_server_state", "state")) {
      if (sum("kvtier_server_state", {{"state", name}}) == 1) state = name;
    }
    const std::vector<std::string> versions = in_.now.values("kvtier_build_info", "version");
    line("kvtier " + (versions.empty() ? std::string("?") : versions.front()) + "  " + state +
             "  up " +
             uptime(static_cast<double>(std::time(nullptr)) - sum("process_start_time_seconds")) +
             "  sessions " + count(sum("kvtier_sessions")) + "  models " +
             count(sum("kvtier_models")),
         state == "serving" ? "1;32" : "1;31");
  }
  void traffic() {
    const Number rows = rate("kvtier_rows_total");
    const Number selected = rate("kvtier_rows_total", {{"result", "selected"}});
    line("operations " + count(rate("kvtier_operations_total")) + "/s  refused " +
         count(rate("kvtier_admission_rejected_total")) + "/s  received " +
         byte_rate(moved("received", "read")) + "  sent " + byte_rate(moved("sent", "write")));
    line("rows read " + byte_rate(rate("kvtier_row_read_bytes_total")) + "  selected " +
         share(selected.value_or(0), rows.value_or(0)) + "  sketches read " +
         byte_rate(rate("kvtier_sketch_read_bytes_total")) + "  tokens " +
         count(rate("kvtier_tokens_appended_total")) + "/s");
    line("memory " + bytes(sum("process_resident_memory_bytes")) + " of " +
         bytes(sum("kvtier_memory_budget_bytes")) + "  in flight " +
         bytes(sum("kvtier_inflight_bytes")) + "  files " + count(sum("process_open_fds")) +
         " of " + count(sum("process_max_fds")));
    prefixes();
  }
  /// Bytes over gRPC, over the data plane and through memory that is shared with clients.
  [[nodiscard]] Number moved(const char* by_grpc, const char* direction) const {
    const Number messages = rate("kvtier_rpc_message_bytes_sum", {{"direction", by_grpc}});
    if (!messages) return messages;
    return *messages + rate("kvtier_data_bytes_total", {{"direction", direction}}).value_or(0) +
           rate("kvtier_shm_tensor_bytes_total", {{"direction", direction}}).value_or(0);
  }
  /// The share of tokens that stored prefixes had, where any were asked for.
  void prefixes() {
    const double asked = sum("kvtier_prefix_tokens_total", {{"event", "asked"}});
    if (asked == 0) return;
    line("prefix tokens found " +
         share(sum("kvtier_prefix_tokens_total", {{"event", "attached"}}), asked));
  }
  void tiers() {
    std::vector<Row> rows{
        {"TIER", "USED", "OF", "SHARE", "", "READ", "WRITTEN", "HITS", "FAULTS", "OPEN"}};
    std::vector<std::string> tiers = in_.now.values("kvtier_tier_capacity_bytes", "tier");
    for (const std::string& tier : in_.now.values("kvtier_tier_gets_total", "tier")) {
      if (std::find(tiers.begin(), tiers.end(), tier) == tiers.end()) tiers.push_back(tier);
    }
    for (const std::string& tier : tiers) {
      const double used = sum("kvtier_tier_used_bytes", {{"tier", tier}});
      const double all = sum("kvtier_tier_capacity_bytes", {{"tier", tier}});
      const auto moved = [&](const std::string& name) {
        const auto known = in_.now.values(name, "tier");
        const bool has = std::find(known.begin(), known.end(), tier) != known.end();
        return has ? byte_rate(rate(name, {{"tier", tier}})) : kNone;
      };
      rows.push_back({tier, all > 0 ? bytes(used) : kNone, all > 0 ? bytes(all) : kNone,
                      share(used, all), bar(used, all), moved("kvtier_tier_read_bytes_total"),
                      moved("kvtier_tier_write_bytes_total"), hits(tier), faults(tier),
                      open_servers(tier)});
    }
    table(rows);
  }
  [[nodiscard]] std::string hits(const std::string& tier) const {
    if (tier == "pages") {
      return share(sum("kvtier_lookup_pages_total", {{"result", "hit_pages"}}),
                   sum("kvtier_lookup_pages_total"));
    }
    if (tier == "engine_row_cache") {
      const double found = sum("kvtier_row_cache_rows_total", {{"event", "hit"}});
      return share(found, found + sum("kvtier_row_cache_rows_total", {{"event", "miss"}}));
    }
    return share(sum("kvtier_pages_restored_total", {{"tier", tier}}),
                 sum("kvtier_tier_gets_total", {{"tier", tier}}));
  }
  /// Pages found changed, not given in time, or not taken.
  [[nodiscard]] std::string faults(const std::string& tier) const {
    const auto known = in_.now.values("kvtier_checksum_failures_total", "tier");
    if (std::find(known.begin(), known.end(), tier) == known.end()) return kNone;
    return count(sum("kvtier_checksum_failures_total", {{"tier", tier}}) +
                 sum("kvtier_tier_errors_total", {{"tier", tier}}) -
                 sum("kvtier_tier_errors_total", {{"tier", tier}, {"kind", "miss"}}));
  }
  /// Servers to which nothing is sent, of all that the tier has.
  [[nodiscard]] std::string open_servers(const std::string& tier) const {
    const double all = sum("kvtier_tier_circuit_state", {{"tier", tier}});
    if (all == 0) return kNone;
    return count(sum("kvtier_tier_circuit_state", {{"tier", tier}, {"state", "open"}})) + " of " +
           count(all);
  }
  void methods() {
    const std::string name = "kvtier_operation_seconds";
    std::vector<Row> rows{{"METHOD", "/S", "P50 <=", "P99 <=", "FAILED/S", "IN FLIGHT", "TOTAL"}};
    for (const std::string& method : in_.now.values(name + "_count", "method")) {
      const LabelSet labels{{"method", method}};
      if (sum(name + "_count", labels) == 0) continue;
      const Number all = rate("kvtier_rpc_requests_total", labels);
      const Number good = rate("kvtier_rpc_requests_total", {{"method", method}, {"code", "OK"}});
      rows.push_back({method.substr(method.find('/') + 1), count(rate(name + "_count", labels)),
                      duration(in_.now.quantile(in_.before, name, labels, 0.5)),
                      duration(in_.now.quantile(in_.before, name, labels, 0.99)),
                      count(all && good ? Number(*all - *good) : std::nullopt),
                      count(sum("kvtier_rpc_inflight", labels)),
                      count(sum(name + "_count", labels))});
    }
    table(rows);
  }
  void tenants() {
    constexpr double kNoQuota = 1125899906842624.0;  // the default of TenantLimits
    std::vector<Row> rows{{"TENANT", "SESSIONS", "USED", "QUOTA", "REFUSED"}};
    for (const std::string& tenant : in_.now.values("kvtier_tenant_used_bytes", "tenant")) {
      const LabelSet labels{{"tenant", tenant}};
      const double quota = sum("kvtier_tenant_quota_bytes", labels);
      rows.push_back({tenant, count(sum("kvtier_tenant_sessions", labels)),
                      bytes(sum("kvtier_tenant_used_bytes", labels)),
                      quota >= kNoQuota ? "none" : bytes(quota),
                      count(sum("kvtier_tenant_rejected_total", labels))});
    }
    table(rows);
  }

  const TopInterval& in_;
  const FrameStyle& style_;
  std::vector<std::string> lines_;
};

}  // namespace

std::vector<std::string> top_frame(const TopInterval& interval, const FrameStyle& style) {
  return Frame(interval, style).draw();
}

}  // namespace kvtier::services
