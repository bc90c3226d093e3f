#include "services/base/handle.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

namespace kvtier::services {
namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

TEST(Handle, ComesBackAsItWasMade) {
  const HandleCodec codec("session");
  for (const HandleFields& fields :
       {HandleFields{}, HandleFields{.tenant = 1, .slot = 2, .generation = 3},
        HandleFields{.tenant = 0xFFFFFFFFU, .slot = 0x80000000U, .generation = 0xFFFFFFFFU}}) {
    const std::string text = codec.encode(fields);
    ASSERT_EQ(text.size(), HandleCodec::kCharacters);

    const DecodedHandle decoded = codec.decode(text);

    EXPECT_EQ(decoded.state, HandleState::kValid);
    EXPECT_EQ(decoded.fields, fields);
  }
}

TEST(Handle, IsWrittenWithoutCharactersThatNeedEscaping) {
  const HandleCodec codec("session");
  for (std::uint32_t slot = 0; slot < 100; ++slot) {
    EXPECT_EQ(codec.encode({.slot = slot}).find_first_not_of(kDigits), std::string::npos);
  }
}

TEST(Handle, ChangedInAnyBitIsRefused) {
  const HandleCodec codec("session");
  const std::string text = codec.encode({.tenant = 7, .slot = 11, .generation = 5});
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (const char digit : kDigits) {
      if (digit == text[at]) continue;
      std::string changed = text;
      changed[at] = digit;
      EXPECT_NE(codec.decode(changed).state, HandleState::kValid) << changed;
    }
  }
}

class HandleKindTest : public ::testing::TestWithParam<const char*> {};

TEST_P(HandleKindTest, MillionRandomOnesAreRefused) {
  const HandleCodec codec(GetParam());
  const std::string prefix = codec.encode({}).substr(0, 5);  // of this epoch: the MAC is checked
  const auto seed = std::random_device{}();
  std::mt19937_64 random(seed);
  std::string text(HandleCodec::kCharacters, 'A');
  for (int i = 0; i < 1'000'000; ++i) {
    for (char& c : text) c = kDigits[random() % kDigits.size()];
    if (i % 2 == 0) text.replace(0, prefix.size(), prefix);
    ASSERT_NE(codec.decode(text).state, HandleState::kValid) << text << ", seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, HandleKindTest, ::testing::Values("session", "page"));

TEST(Handle, OfAnotherStartIsToldApart) {
  const HandleCodec before("session");
  const HandleCodec after("session");
  ASSERT_NE(before.epoch(), after.epoch());

  EXPECT_EQ(after.decode(before.encode({.slot = 1})).state, HandleState::kOtherEpoch);
}

TEST(Handle, OfAnotherLengthOrAlphabetIsForged) {
  const HandleCodec codec("session");
  const std::string text = codec.encode({.slot = 1});
  std::string padded = text;
  padded.back() = '=';
  std::string with_nul = text;
  with_nul[7] = '\0';
  for (const std::string& other :
       {std::string(), text.substr(1), text + "A", text + text, padded, with_nul,
        std::string(HandleCodec::kCharacters, '\xFF'), std::string(1 << 20, 'A')}) {
    EXPECT_EQ(codec.decode(other).state, HandleState::kForged) << other.size();
  }
}

TEST(Handle, SaysNothingOfItsNeighbours) {
  const HandleCodec codec("session");
  std::set<std::string> macs;
  for (std::uint32_t slot = 0; slot < 1000; ++slot) {
    macs.insert(codec.encode({.slot = slot}).substr(21));
  }
  EXPECT_EQ(macs.size(), 1000U);
}

}  // namespace
}  // namespace kvtier::services
