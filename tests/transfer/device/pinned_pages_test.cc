#include "transfer/device/pinned_pages.h"

#include "kvtier/error.h"

#include "support/no_threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace kvtier::transfer {
namespace {

using ::testing::HasSubstr;

/// Keeps a list of what is pinned; refuses the n-th chunk.
class ListPinner final : public Pinner {
 public:
  explicit ListPinner(std::size_t refused = ~std::size_t{0}) : refused_(refused) {}

  [[nodiscard]] bool pin(std::byte* data, std::size_t bytes, std::string& why_not) override {
    if (chunks.size() == refused_) {
      why_not = "no more of it";
      return false;
    }
    for (std::size_t i = 0; i < bytes; i += 4096) touched &= data[i] == std::byte{0};
    chunks.emplace_back(data, bytes);
    return true;
  }
  void unpin(std::byte* data) noexcept override { unpinned.push_back(data); }

  std::vector<std::pair<std::byte*, std::size_t>> chunks;
  std::vector<std::byte*> unpinned;
  bool touched = true;

 private:
  std::size_t refused_;
};

/// Returns whether the process has a page at `address`.
bool is_mapped(std::byte* address) {
  unsigned char resident = 0;
  return mincore(address, 4096, &resident) == 0 || errno != ENOMEM;
}

void expect_all_given_back(const ListPinner& pinner) {
  ASSERT_FALSE(pinner.chunks.empty());
  EXPECT_EQ(pinner.unpinned.size(), pinner.chunks.size());
  for (std::size_t i = 0; i < pinner.unpinned.size(); ++i) {
    EXPECT_EQ(pinner.unpinned[i], pinner.chunks[i].first);
    EXPECT_FALSE(is_mapped(pinner.chunks[i].first));
  }
}

// More than a chunk, so that there are at least two.
constexpr std::size_t kTwoChunks = kPinChunk + 5 * MiB + 17;

TEST(PinnedPages, ArePinnedInChunksFromEndToEnd) {
  ListPinner pinner;
  PinRefusal refusal;
  std::vector<std::size_t> progress;
  const PinOptions options{.threads = 2, .progress = [&](std::size_t ready, std::size_t all) {
                             EXPECT_EQ(all, kTwoChunks);
                             progress.push_back(ready);
                           }};
  {
    const Buffer memory = pinned_pages(pinner, -1, kTwoChunks, options, refusal);
    ASSERT_EQ(memory.bytes(), kTwoChunks);
    std::byte* at = memory.data();
    for (const auto& [data, bytes] : pinner.chunks) {
      EXPECT_EQ(data, at);
      EXPECT_LE(bytes, bytes_to_chunk_end(data));
      at += bytes;
    }
    EXPECT_GE(at, memory.data() + kTwoChunks);
    EXPECT_GE(pinner.chunks.size(), 2U);
    EXPECT_TRUE(pinner.unpinned.empty());
    EXPECT_TRUE(pinner.touched);
    memory.data()[kTwoChunks - 1] = std::byte{1};
  }
  expect_all_given_back(pinner);
  EXPECT_EQ(progress.size(), pinner.chunks.size());
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
  EXPECT_EQ(progress.back(), kTwoChunks);
}

TEST(PinnedPages, GiveAllBackWhenAChunkIsRefused) {
  ListPinner pinner(1);
  PinRefusal refusal;

  const Buffer memory = pinned_pages(pinner, -1, kTwoChunks, {.threads = 2}, refusal);

  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_THAT(refusal.why, HasSubstr("no more of it"));
  EXPECT_THAT(refusal.why, HasSubstr(std::to_string(pinner.chunks[0].second)));
  EXPECT_FALSE(refusal.no_memory);
  expect_all_given_back(pinner);
}

TEST(PinnedPages, GiveAllBackWhenTheCallerThrows) {
  ListPinner pinner;
  PinRefusal refusal;
  const PinOptions options{.threads = 1, .progress = [](std::size_t, std::size_t) {
                             throw Error(ErrorCode::kCancelled, "enough");
                           }};

  EXPECT_THROW(static_cast<void>(pinned_pages(pinner, -1, 3 * MiB, options, refusal)), Error);

  expect_all_given_back(pinner);
}

TEST(PinnedPages, AreTouchedByTheCallerWhereNoThreadCanBeMade) {
  ListPinner pinner;
  PinRefusal refusal;
  const kvtier::testing::NoNewThreads none;
  const Buffer memory = pinned_pages(pinner, -1, 40 * MiB, {.threads = 4}, refusal);
  EXPECT_EQ(memory.bytes(), 40 * MiB);
  EXPECT_TRUE(pinner.touched);
}

TEST(PinnedPages, AreWholeSmallPages) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{4097}}) {
    ListPinner pinner;
    PinRefusal refusal;
    const Buffer memory = pinned_pages(pinner, -1, bytes, {.threads = 1}, refusal);
    ASSERT_NE(memory.data(), nullptr) << bytes;
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(pinner.chunks[0].second, (bytes + 4095) / 4096 * 4096);
  }
}

TEST(PinnedPages, WantANodeOnlyWhereThereIsOne) {
  for (const int node : {0, 63, 64, 1000}) {
    ListPinner pinner;
    PinRefusal refusal;
    EXPECT_NE(pinned_pages(pinner, node, MiB, {.threads = 1}, refusal).data(), nullptr) << node;
  }
}

TEST(PinnedPages, AreRefusedBeyondTheMachinesMemory) {
  ListPinner pinner;
  PinRefusal refusal;

  const Buffer memory = pinned_pages(pinner, -1, physical_bytes() + 1, {}, refusal);

  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_TRUE(refusal.no_memory);
  EXPECT_TRUE(pinner.chunks.empty());
}

TEST(TouchPages, TellsOfEveryChunkOnce) {
  std::vector<std::byte> memory(3 * MiB + 5, std::byte{1});
  std::vector<std::size_t> ready;

  touch_pages(memory.data(), memory.size(), 3, [&](std::size_t bytes) { ready.push_back(bytes); });

  ASSERT_FALSE(ready.empty());
  EXPECT_TRUE(std::is_sorted(ready.begin(), ready.end()));
  EXPECT_EQ(ready.back(), memory.size());
  for (std::size_t i = 0; i < memory.size(); i += 4096) EXPECT_EQ(memory[i], std::byte{0}) << i;
}

/// Methods that only say what they do.
PinMethod refuses(std::string_view name, std::string why, bool no_memory = false) {
  return {name, [why, no_memory](PinRefusal& refusal) {
            refusal = {.why = why, .no_memory = no_memory};
            return Buffer();
          }};
}

PinMethod gives(std::string_view name, std::byte* memory) {
  return {name, [memory](PinRefusal&) {
            return Buffer(
                memory, 1, [](void*, std::byte*, std::size_t) noexcept {}, nullptr);
          }};
}

TEST(FirstPinned, TriesTheNextWayAndSaysSo) {
  std::byte memory{};
  std::vector<std::string> messages;
  const std::array methods{refuses("one", "because"), gives("two", &memory),
                           refuses("three", "never tried")};

  const Buffer found = first_pinned(methods, 1, [&](LogLevel level, std::string_view text) {
    EXPECT_EQ(level, LogLevel::kWarning);
    messages.emplace_back(text);
  });

  EXPECT_EQ(found.data(), &memory);
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_THAT(messages[0], HasSubstr("one refused (because); trying two"));
  EXPECT_EQ(first_pinned(methods, 1, {}).data(), &memory);  // no log is needed
}

void expect_exhausted(std::span<const PinMethod> methods, const std::vector<std::string>& parts,
                      std::size_t messages) {
  std::size_t logged = 0;
  try {
    static_cast<void>(first_pinned(methods, 12345, [&](LogLevel, std::string_view) { ++logged; }));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_THAT(error.what(), HasSubstr("wanted 12345 bytes"));
    for (const std::string& part : parts) EXPECT_THAT(error.what(), HasSubstr(part));
  }
  EXPECT_EQ(logged, messages);
}

TEST(FirstPinned, NamesEveryReasonWhenAllRefuse) {
  expect_exhausted(std::array{refuses("one", "because"), refuses("two", "likewise")},
                   {"one: because", "two: likewise"}, 1);
}

TEST(FirstPinned, StopsWhereMemoryIsShort) {
  std::byte memory{};
  expect_exhausted(std::array{refuses("one", "none left", true), gives("two", &memory)},
                   {"one: none left"}, 0);
}

}  // namespace
}  // namespace kvtier::transfer
