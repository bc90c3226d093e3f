#include "runtime/sequence/prefix_key.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace kvtier::runtime {
namespace {

std::string hex(const Sha256::Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string sha256(std::string_view text, std::size_t piece) {
  Sha256 hash;
  for (std::size_t at = 0; at < text.size(); at += piece) {
    hash.update(std::as_bytes(std::span(text.substr(at, piece))));
  }
  return hex(hash.finish());
}

TEST(Sha256, GivesTheDigestsOfTheStandard) {
  const std::string million(1'000'000, 'a');
  for (const std::size_t piece : {1U, 7U, 64U, 1000U}) {
    EXPECT_EQ(sha256("", piece),
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(sha256("abc", piece),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(sha256(million, piece),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

class PrefixKeyTest : public ::testing::Test {
 protected:
  static std::vector<std::int32_t> ids(std::size_t count) {
    std::vector<std::int32_t> ids(count);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }
  Config config_;
  transfer::KvGeometry kv_{.kv_heads = 8, .group = 4, .head_dim = 128, .page_tokens = 64};
  std::vector<SketchConfig> sketches_{SketchConfig{}};
  [[nodiscard]] PrefixKey engine() const { return engine_key(config_, kv_, sketches_); }
};

TEST_F(PrefixKeyTest, EveryThingThatPagesDependOnChangesTheKeys) {
  std::set<PrefixKey> keys{engine()};
  const auto expect_new = [&] { EXPECT_TRUE(keys.insert(engine()).second) << keys.size(); };
  config_.model.layers = 2;
  expect_new();
  kv_.kv_heads = 4;
  expect_new();
  kv_.head_dim = 64;
  expect_new();
  kv_.page_tokens = 32;
  expect_new();
  kv_.dtype = DType::kFloat16;
  expect_new();
  sketches_[0].seed = 1;
  expect_new();
  sketches_[0].num_planes = 256;
  expect_new();
  sketches_[0].kind = PlaneKind::kOrthogonal;
  expect_new();
  sketches_.emplace_back();
  expect_new();
  for (const char* secret : {"", "a", "b", "ab"}) {
    for (const char* model : {"", "a", "b", "ab"}) {
      EXPECT_TRUE(keys.insert(root_key(engine(), model, secret)).second) << secret << " " << model;
    }
  }
}

TEST_F(PrefixKeyTest, OnlyWholePagesHaveKeysAndEachDependsOnAllBefore) {
  const PrefixKey root = root_key(engine(), "model", "secret");
  EXPECT_TRUE(page_keys(root, 64, ids(63)).empty());
  EXPECT_EQ(page_keys(root, 64, ids(64)).size(), 1U);
  const std::vector<PrefixKey> all = page_keys(root, 64, ids(64 * 5 + 3));
  ASSERT_EQ(all.size(), 5U);
  EXPECT_EQ(std::set<PrefixKey>(all.begin(), all.end()).size(), 5U);
  for (std::size_t changed = 0; changed < 5 * 64; changed += 63) {
    std::vector<std::int32_t> other = ids(64 * 5);
    other[changed] ^= 1 << 20;
    const std::vector<PrefixKey> keys = page_keys(root, 64, other);
    for (std::size_t page = 0; page < 5; ++page) {
      EXPECT_EQ(keys[page] == all[page], page < changed / 64) << changed << " " << page;
    }
  }
}

}  // namespace
}  // namespace kvtier::runtime
