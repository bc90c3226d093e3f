#include "paged.h"

#include "arguments.h"
#include "config.h"
#include "engine.h"

namespace kvtier_engine {

PagedSketches::PagedSketches(nb::handle model, nb::handle retrieval, std::int64_t num_blocks,
                             int block_tokens, std::int64_t max_tokens, int max_batch_rows,
                             nb::handle backend) {
  kvtier::PagedConfig config = paged_config_of(model, retrieval, backend);
  config.num_blocks = num_blocks;
  config.block_tokens = block_tokens;
  config.max_tokens = max_tokens;
  config.max_batch_rows = max_batch_rows;
  config.log = log_to_python;
  std::unique_ptr<kvtier::PagedSketches> made;
  {
    const nb::gil_scoped_release release;
    made = std::make_unique<kvtier::PagedSketches>(config);
  }
  place_ = {made->backend(), made->device_index()};
  // As of `Engine`: the last owner has the GIL, which the end does not hold.
  sketches_ = {made.release(), [process = process_](kvtier::PagedSketches* sketches) {
                 if (process.is_forked()) return;
                 const nb::gil_scoped_release release;
                 delete sketches;
               }};
}

std::shared_ptr<kvtier::PagedSketches> PagedSketches::open() const {
  process_.check("paged sketches");
  if (sketches_) return sketches_;
  throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                      "paged sketches: expected open ones, found some that are closed");
}

void PagedSketches::store(int layer, nb::handle keys, nb::handle values, nb::handle slots,
                          Stream stream) {
  const std::shared_ptr<kvtier::PagedSketches> sketches = open();
  const Input k("keys", keys, Dtypes::kFloats, place_);
  const Input v("values", values, Dtypes::kFloats, place_);
  const Input s("slots", slots, Dtypes::kInt32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  sketches->store(layer, k.view(), v.view(), s.view(), on);
}

void PagedSketches::select(int layer, nb::handle blocks, nb::handle lengths,
                           std::int64_t max_length, nb::handle query, nb::handle ids,
                           nb::handle bias, Stream stream) {
  const std::shared_ptr<kvtier::PagedSketches> sketches = open();
  const Input table("blocks", blocks, Dtypes::kInt32, place_);
  const Input tokens("lengths", lengths, Dtypes::kInt32, place_);
  const Input q("query", query, Dtypes::kFloats, place_);
  const Output to_ids("ids", ids, Dtypes::kInt32, place_);
  const Output to_bias("bias", bias, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  sketches->select(layer, {table.view(), tokens.view(), max_length}, q.view(),
                   {to_ids.view(), to_bias.view()}, on);
}

void PagedSketches::attend(int layer, nb::handle blocks, nb::handle lengths,
                           std::int64_t max_length, nb::handle query, nb::handle keys,
                           nb::handle values, nb::handle out, nb::handle lse, Stream stream) {
  const std::shared_ptr<kvtier::PagedSketches> sketches = open();
  const Input table("blocks", blocks, Dtypes::kInt32, place_);
  const Input tokens("lengths", lengths, Dtypes::kInt32, place_);
  const Input q("query", query, Dtypes::kFloats, place_);
  const Input k("cache.keys", keys, Dtypes::kFloats, place_);
  const Input v("cache.values", values, Dtypes::kFloats, place_);
  const Output to_out("out", out, Dtypes::kFloats, place_);
  const Output to_lse("lse", lse, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  sketches->attend(layer, {table.view(), tokens.view(), max_length}, q.view(), {k.view(), v.view()},
                   {to_out.view(), to_lse.view()}, on);
}

std::int64_t PagedSketches::attended_bound(std::int64_t length) const {
  return open()->attended_bound(length);
}

void PagedSketches::check() {
  const std::shared_ptr<kvtier::PagedSketches> sketches = open();
  const nb::gil_scoped_release release;  // it waits for a call under way
  sketches->check();
}

std::size_t PagedSketches::device_bytes() const { return open()->device_bytes(); }

void PagedSketches::close() { sketches_.reset(); }

}  // namespace kvtier_engine
