#include "services/server/executor.h"

#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/thread_pool.hpp>

namespace kvtier::services {
namespace {

class PoolStrand final : public Strand {
 public:
  explicit PoolStrand(boost::asio::thread_pool& pool) : strand_(pool.get_executor()) {}
  void post(std::function<void()> task) override { boost::asio::post(strand_, std::move(task)); }

 private:
  boost::asio::strand<boost::asio::thread_pool::executor_type> strand_;
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(std::size_t threads) : pool_(threads) {}
  ~ThreadPool() override { pool_.join(); }
  ThreadPool(const ThreadPool&) = delete;  // owns threads
  ThreadPool& operator=(const ThreadPool&) = delete;

  void finish() override { pool_.join(); }
  std::unique_ptr<Strand> make_strand() override { return std::make_unique<PoolStrand>(pool_); }

 private:
  boost::asio::thread_pool pool_;
};

}  // namespace

std::unique_ptr<Executor> make_thread_pool(std::size_t threads) {
  return std::make_unique<ThreadPool>(threads);
}

}  // namespace kvtier::services
