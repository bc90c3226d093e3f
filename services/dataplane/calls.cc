#include "services/dataplane/calls.h"

#include "services/base/from_message.h"
#include "services/wire/each_tensor.h"
#include "services/wire/message_pieces.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>

namespace kvtier::services {
namespace {

/// What parsing makes of a byte, at most: unknown fields of two bytes each.
constexpr std::int64_t kParsedBytes = 16;
constexpr std::uint32_t kItemsTag = 1U << 3U | 2U;  // field 1, of all batches, is their items

/// Throws when a batch has more items than one may have, which cost far more than the two bytes
/// that name one.
void check_items(const std::string& message) {
  google::protobuf::io::CodedInputStream in(reinterpret_cast<const std::uint8_t*>(message.data()),
                                            static_cast<int>(message.size()));
  int items = 0;
  while (const std::uint32_t tag = in.ReadTag()) {
    if (tag == kItemsTag) ++items;
    if (!google::protobuf::internal::WireFormatLite::SkipField(&in, tag)) return;  // it is none
  }
  check_at_most("items", items, kMaxBatchItems);
}

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

template <typename Request, typename Response>
void run(ServiceCore& core, const Call& call, const CallBody& body, CallMemory memory,
         std::function<void(CallOutcome)> done) {
  auto job = std::make_shared<Job<Request, Response>>();
  job->place = body.output;
  job->memory = std::move(memory);
  job->done = std::move(done);
  const std::int64_t parsed = kParsedBytes * static_cast<std::int64_t>(body.message.size());
  std::int64_t tensors = 0;
  const std::optional<ServiceError> failure = failure_of([&] {
    tensors = static_cast<std::int64_t>(tensor_bytes_of(body, job->memory));
    if constexpr (requires { job->request.items(); }) check_items(body.message);
    if (!has_few_fields({std::as_bytes(std::span(body.message))}, *Request::descriptor())) {
      throw ServiceError::invalid("message", "at most " + std::to_string(kMaxFields) + " fields",
                                  "more");
    }
    if (call.reservation) call.reservation->take(tensors + parsed);
    if (!job->request.ParseFromString(body.message)) {
      throw ServiceError::invalid("message", "a request of the method", "bytes that are none");
    }
    take_tensors(body, job->memory, job->request);
    const std::uint64_t needed = output_bytes_of(job->request);
    if (job->memory.output && job->memory.output->size() < needed) {
      throw ServiceError::invalid("output", "at least " + std::to_string(needed) + " bytes",
                                  std::to_string(job->memory.output->size()));
    }
  });
  if (failure) {
    core.refused(call, rpc_name<Request>(), *failure);
    return job->end(&*failure);
  }
  if (call.reservation) call.reservation->give(tensors);  // the core counts them
  core.run(call, job->request, job->response,
           [job](const ServiceError* error) { job->end(error); });
}

}  // namespace

std::uint64_t tensor_bytes_of(const CallBody& body, const CallMemory& memory) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < body.tensors.size(); ++i) {
    const Extent& extent = body.tensors[i];
    if (!lies_within(extent, memory.input.size()) || extent.bytes > kMaxPayloadBytes) {
      throw ServiceError::invalid(
          "tensors[" + std::to_string(i) + "]",
          "bytes within " + std::to_string(memory.input.size()),
          std::to_string(extent.bytes) + " at " + std::to_string(extent.offset));
    }
    sum += extent.bytes;
  }
  check_at_most("tensors", sum, memory.input.size(), " bytes in all");
  return sum;
}

void run_call(ServiceCore& core, const Call& call, const CallBody& body, CallMemory memory,
              std::function<void(CallOutcome)> done) {
  each_plane_rpc([&](auto rpc, Method method) {
    using Rpc = decltype(rpc);
    if (method != body.method) return;
    run<typename Rpc::Request, typename Rpc::Response>(core, call, body, std::move(memory),
                                                       std::move(done));
  });
}

}  // namespace kvtier::services
