#include "services/core/group_memory.h"

#include "services/page_cache/tenant_pages.h"
#include "tests/services/core/core_fixture.h"

#include <filesystem>
#include <fstream>
#include <stdlib.h>

namespace kvtier::services {
namespace {

namespace fs = std::filesystem;

/// Files as the kernel has them, of a tree of groups.
class GroupMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "kvtier-XXXXXX";
    files_.root = ::mkdtemp(pattern.data());
    files_.membership = files_.root / "self";
  }
  void TearDown() override { fs::remove_all(files_.root); }

  void write(const fs::path& file, const std::string& text) {
    fs::create_directories((files_.root / file).parent_path());
    std::ofstream(files_.root / file) << text << '\n';
  }
  void write_group(const fs::path& group, const std::string& limit, const std::string& used,
                   const std::string& cached = "0") {
    write(group / "memory.max", limit);
    write(group / "memory.current", used);
    write(group / "memory.stat", "anon 5\ninactive_file " + cached + "\nactive_file 7");
  }
  /// "used of limit" of each group, or "none".
  std::string seen() {
    std::string text;
    for (const GroupMemory& memory : read_group_memory(files_)) {
      text += (text.empty() ? "" : ", ") + std::to_string(memory.used) + " of " +
              std::to_string(memory.limit);
    }
    return text.empty() ? "none" : text;
  }

  GroupFiles files_;
};

TEST_F(GroupMemoryTest, IsThatOfAllGroupsAroundThatHaveALimit) {
  write("self", "0::/a/b");
  write_group("a/b", "1000", "100");
  EXPECT_EQ(seen(), "100 of 1000");
  write_group("a", "5000", "4500");
  EXPECT_EQ(seen(), "100 of 1000, 4500 of 5000");
  write_group("a", "max", "4500");
  EXPECT_EQ(seen(), "100 of 1000");
  write_group("a/b", "max", "100");
  EXPECT_EQ(seen(), "none");
  write_group("", "200", "90");  // a container's own, seen as the root
  EXPECT_EQ(seen(), "90 of 200");
}

TEST_F(GroupMemoryTest, IsShortWhereOneGroupAroundIsWhateverRoomItHas) {
  const auto mebibytes = [](std::uint64_t count) { return std::to_string(count << 20); };
  write("self", "0::/a/b");
  write_group("a/b", mebibytes(4096), mebibytes(1024));  // has less room than the one around
  TimePoint now;
  MemoryRoom room([this] { return read_group_memory(files_); },
                  [&now] { return now += MemoryRoom::kRefusalTime; });
  write_group("a", mebibytes(65536), mebibytes(62362));  // 95.2 %
  EXPECT_FALSE(room.has(MemoryUse::kPages, 0));
  EXPECT_FALSE(room.has(MemoryUse::kSessions, 0));
  write_group("a", mebibytes(65536), mebibytes(61604));  // 94 %
  EXPECT_FALSE(room.has(MemoryUse::kPages, 0));
  EXPECT_TRUE(room.has(MemoryUse::kSessions, 0));
  write_group("a", mebibytes(65536), mebibytes(32768));
  EXPECT_TRUE(room.has(MemoryUse::kPages, std::uint64_t{2662} << 20));
  EXPECT_FALSE(room.has(MemoryUse::kPages, std::uint64_t{2663} << 20)) << "90 % of its own group";
}

TEST_F(GroupMemoryTest, CountsNoCachedFilesThatAreNotInUse) {
  write("self", "0::/");
  write_group("", "1000", "990", "300");
  EXPECT_EQ(seen(), "690 of 1000");
  write_group("", "1000", "990", "2000");  // read a moment later
  EXPECT_EQ(seen(), "0 of 1000");
}

TEST_F(GroupMemoryTest, IsReadInVersion1) {
  write("self", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/y");
  write("memory/x/memory.limit_in_bytes", "1000");
  write("memory/x/memory.usage_in_bytes", "800");
  write("memory/x/memory.stat", "cache 5\ntotal_inactive_file 100");
  EXPECT_EQ(seen(), "700 of 1000");
  write("memory/x/memory.limit_in_bytes", "9223372036854771712");  // none
  EXPECT_EQ(seen(), "none");
}

TEST_F(GroupMemoryTest, IsNoneWhereTheKernelTellsNothing) {
  EXPECT_EQ(seen(), "none");
  write("self", "nonsense\n\n0::");
  EXPECT_EQ(seen(), "none");
  write_group("", "lots", "100");
  EXPECT_EQ(seen(), "none");
}

TEST(MemoryRoom, IsLeftForSessionsWherePagesFindNoneAnyMore) {
  std::vector<GroupMemory> groups;
  TimePoint now;
  MemoryRoom room([&] { return groups; }, [&now] { return now += MemoryRoom::kRefusalTime; });
  EXPECT_TRUE(room.has(MemoryUse::kPages, std::uint64_t{1} << 50));
  groups = {{.used = 900, .limit = 1000}};
  EXPECT_TRUE(room.has(MemoryUse::kPages, 0));
  EXPECT_FALSE(room.has(MemoryUse::kPages, 1));
  EXPECT_TRUE(room.has(MemoryUse::kSessions, 50));
  EXPECT_FALSE(room.has(MemoryUse::kSessions, 51));
  groups = {{.used = 2000, .limit = 1000}};
  EXPECT_FALSE(room.has(MemoryUse::kSessions, 0));
  EXPECT_TRUE(MemoryRoom().has(MemoryUse::kPages, std::uint64_t{1} << 50));
}

TEST(MemoryRoom, IsNotLookedForAgainRightAfterARefusal) {
  std::uint64_t used = 900;
  int num_read = 0;
  TimePoint now{std::chrono::hours(1)};
  MemoryRoom room(
      [&] {
        ++num_read;
        return std::vector{GroupMemory{.used = used, .limit = 1000}};
      },
      [&now] { return now; });
  EXPECT_TRUE(room.has(MemoryUse::kPages, 0));
  EXPECT_TRUE(room.has(MemoryUse::kPages, 0));
  EXPECT_EQ(num_read, 2) << "what is granted is taken, and counts at once";
  EXPECT_FALSE(room.has(MemoryUse::kPages, 10));
  EXPECT_EQ(num_read, 3);
  used = 0;
  now += MemoryRoom::kRefusalTime - std::chrono::nanoseconds(1);
  EXPECT_FALSE(room.has(MemoryUse::kPages, 10));
  EXPECT_FALSE(room.has(MemoryUse::kPages, 11));
  EXPECT_EQ(num_read, 3);
  EXPECT_TRUE(room.has(MemoryUse::kPages, 9)) << "less was not refused";
  EXPECT_TRUE(room.has(MemoryUse::kSessions, 10)) << "nor was it to sessions";
  EXPECT_EQ(num_read, 5);
  now += std::chrono::nanoseconds(1);
  EXPECT_TRUE(room.has(MemoryUse::kPages, 10));
  EXPECT_EQ(num_read, 6);
}

/// A core in a control group whose use the test sets.
class CoreMemoryTest : public testing::CoreTest {
 protected:
  static constexpr std::int64_t kPageBytes = 4096;
  static constexpr std::uint64_t kLimit = std::uint64_t{1} << 30;

  void SetUp() override {
    ServiceCoreOptions options = testing::small_options();
    options.pages.extent_bytes = 4 * kPageBytes;
    options.pages.arena_bytes = 16 * kPageBytes;
    options.pages.prefault_bytes_per_sweep = 0;
    options.group_memory = [this] {
      return std::vector{GroupMemory{.used = used_, .limit = kLimit}};
    };
    make_core(std::move(options));
    lease_ = core_->pages().open(tenant(), {.model = "m", .page_bytes = kPageBytes},
                                 executor_.make_strand());
  }
  std::string put(int seed) {
    const std::vector<std::byte> bytes(static_cast<std::size_t>(kPageBytes),
                                       static_cast<std::byte>(seed));
    const PageInfo page = lease_->pages.reserve(*lease_, {.hash = std::to_string(seed)});
    return lease_->pages.commit(*lease_, page.handle, bytes).handle;
  }
  std::string reason_of_creation() {
    v1::CreateSessionResponse response;
    return create(create_request(), response).reason();
  }

  std::uint64_t used_ = 0;
  int num_asked_ = 0;
  std::shared_ptr<PageLease> lease_;
};

TEST_F(CoreMemoryTest, PagesMakeRoomForEachOtherWhenTheGroupIsShort) {
  std::vector<std::string> handles;
  for (int i = 0; i < 4; ++i) handles.push_back(put(i));
  used_ = kLimit / 10 * 9;
  put(4);
  EXPECT_EQ(core_->pages().stats().pages_evicted, 1U) << "three quarters of the arena are unused";
  EXPECT_EQ(core_->pages().stats().committed_pages, 4U);
  for (std::size_t i = 1; i < 4; ++i) lease_->pages.pin(*lease_, handles[i]);
  lease_->pages.pin(*lease_, lease_->pages.reserve(*lease_, {.hash = "4"}).handle);
  try {
    put(5);
    FAIL() << "expected a refusal";
  } catch (const ServiceError& error) {
    EXPECT_EQ(error.reason(), "PAGES_FULL");
  }
  EXPECT_EQ(core_->pages().stats().pages_evicted, 1U);
  used_ = 0;
  now_ += MemoryRoom::kRefusalTime;
  put(5);
  EXPECT_EQ(core_->pages().stats().committed_pages, 5U);
}

TEST_F(CoreMemoryTest, NoneIsTakenAheadOfItsUseWhenTheGroupIsShort) {
  ServiceCoreOptions options = testing::small_options();
  options.pages.arena_bytes = std::int64_t{64} << 20;
  options.group_memory = [this] {
    ++num_asked_;
    return std::vector{GroupMemory{.used = kLimit, .limit = kLimit}};
  };
  lease_.reset();
  make_core(std::move(options));
  lease_ = core_->pages().open(tenant(), {.model = "m", .page_bytes = kPageBytes},
                               executor_.make_strand());
  core_->sweep();
  EXPECT_EQ(num_asked_, 2) << "for sessions and for the next piece of the arena, not for each";
}

TEST_F(CoreMemoryTest, SessionsAreRefusedAndThoseThatThereAreGoOn) {
  const std::string session = open();
  used_ = kLimit / 100 * 96;
  core_->sweep();
  EXPECT_EQ(reason_of_creation(), "OUT_OF_MEMORY");
  v1::ForkSessionRequest fork;
  fork.set_name(session);
  fork.set_count(1);
  v1::ForkSessionResponse forked;
  testing::Ending ending;
  core_->run(call(), fork, forked, ending.listener());
  executor_.run_all();
  EXPECT_EQ(ending.reason(), "OUT_OF_MEMORY");
  EXPECT_EQ(core_->num_sessions(), 1U);
  EXPECT_EQ(append(session, testing::append_request(0, 10, 1)).reason(), "OK");
  used_ = kLimit / 100 * 94;
  now_ += MemoryRoom::kRefusalTime;
  core_->sweep();
  EXPECT_EQ(reason_of_creation(), "OK");
  EXPECT_EQ(core_->num_sessions(), 2U);
}

}  // namespace
}  // namespace kvtier::services
