#include "services/dataplane/calls.h"

#include "services/server/wire.h"
#include "services/wire/each_tensor.h"

#include <algorithm>
#include <cstddef>
#include <span>

namespace kvtier::services {
namespace {

/// Queries of a request: their outputs have their shape.
template <typename Request>
std::uint64_t output_bytes_of(const Request& request) {
  if constexpr (requires { request.items(); }) {
    std::uint64_t bytes = 0;
    for (const auto& item : request.items()) bytes += output_bytes_of(item);
    return bytes;
  } else if constexpr (
      requires { request.with_scores(); } || !requires { request.query(); }) {
    return 0;  // refused afterwards, when nothing has changed
  } else {
    const std::uint64_t query = bytes_of(request.query(), "query");
    const std::uint64_t missed = request.with_missed() ? missed_bytes_for(query) : 0;
    if (request.has_out_memory() && request.has_lse_memory()) return missed;
    return output_bytes_for(query) + missed;
  }
}

template <typename Request>
void take_tensors(const CallBody& body, const CallMemory& memory, Request& request) {
  const std::span<const std::byte> input = memory.input;
  std::size_t index = 0;
  each_tensor(request, [&](v1::Tensor& tensor) {
    if (tensor.has_memory()) return;
    if (!tensor.data().empty()) {
      throw ServiceError::invalid("tensor.data", "none: the frame says where the bytes are",
                                  std::to_string(tensor.data().size()) + " bytes");
    }
    const std::size_t at = index++;
    if (at >= body.tensors.size()) return;
    const Extent& extent = body.tensors[at];
    if (!lies_within(extent, input.size()) || extent.bytes > kMaxPayloadBytes) {
      throw ServiceError::invalid(
          "tensors[" + std::to_string(at) + "]", "bytes within " + std::to_string(input.size()),
          std::to_string(extent.bytes) + " at " + std::to_string(extent.offset));
    }
    tensor.mutable_data()->assign(reinterpret_cast<const char*>(input.data()) + extent.offset,
                                  extent.bytes);
    if (memory.shared != nullptr) memory.shared->read += extent.bytes;
  });
  if (index != body.tensors.size()) {
    throw ServiceError::invalid("tensors", std::to_string(index),
                                std::to_string(body.tensors.size()));
  }
}

/// Moves the tensors of a reply to `output`, or to the outcome.
template <typename Response>
void give_tensors(const Extent& place, const CallMemory& memory, Response& response,
                  CallOutcome& outcome) {
  std::uint64_t used = 0;
  each_tensor(response, [&](v1::Tensor& tensor) {
    if (tensor.has_memory()) return;
    const std::string& data = tensor.data();
    const Extent extent{place.offset + used, data.size()};
    used += aligned_bytes(data.size());
    if (memory.output) {
      if (used > memory.output->size()) {
        throw ServiceError(Code::kInvalidArgument, "REPLY_TOO_LARGE",
                           "output: expected room for the reply, found " +
                               std::to_string(memory.output->size()) + " bytes");
      }
      std::ranges::copy(
          std::as_bytes(std::span(data)),
          memory.output->begin() + static_cast<std::ptrdiff_t>(extent.offset - place.offset));
    } else {
      outcome.output.append(data);
      outcome.output.resize(used);
    }
    if (memory.shared != nullptr) memory.shared->written += extent.bytes;
    outcome.reply.tensors.push_back(extent);
    tensor.clear_data();
  });
}

template <typename Request, typename Response>
struct Job {
  Request request;
  Response response;
  Extent place;
  CallMemory memory;
  std::function<void(CallOutcome)> done;

  void end(const ServiceError* error) {
    CallOutcome outcome;
    try {
      if (error != nullptr) throw *error;
      give_tensors(place, memory, response, outcome);
      outcome.reply.message = response.SerializeAsString();
    } catch (...) {
      outcome = {};
      outcome.error = to_service_error(std::current_exception());
    }
    memory.keep.reset();
    done(std::move(outcome));
  }
};

template <typename Request, typename Response, typename Start>
void run(const CallBody& body, CallMemory memory, std::function<void(CallOutcome)> done,
         Start start) {
  auto job = std::make_shared<Job<Request, Response>>();
  job->place = body.output;
  job->memory = std::move(memory);
  job->done = std::move(done);
  try {
    if (!job->request.ParseFromString(body.message)) {
      throw ServiceError::invalid("message", "a request of the method", "bytes that are none");
    }
    take_tensors(body, job->memory, job->request);
    const std::uint64_t needed = output_bytes_of(job->request);
    if (job->memory.output && job->memory.output->size() < needed) {
      throw ServiceError::invalid("output", "at least " + std::to_string(needed) + " bytes",
                                  std::to_string(job->memory.output->size()));
    }
  } catch (...) {
    const ServiceError error = to_service_error(std::current_exception());
    job->end(&error);
    return;
  }
  start(job->request, job->response, [job](const ServiceError* error) { job->end(error); });
}

}  // namespace

void run_call(Core& core, const Call& call, const CallBody& body, CallMemory memory,
              std::function<void(CallOutcome)> done) {
  switch (body.method) {
    case Method::kAppend:
      return run<v1::AppendRequest, v1::AppendResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.append(call, request.session(), request, response, end);
          });
    case Method::kSelect:
      return run<v1::SelectRequest, v1::SelectResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.select(call, request, response, end);
          });
    case Method::kAttend:
      return run<v1::AttendRequest, v1::AttendResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.attend(call, request, response, end);
          });
    case Method::kDecode:
      return run<v1::DecodeRequest, v1::DecodeResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.decode(call, request.session(), request, response, end);
          });
    case Method::kBatchDecode:
      return run<v1::BatchDecodeRequest, v1::BatchDecodeResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.batch_decode(call, request, response, end);
          });
    case Method::kBatchAttend:
      return run<v1::BatchAttendRequest, v1::BatchAttendResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.batch_attend(call, request, response, end);
          });
    case Method::kFetch:
      return run<v1::FetchRequest, v1::FetchResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.fetch(call, request, response, end);
          });
    case Method::kBatchSelect:
      return run<v1::BatchSelectRequest, v1::BatchSelectResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.batch_select(call, request, response, end);
          });
    case Method::kBatchFetch:
      return run<v1::BatchFetchRequest, v1::BatchFetchResponse>(
          body, std::move(memory), std::move(done),
          [&](const auto& request, auto& response, const Done& end) {
            core.batch_fetch(call, request, response, end);
          });
  }
}

}  // namespace kvtier::services
