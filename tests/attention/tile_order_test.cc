#include "attention/tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvtier::attention {
namespace {

int random(std::mt19937& generator, int least, int most) {
  return std::uniform_int_distribution(least, most)(generator);
}

TEST(TileOrder, HasEveryTileOnce) {
  for (int tiles = 1; tiles <= 40; ++tiles) {
    for (int parts = 1; parts <= tiles; ++parts) {
      const TileOrder order(tiles, parts);
      std::vector<int> seen(static_cast<std::size_t>(tiles));
      for (int place = 0; place < tiles; ++place) {
        const int tile = order.tile(place);
        ASSERT_TRUE(0 <= tile && tile < tiles) << tiles << " tiles, " << parts << " parts";
        ++seen[static_cast<std::size_t>(tile)];
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<std::size_t>(tiles), 1));
    }
  }
}

// The tiles of a warp: in the range of a block, which may begin and end within parts of the order.
TEST(TileOrder, NoTileAmongTheFirstPlacesIsPastTheFirstTiles) {
  std::mt19937 generator(1);
  int several = 0;  // ranges of more than one part, of which only some places count
  for (int i = 0; i < 20000; ++i) {
    const int tiles = random(generator, 1, 200);
    const int parts = random(generator, 1, std::min(tiles, 12));
    const int first_tiles = random(generator, 0, tiles);
    const int step = random(generator, 1, 8);
    const int begin = random(generator, 0, tiles - 1);
    const int count = random(generator, 0, (tiles - begin + step - 1) / step);
    const TileOrder order(tiles, parts);
    const int below = order.num_below(first_tiles, begin, step, count);
    ASSERT_TRUE(0 <= below && below <= count);
    for (int place = 0; place < below; ++place) {
      ASSERT_LT(order.tile(begin + place * step), first_tiles)
          << tiles << " tiles, " << parts << " parts, from " << begin << " by " << step;
    }
    if (first_tiles == tiles) {
      EXPECT_EQ(below, count);
    }
    if (below < count && count * step > tiles / parts) ++several;
  }
  EXPECT_GT(several, 1000);
}

// In one part the tiles ascend: all places of the first tiles count.
TEST(TileOrder, CountsAllPlacesOfTheFirstTilesInOnePart) {
  for (int tiles = 1; tiles <= 40; ++tiles) {
    for (int first_tiles = 0; first_tiles <= tiles; ++first_tiles) {
      EXPECT_EQ(TileOrder(tiles, 1).num_below(first_tiles, 0, 1, tiles), first_tiles);
    }
  }
}

}  // namespace
}  // namespace kvtier::attention
