#include "services/core/model_pool.h"

#include "kvtier/error.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace kvtier::services {
namespace {

namespace fs = std::filesystem;

class ModelPoolTest : public ::testing::Test {
 protected:
  ModelPoolTest() {
    std::string name = ::testing::TempDir() + "kvtier-pool-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = name;
  }
  ~ModelPoolTest() override { fs::remove_all(folder_); }

  [[nodiscard]] ModelPoolOptions options() const {
    ModelPoolOptions options;
    options.backend = Backend::kCpu;
    options.max_models = 2;
    options.memory.host_bytes = MiB;
    options.memory.device_bytes = 64 * MiB;
    options.memory.max_session_tokens = 1024;
    options.memory.disk_cache_bytes = 16 * MiB;
    options.disk_cache = folder_ / "cache";
    return options;
  }
  [[nodiscard]] static ModelSpec spec(int kv_heads) {
    ModelSpec spec;
    spec.model = {.layers = 1, .query_heads = 4, .kv_heads = kv_heads, .head_dim = 64};
    spec.retrieval.top_k = 16;
    return spec;
  }
  [[nodiscard]] static fs::path cache_of(const Model& model) {
    return model.engine.config().memory.disk_cache;
  }

  fs::path folder_;
};

TEST_F(ModelPoolTest, EachEngineHasADiskCacheOfItsOwn) {
  ModelPool pool(options());
  auto first = pool.acquire(spec(1));
  const auto second = pool.acquire(spec(2));
  EXPECT_EQ(cache_of(*first), folder_ / "cache" / "engine-0");
  EXPECT_EQ(cache_of(*second), folder_ / "cache" / "engine-1");
  EXPECT_TRUE(fs::is_directory(cache_of(*first)));

  // The one that gives way leaves its folder to the next.
  first.reset();
  EXPECT_EQ(cache_of(*pool.acquire(spec(4))), folder_ / "cache" / "engine-0");
}

TEST_F(ModelPoolTest, KeepsRowsOfModelsInBf16InInt8) {
  ModelPoolOptions narrow = options();
  narrow.memory.page_format = PageFormat::kInt8;
  ModelPool pool(narrow);
  ModelSpec half = spec(1);
  half.model.kv_dtype = DType::kFloat16;

  EXPECT_EQ(pool.acquire(spec(1))->engine.config().memory.page_format, PageFormat::kInt8);
  EXPECT_EQ(pool.acquire(half)->engine.config().memory.page_format, PageFormat::kModel);
}

TEST_F(ModelPoolTest, StartsWithEmptyCachesAndNotInThoseOfAnother) {
  const fs::path left = folder_ / "cache" / "engine-7";
  {
    ModelPool pool(options());
    const auto model = pool.acquire(spec(1));
    try {
      const ModelPool other(options());
      FAIL() << "expected the folder to be refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFailedPrecondition);
      EXPECT_NE(std::string(error.what()).find("engine-0"), std::string::npos) << error.what();
    }
  }
  fs::rename(folder_ / "cache" / "engine-0", left);
  const fs::path segment = left / "0000000000000001.segment";
  for (const auto& file : fs::directory_iterator(left)) {
    ASSERT_NE(file.path().extension(), ".segment");
  }
  fs::copy_file("/proc/self/exe", segment);

  const ModelPool again(options());
  EXPECT_FALSE(fs::exists(segment));
}

TEST_F(ModelPoolTest, EnginesThatAreReadAreNotInUse) {
  ModelPoolOptions one = options();
  one.max_models = 1;
  ModelPool pool(one);
  std::jthread scrapes([&pool](const std::stop_token& ending) {
    while (!ending.stop_requested()) {
      (void)pool.stats();
      (void)pool.find(spec(1));
    }
  });
  for (int i = 0; i < 10; ++i) {
    for (const int kv_heads : {2, 4}) EXPECT_NO_THROW((void)pool.acquire(spec(kv_heads))) << i;
  }
}

TEST_F(ModelPoolTest, RefusesAFolderThatOthersMayWrite) {
  const fs::path cache = folder_ / "cache";
  { const ModelPool makes_it(options()); }
  EXPECT_EQ(fs::status(cache).permissions(), fs::perms::owner_all);
  for (const fs::perms open : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(cache, fs::perms::owner_all | open);
    try {
      const ModelPool refused(options());
      FAIL() << "expected the folder to be refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFailedPrecondition) << error.what();
    }
  }
  fs::permissions(cache, fs::perms::owner_all | fs::perms::group_read);
  const ModelPool taken(options());
}

TEST_F(ModelPoolTest, SaysThatTheDeviceIsLostUntilAnEngineCanBeMade) {
  bool broken = false;
  ModelPoolOptions options = this->options();
  options.log = [&broken](LogLevel, std::string_view) {  // also while an engine is made
    if (broken) throw Error(ErrorCode::kInternal, "CUDA reports an illegal address");
  };
  int num_lost = 0;
  options.on_device_lost = [&num_lost] { ++num_lost; };
  {
    ModelPool without_a_first(options);
    broken = true;
    EXPECT_THROW((void)without_a_first.acquire(spec(1)), Error);
    EXPECT_EQ(num_lost, 0) << "a device that never served is not lost";
    broken = false;
  }
  ModelPool pool(options);
  const auto other = pool.acquire(spec(2));
  pool.acquire(spec(1))->failed = true;
  EXPECT_TRUE(pool.any_failed());

  broken = true;
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      (void)pool.acquire(spec(1));
      FAIL() << "expected the fault";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
    }
    EXPECT_TRUE(pool.any_failed());
    EXPECT_EQ(num_lost, attempt + 1);
    EXPECT_EQ(pool.size(), 1U);
  }
  EXPECT_EQ(pool.acquire(spec(2)), other);
  EXPECT_TRUE(pool.any_failed()) << "an engine that was there says nothing of the device";

  broken = false;
  EXPECT_FALSE(pool.acquire(spec(1))->failed);
  EXPECT_FALSE(pool.any_failed());
}

}  // namespace
}  // namespace kvtier::services
