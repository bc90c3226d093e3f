#include "services/tools/top/top_frame.h"

#include "tests/services/metrics/exposition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvtier::services {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

/// What a server might tell, after `scale` times the work.
MetricsReading reading(int scale) {
  const auto times = [scale](int value) { return std::to_string(scale * value) + "\n"; };
  return read_exposition(
      "kvtier_server_state{state=\"serving\"} 1\nkvtier_server_state{state=\"draining\"} 0\n"
      "kvtier_build_info{version=\"1.2.3\"} 1\nkvtier_sessions 3\nkvtier_models 1\n"
      "kvtier_rpc_message_bytes_sum{method=\"A/Decode\",direction=\"received\"} " +
      times(1000000) + "kvtier_data_bytes_total{direction=\"read\"} " + times(2000000) +
      "kvtier_shm_tensor_bytes_total{direction=\"read\"} " + times(5000000) +
      "kvtier_shm_tensor_bytes_total{direction=\"write\"} " + times(6000) +
      "kvtier_operations_total " + times(4000) + "kvtier_rows_total{result=\"selected\"} " +
      times(75) + "kvtier_rows_total{result=\"always\"} " + times(25) +
      "kvtier_row_read_bytes_total{source=\"host\"} " + times(250000000) +
      "kvtier_tier_capacity_bytes{tier=\"engine_host\"} 4194304\n"
      "kvtier_tier_used_bytes{tier=\"engine_host\"} 1048576\n"
      "kvtier_tier_capacity_bytes{tier=\"engine_file\"} 8388608\n"
      "kvtier_tier_used_bytes{tier=\"engine_file\"} 2097152\n"
      "kvtier_tier_gets_total{tier=\"engine_file\"} 400\n"
      "kvtier_pages_restored_total{tier=\"engine_file\"} 300\n"
      "kvtier_checksum_failures_total{tier=\"engine_file\"} 3\n"
      "kvtier_tier_errors_total{tier=\"engine_file\",op=\"get\",kind=\"miss\"} 90\n"
      "kvtier_tier_errors_total{tier=\"engine_file\",op=\"get\",kind=\"timeout\"} 7\n"
      "kvtier_tier_gets_total{tier=\"engine_memcached\"} 100\n"
      "kvtier_pages_restored_total{tier=\"engine_memcached\"} 50\n"
      "kvtier_checksum_failures_total{tier=\"engine_memcached\"} 0\n"
      "kvtier_tier_circuit_state{tier=\"engine_memcached\",state=\"closed\"} 2\n"
      "kvtier_tier_circuit_state{tier=\"engine_memcached\",state=\"open\"} 1\n"
      "kvtier_operation_seconds_bucket{method=\"A/Decode\",le=\"0.0001\"} " +
      times(90) + "kvtier_operation_seconds_bucket{method=\"A/Decode\",le=\"0.0256\"} " +
      times(98) + "kvtier_operation_seconds_bucket{method=\"A/Decode\",le=\"+Inf\"} " + times(100) +
      "kvtier_operation_seconds_count{method=\"A/Decode\"} " + times(100) +
      "kvtier_operation_seconds_count{method=\"A/Never\"} 0\n"
      "kvtier_rpc_requests_total{method=\"A/Decode\",code=\"OK\"} " +
      times(6) + "kvtier_rpc_requests_total{method=\"A/Decode\",code=\"INTERNAL\"} " + times(2) +
      "kvtier_rpc_inflight{method=\"A/Decode\"} 5\n"
      "kvtier_tenant_used_bytes{tenant=\"alpha\"} 1024\nkvtier_tenant_sessions{tenant=\"alpha\"} "
      "3\n"
      "kvtier_tenant_quota_bytes{tenant=\"alpha\"} 1125899906842624\n");
}

TEST(TopFrame, ShowsRatesQuantilesAndShares) {
  const MetricsReading before = reading(1);
  const MetricsReading now = reading(2);

  const auto lines = top_frame({before, now, 2.0}, {.columns = 120});

  EXPECT_THAT(lines.front(), HasSubstr("kvtier 1.2.3  serving"));
  EXPECT_THAT(lines.front(), HasSubstr("sessions 3"));
  EXPECT_THAT(lines, Contains(HasSubstr("operations 2k/s")));
  EXPECT_THAT(lines, Contains(HasSubstr("received 4 MB/s  sent 3 kB/s")));
  EXPECT_THAT(lines, Contains(HasSubstr("rows read 125 MB/s  selected 75.0 %")));
  EXPECT_THAT(lines, Contains(HasSubstr("1 MiB  4 MiB  25.0 %  [#####...............]")));
  EXPECT_THAT(
      lines,
      Contains(::testing::MatchesRegex("engine_file +2 MiB +8 MiB +25\\.0 % .* 75\\.0 % +10 +-")));
  EXPECT_THAT(
      lines, Contains(::testing::MatchesRegex("engine_memcached +- +- +- .* 50\\.0 % +0 +1 of 3")));
  EXPECT_THAT(lines, Contains(::testing::MatchesRegex("Decode +50 +100 us +> 6\\.6 s +1 +5 +200")));
  EXPECT_THAT(lines, Contains(::testing::MatchesRegex("alpha +3 +1 KiB +none +0")));
  EXPECT_THAT(lines, Each(Not(HasSubstr("Never"))));
  EXPECT_THAT(lines, Each(Not(HasSubstr("\033"))));
}

TEST(TopFrame, ShowsTheRowCacheAndPrefixesWhereThereAreAny) {
  const MetricsReading without = reading(1);
  const MetricsReading with = read_exposition(
      "kvtier_tier_capacity_bytes{tier=\"engine_row_cache\"} 1048576\n"
      "kvtier_tier_used_bytes{tier=\"engine_row_cache\"} 524288\n"
      "kvtier_row_cache_rows_total{event=\"hit\"} 80\nkvtier_row_cache_rows_total{event=\"miss\"} "
      "20\n"
      "kvtier_row_cache_rows_total{event=\"admission\"} 15\n"
      "kvtier_prefix_tokens_total{event=\"asked\"} 400\n"
      "kvtier_prefix_tokens_total{event=\"attached\"} 100\n");

  const auto lines = top_frame({with, with, 1.0}, {.columns = 120});

  EXPECT_THAT(lines, Contains(::testing::MatchesRegex(
                         "engine_row_cache +512 KiB +1 MiB +50\\.0 % .* 80\\.0 % +- +-")));
  EXPECT_THAT(lines, Contains("prefix tokens found 25.0 %"));
  EXPECT_THAT(top_frame({without, without, 1.0}, {}), Each(Not(HasSubstr("prefix"))));
}

TEST(TopFrame, RatesAreUnknownBeforeTwoReadingsAndAfterARestart) {
  const MetricsReading full = reading(2);
  const MetricsReading restarted = reading(1);
  EXPECT_THAT(top_frame({full, full, 0.0}, {}), Contains(HasSubstr("operations -/s")));
  EXPECT_THAT(top_frame({full, restarted, 1.0}, {}), Contains(HasSubstr("operations -/s")));
}

TEST(TopFrame, FitsTheTerminal) {
  const MetricsReading now = reading(1);
  for (const std::size_t columns : {1U, 20U, 79U}) {
    EXPECT_THAT(top_frame({now, now, 1.0}, {.columns = columns}),
                Each(SizeIs(::testing::Le(columns))));
  }
  EXPECT_THAT(top_frame({now, now, 1.0}, {.rows = 5}), SizeIs(5));
  EXPECT_THAT(top_frame({{}, {}, 1.0}, {}).front(), HasSubstr("unknown"));
}

TEST(TopFrame, ColorsAreEscapesAroundWholeLines) {
  const MetricsReading now = reading(1);
  const auto lines = top_frame({now, now, 1.0}, {.columns = 10, .color = true});
  EXPECT_EQ(lines.front(), "\033[1;32mkvtier 1.2\033[0m");
}

TEST(TopFrame, ShowsNothingThatATerminalObeys) {
  const MetricsReading hostile = read_exposition(
      "kvtier_server_state{state=\"\x1b]0;pwned\x07\"} 1\n"
      "kvtier_tenant_used_bytes{tenant=\"\x1b[31m\\nx\xc2\x9b\"} 1\n");
  const std::vector<std::string> lines =
      top_frame({.before = hostile, .now = hostile, .seconds = 1}, {.color = false});
  EXPECT_THAT(lines, Contains(HasSubstr("?]0;pwned?")));
  EXPECT_THAT(lines, Contains(HasSubstr("?[31m?x??")));
  for (const std::string& line : lines) {
    for (const char c : line) EXPECT_TRUE(c >= 0x20 && c <= 0x7E) << line;
  }
}

}  // namespace
}  // namespace kvtier::services
