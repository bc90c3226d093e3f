#pragma once

#include <google/protobuf/descriptor.pb.h>

#include <string>
#include <vector>

namespace kvtier::testing {

/// Returns what a client built against `before` would trip over in `after`: files, messages,
/// fields, values and methods that are gone, or mean something else under the same name or number.
/// Additions are no problem.
[[nodiscard]] std::vector<std::string> breaking_changes(
    const google::protobuf::FileDescriptorSet& before,
    const google::protobuf::FileDescriptorSet& after);

/// Returns where `files` leaves the naming rules: package and folder, names of requests and
/// responses, prefixes of enumerators and a zero that is unspecified.
[[nodiscard]] std::vector<std::string> naming_problems(
    const google::protobuf::FileDescriptorSet& files);

}  // namespace kvtier::testing
