#pragma once

#include "kvtier/engine.h"
#include "kvtier/kvtier.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

/// What the functions of the C ABI have in common: errors as statuses, and the structs of C as
/// those of C++. What is not as `kvtier.h` has it throws `kInvalidArgument`.
namespace kvtier::c_api {

/// The message of the calling thread's last failure.
std::string& last_error();
/// Keeps the message and returns the status of the code.
kvtier_status fail(ErrorCode code, const char* message) noexcept;

/// Runs a call of the C++ API and turns what it throws into a status.
template <typename Call>
kvtier_status guarded(Call&& call) noexcept {
  try {
    call();
    return KVTIER_OK;
  } catch (const Error& error) {
    return fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::kResourceExhausted, "host memory: expected enough, found none left");
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, error.what());
  }
}

[[noreturn]] inline void invalid(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

template <typename T>
T& given(T* pointer, const char* name) {
  if (pointer == nullptr) invalid(std::string(name) + ": expected a pointer, found NULL");
  return *pointer;
}

void check_size(std::size_t found, std::size_t expected, const char* name);
[[nodiscard]] kvtier_retrieval_config from_retrieval(const RetrievalConfig& config);
/// Views what `prefix` points to.
[[nodiscard]] SessionConfig with_prefix(const kvtier_prefix& prefix);

/// Returns the number in an enumeration of C, which may hold any; reading it as an enumerator of
/// C++ would be undefined then.
template <typename CEnum>
int number_of(const CEnum& value) {
  static_assert(sizeof(CEnum) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

/// Converts an enumerator after checking that it is one of 0..last.
template <typename Enum, typename CEnum>
Enum checked(const CEnum& value, int last, const char* name) {
  const int number = number_of(value);
  if (number < 0 || number > last) {
    invalid(std::string(name) + ": expected 0.." + std::to_string(last) + ", found " +
            std::to_string(number));
  }
  return static_cast<Enum>(number);
}

StreamRef to_stream(const kvtier_stream& stream);
MutableTensorView to_view(const kvtier_tensor& tensor, const char* name);
/// NULL: an empty view.
MutableTensorView to_view(const kvtier_tensor* tensor, const char* name);
Config to_config(const kvtier_config& c);
AttendOutputs to_outputs(const kvtier_attend_args& args);
DecodeInputs to_decode_inputs(const kvtier_attend_args& args);
/// Statistics of one tier, with the size that the caller gave. Throws for an index past the last.
kvtier_tier_stats to_tier_stats(const std::vector<TierStats>& tiers, std::size_t index,
                                std::size_t struct_size);
const kvtier_attend_args& checked_args(const kvtier_attend_args* args);

/// `AttendOptions`, and the retrieval settings it points to.
struct Options {
  AttendOptions options;
  RetrievalConfig retrieval;

  explicit Options(const kvtier_options* c);
  Options(const Options&) = delete;  // options.retrieval points into it
  Options& operator=(const Options&) = delete;
};

}  // namespace kvtier::c_api
