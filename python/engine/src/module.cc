#include "kvtier/error.h"
#include "kvtier/version.h"

#include "engine.h"
#include "memory.h"
#include "paged.h"

#include <exception>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using kvtier_engine::device_bytes_for;
using kvtier_engine::Engine;
using kvtier_engine::Options;
using kvtier_engine::PagedSketches;
using kvtier_engine::Session;
using kvtier_engine::session_memory;

namespace {

/// Raises the exception that the client of the service raises for the same code.
void raise_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const kvtier::Error& error) {
    const nb::object made = nb::module_::import_("kvtier.errors")
                                .attr("make_error")(static_cast<int>(error.code()), error.what());
    PyErr_SetObject(made.type().ptr(), made.ptr());
  }
}

}  // namespace

/// Called by the classes of the package alone, which have the documentation.
NB_MODULE(_native, m) {
  // Callers keep engines and options in globals, which the interpreter does not always free.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise_error);
  m.attr("version") = KVTIER_VERSION;
  nb::enum_<kvtier::Backend>(m, "Backend")
      .value("AUTO", kvtier::Backend::kAuto)
      .value("CPU", kvtier::Backend::kCpu)
      .value("CUDA", kvtier::Backend::kCuda);
  m.def("session_memory", &session_memory, "model"_a, "memory"_a, "retrieval"_a, "extra_sketches"_a,
        "backend"_a, "tokens"_a, "row_cache_rows"_a);
  m.def("device_bytes_for", &device_bytes_for, "model"_a, "memory"_a, "retrieval"_a,
        "extra_sketches"_a, "backend"_a, "tokens"_a, "sessions"_a);
  nb::class_<Options>(m, "Options").def(nb::init<nb::handle, std::int64_t>());
  nb::class_<Session>(m, "Session")
      .def("append", &Session::append, "layer"_a, "keys"_a, "values"_a, "stream"_a.none())
      .def("reserve", &Session::reserve, "tokens"_a, "stream"_a.none())
      .def("select", &Session::select, "layer"_a, "query"_a, "ids"_a, "scores"_a.none(),
           "bias"_a.none(), "stream"_a.none(), "options"_a)
      .def("attend", &Session::attend, "layer"_a, "query"_a, "selected"_a.none(), "bias"_a.none(),
           "out"_a, "lse"_a, "ids"_a.none(), "missed"_a.none(), "stream"_a.none(), "options"_a)
      .def("decode", &Session::decode, "layer"_a, "query"_a, "key"_a, "value"_a,
           "selected"_a.none(), "bias"_a.none(), "out"_a, "lse"_a, "ids"_a.none(),
           "missed"_a.none(), "stream"_a.none(), "options"_a)
      .def("prefetch", &Session::prefetch, "layer"_a, "query"_a, "stream"_a.none(), "options"_a)
      .def("fetch", &Session::fetch, "layer"_a, "tokens"_a, "keys"_a, "values"_a)
      .def("length", &Session::length, "layer"_a.none())
      .def("truncate", &Session::truncate, "tokens"_a, "stream"_a.none(), "layer"_a.none())
      .def("fork", &Session::fork, "count"_a, "stream"_a.none(), nb::rv_policy::take_ownership)
      .def("publish", &Session::publish, "token_ids"_a, "stream"_a.none())
      .def("advance", &Session::advance, "layer"_a, "tokens"_a)
      .def("close", &Session::close);
  nb::class_<PagedSketches>(m, "PagedSketches")
      .def(nb::init<nb::handle, nb::handle, std::int64_t, int, std::int64_t, int, nb::handle>())
      .def("store", &PagedSketches::store, "layer"_a, "keys"_a, "values"_a, "slots"_a,
           "stream"_a.none())
      .def("select", &PagedSketches::select, "layer"_a, "blocks"_a, "lengths"_a, "max_length"_a,
           "query"_a, "ids"_a, "bias"_a.none(), "stream"_a.none())
      .def("attend", &PagedSketches::attend, "layer"_a, "blocks"_a, "lengths"_a, "max_length"_a,
           "query"_a, "keys"_a, "values"_a, "out"_a, "lse"_a, "stream"_a.none())
      .def("attended_bound", &PagedSketches::attended_bound, "length"_a)
      .def("check", &PagedSketches::check)
      .def("backend", &PagedSketches::backend)
      .def("device_bytes", &PagedSketches::device_bytes)
      .def("close", &PagedSketches::close);
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, bool, bool, bool>())
      .def("open", &Engine::open, "capacity_tokens"_a, "token_ids"_a, "tenant_secret"_a,
           "model_fingerprint"_a, "max_page_bytes"_a, "tenant"_a, "whole"_a,
           nb::rv_policy::take_ownership)
      .def("set_quota", &Engine::set_quota, "tenant"_a, "page_bytes"_a.none())
      .def("decode", &Engine::decode, "layer"_a, "items"_a, "stream"_a.none())
      .def("decode_rows", &Engine::decode_rows, "layer"_a, "sessions"_a, "query"_a, "key"_a,
           "value"_a, "out"_a, "gpu"_a, "stream"_a.none(), "options"_a)
      .def("merge", &Engine::merge, "parts"_a, "out"_a, "lse"_a, "stream"_a.none())
      .def("backend", &Engine::backend)
      .def("stats", &Engine::stats)
      .def("close", &Engine::close);
}
