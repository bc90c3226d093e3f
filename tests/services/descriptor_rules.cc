#include "tests/services/descriptor_rules.h"

#include <algorithm>
#include <cctype>
#include <set>

namespace kvtier::testing {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::EnumDescriptorProto;
using google::protobuf::FieldDescriptorProto;
using google::protobuf::FileDescriptorProto;
using google::protobuf::FileDescriptorSet;
using google::protobuf::MethodDescriptorProto;
using google::protobuf::ServiceDescriptorProto;

using Problems = std::vector<std::string>;

template <typename List>
const typename List::value_type* find_name(const List& list, const std::string& name) {
  const auto it = std::find_if(list.begin(), list.end(),
                               [&name](const auto& entry) { return entry.name() == name; });
  return it == list.end() ? nullptr : &*it;
}

std::string oneof_name(const DescriptorProto& message, const FieldDescriptorProto& field) {
  return field.has_oneof_index() ? message.oneof_decl(field.oneof_index()).name() : "";
}

void compare_fields(const std::string& path, const DescriptorProto& before,
                    const DescriptorProto& after, Problems& problems) {
  for (const FieldDescriptorProto& field : before.field()) {
    const std::string name = path + "." + field.name();
    const auto it = std::find_if(after.field().begin(), after.field().end(),
                                 [&](const auto& f) { return f.number() == field.number(); });
    if (it == after.field().end()) {
      problems.push_back(name + ": field " + std::to_string(field.number()) + " is gone");
      continue;
    }
    if (it->name() != field.name()) problems.push_back(name + ": renamed to " + it->name());
    if (it->type() != field.type() || it->type_name() != field.type_name()) {
      problems.push_back(name + ": another type");
    }
    if (it->label() != field.label() || it->proto3_optional() != field.proto3_optional()) {
      problems.push_back(name + ": another cardinality");
    }
    if (oneof_name(before, field) != oneof_name(after, *it)) {
      problems.push_back(name + ": another oneof");
    }
  }
}

void compare_enums(const std::string& path, const EnumDescriptorProto& before,
                   const EnumDescriptorProto& after, Problems& problems) {
  for (const auto& value : before.value()) {
    const auto* now = find_name(after.value(), value.name());
    if (now == nullptr) {
      problems.push_back(path + "." + value.name() + ": the value is gone");
    } else if (now->number() != value.number()) {
      problems.push_back(path + "." + value.name() + ": another number");
    }
  }
}

void compare_messages(const std::string& path, const DescriptorProto& before,
                      const DescriptorProto& after, Problems& problems) {
  compare_fields(path, before, after, problems);
  for (const DescriptorProto& nested : before.nested_type()) {
    const std::string name = path + "." + nested.name();
    const auto* now = find_name(after.nested_type(), nested.name());
    if (now == nullptr) {
      problems.push_back(name + ": the message is gone");
    } else {
      compare_messages(name, nested, *now, problems);
    }
  }
}

void compare_services(const std::string& path, const ServiceDescriptorProto& before,
                      const ServiceDescriptorProto& after, Problems& problems) {
  for (const MethodDescriptorProto& method : before.method()) {
    const std::string name = path + "." + method.name();
    const auto* now = find_name(after.method(), method.name());
    if (now == nullptr) {
      problems.push_back(name + ": the method is gone");
    } else if (now->input_type() != method.input_type() ||
               now->output_type() != method.output_type()) {
      problems.push_back(name + ": another request or response");
    } else if (now->client_streaming() != method.client_streaming() ||
               now->server_streaming() != method.server_streaming()) {
      problems.push_back(name + ": streams differently");
    }
  }
}

void compare_files(const FileDescriptorProto& before, const FileDescriptorProto& after,
                   Problems& problems) {
  const std::string& file = before.name();
  if (before.package() != after.package()) problems.push_back(file + ": another package");
  for (const auto& message : before.message_type()) {
    const auto* now = find_name(after.message_type(), message.name());
    if (now == nullptr) {
      problems.push_back(message.name() + ": the message is gone from " + file);
    } else {
      compare_messages(message.name(), message, *now, problems);
    }
  }
  for (const auto& type : before.enum_type()) {
    const auto* now = find_name(after.enum_type(), type.name());
    if (now == nullptr) {
      problems.push_back(type.name() + ": the enumeration is gone from " + file);
    } else {
      compare_enums(type.name(), type, *now, problems);
    }
  }
  for (const auto& service : before.service()) {
    const auto* now = find_name(after.service(), service.name());
    if (now == nullptr) {
      problems.push_back(service.name() + ": the service is gone from " + file);
    } else {
      compare_services(service.name(), service, *now, problems);
    }
  }
}

/// "LayerMode" to "LAYER_MODE".
std::string upper_snake(const std::string& name) {
  std::string result;
  for (const char c : name) {
    if (std::isupper(static_cast<unsigned char>(c)) != 0 && !result.empty()) result += '_';
    result += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return result;
}

void check_enum(const EnumDescriptorProto& type, Problems& problems) {
  const std::string prefix = upper_snake(type.name()) + "_";
  for (const auto& value : type.value()) {
    if (!value.name().starts_with(prefix)) {
      problems.push_back(type.name() + "." + value.name() + ": expected the prefix " + prefix);
    }
  }
  if (type.value(0).number() != 0 || type.value(0).name() != prefix + "UNSPECIFIED") {
    problems.push_back(type.name() + ": expected the zero to be " + prefix + "UNSPECIFIED");
  }
}

void check_service(const std::string& package, const ServiceDescriptorProto& service,
                   std::set<std::string>& used, Problems& problems) {
  if (!service.name().ends_with("Service")) {
    problems.push_back(service.name() + ": expected a name that ends in Service");
  }
  for (const auto& method : service.method()) {
    const std::string stem = "." + package + "." + method.name();
    if (method.input_type() != stem + "Request" || method.output_type() != stem + "Response") {
      problems.push_back(service.name() + "." + method.name() +
                         ": expected request and response to be named after the method");
    }
    if (!used.insert(method.input_type()).second) {
      problems.push_back(method.input_type() + ": used by two methods");
    }
  }
}

}  // namespace

std::vector<std::string> breaking_changes(const FileDescriptorSet& before,
                                          const FileDescriptorSet& after) {
  Problems problems;
  for (const FileDescriptorProto& file : before.file()) {
    const auto* now = find_name(after.file(), file.name());
    if (now == nullptr) {
      problems.push_back(file.name() + ": the file is gone");
    } else {
      compare_files(file, *now, problems);
    }
  }
  return problems;
}

std::vector<std::string> naming_problems(const FileDescriptorSet& files) {
  Problems problems;
  std::set<std::string> used;
  for (const FileDescriptorProto& file : files.file()) {
    std::string folder = file.name().substr(0, file.name().rfind('/'));
    std::replace(folder.begin(), folder.end(), '/', '.');
    if (folder != file.package()) {
      problems.push_back(file.name() + ": expected the package of its folder, found " +
                         file.package());
    }
    for (const auto& type : file.enum_type()) check_enum(type, problems);
    for (const auto& service : file.service()) {
      check_service(file.package(), service, used, problems);
    }
  }
  return problems;
}

}  // namespace kvtier::testing
