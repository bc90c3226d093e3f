#include "session.h"

#include "arguments.h"

#include <utility>

namespace kvtier_engine {

Session::Use::Use(Session& session) : session_(&session) {
  session.process_.check("session");
  if (session.used_.exchange(true)) {
    throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                        "session: expected one call at a time, found another under way");
  }
  if (session.session_) return;
  session.used_ = false;
  throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                      "session: expected an open one, found one that is closed");
}

Session::Use::~Use() {
  if (session_ != nullptr) session_->used_ = false;
}

Session::~Session() { end(); }

void Session::end() {
  if (process_.is_forked()) {
    // Never freed: the end of the last session of an engine is that of the engine.
    if (session_) new kvtier::Session(std::move(*session_));
    return;
  }
  const nb::gil_scoped_release release;
  session_.reset();
}

void Session::append(int layer, nb::handle keys, nb::handle values, Stream stream) {
  const Use use(*this);
  const Input k("keys", keys, Dtypes::kFloats, place_);
  const Input v("values", values, Dtypes::kFloats, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->append(layer, k.view(), v.view(), on);
}

void Session::reserve(std::int64_t tokens, Stream stream) {
  const Use use(*this);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->reserve(tokens, on);
}

void Session::select(int layer, nb::handle query, nb::handle ids, nb::handle scores,
                     nb::handle bias, Stream stream, const Options& options) {
  const Use use(*this);
  const Input q("query", query, Dtypes::kFloats, place_);
  const Output to_ids("ids", ids, Dtypes::kInt32, place_);
  const Output to_scores("scores", scores, Dtypes::kFloat32, place_);
  const Output to_bias("bias", bias, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->select(layer, q.view(), {to_ids.view(), to_scores.view(), to_bias.view()}, on,
              options.get());
}

void Session::attend(int layer, nb::handle query, nb::handle selected, nb::handle bias,
                     nb::handle out, nb::handle lse, nb::handle ids, nb::handle missed,
                     Stream stream, const Options& options) {
  const Use use(*this);
  const Input q("query", query, Dtypes::kFloats, place_);
  const Input given("selected", selected, Dtypes::kInt32, place_);
  const Input weights("bias", bias, Dtypes::kFloat32, place_);
  const Output to_out("out", out, Dtypes::kFloats, place_);
  const Output to_lse("lse", lse, Dtypes::kFloat32, place_);
  const Output to_ids("ids", ids, Dtypes::kInt32, place_);
  const Output to_missed("missed", missed, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->attend(layer, {q.view(), given.view(), weights.view()},
              {to_out.view(), to_lse.view(), to_ids.view(), to_missed.view()}, on, options.get());
}

void Session::decode(int layer, nb::handle query, nb::handle key, nb::handle value,
                     nb::handle selected, nb::handle bias, nb::handle out, nb::handle lse,
                     nb::handle ids, nb::handle missed, Stream stream, const Options& options) {
  const Use use(*this);
  const Input q("query", query, Dtypes::kFloats, place_);
  const Input k("key", key, Dtypes::kFloats, place_);
  const Input v("value", value, Dtypes::kFloats, place_);
  const Input given("selected", selected, Dtypes::kInt32, place_);
  const Input weights("bias", bias, Dtypes::kFloat32, place_);
  const Output to_out("out", out, Dtypes::kFloats, place_);
  const Output to_lse("lse", lse, Dtypes::kFloat32, place_);
  const Output to_ids("ids", ids, Dtypes::kInt32, place_);
  const Output to_missed("missed", missed, Dtypes::kFloat32, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->decode(layer, {q.view(), k.view(), v.view(), given.view(), weights.view()},
              {to_out.view(), to_lse.view(), to_ids.view(), to_missed.view()}, on, options.get());
}

void Session::prefetch(int layer, nb::handle query, Stream stream, const Options& options) {
  const Use use(*this);
  const Input q("query", query, Dtypes::kFloats, place_);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->prefetch(layer, q.view(), on, options.get());
}

void Session::fetch(int layer, nb::handle tokens, nb::handle keys, nb::handle values) {
  const Use use(*this);
  const Input ids("tokens", tokens, Dtypes::kInt32, place_);
  const Output k("keys", keys, Dtypes::kFloats, place_);
  const Output v("values", values, Dtypes::kFloats, place_);
  const nb::gil_scoped_release release;
  use->fetch(layer, ids.view(), {k.view(), v.view()});
}

std::int64_t Session::length(std::optional<int> layer) {
  const Use use(*this);
  return layer ? use->length(*layer) : use->length();
}

void Session::truncate(std::int64_t tokens, Stream stream, std::optional<int> layer) {
  const Use use(*this);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->truncate(tokens, on, layer);
}

std::vector<Session*> Session::fork(int count, Stream stream) {
  const Use use(*this);
  const kvtier::StreamRef on = stream_of(stream, place_);
  std::vector<kvtier::Session> made;
  {
    const nb::gil_scoped_release release;
    made = use->fork(count, on);
  }
  std::vector<Session*> sessions;
  for (kvtier::Session& session : made) {
    sessions.push_back(new Session(std::move(session), place_));  // Python takes each
  }
  return sessions;
}

void Session::publish(const std::vector<std::int32_t>& token_ids, Stream stream) {
  const Use use(*this);
  const kvtier::StreamRef on = stream_of(stream, place_);
  const nb::gil_scoped_release release;
  use->publish(token_ids, on);
}

void Session::advance(int layer, std::int64_t tokens) {
  const Use use(*this);
  use->advance(layer, tokens);
}

void Session::close() {
  if (process_.is_forked()) return;
  if (used_.exchange(true)) {
    throw kvtier::Error(kvtier::ErrorCode::kFailedPrecondition,
                        "session: expected no call under way to close it, found one");
  }
  end();
  used_ = false;
}

}  // namespace kvtier_engine
