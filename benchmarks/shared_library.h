#pragma once

#include "kvtier/error.h"

#include <dlfcn.h>
#include <initializer_list>
#include <string>
#include <vector>

namespace kvtier::bench {

/// Opens the first of `names` found in one of `folders`, or by the system's search when there are
/// none. Returns nullptr when there is none; `tried` (optional) then says what was tried.
inline void* open_library(const std::vector<std::string>& folders,
                          std::initializer_list<const char*> names, std::string* tried) {
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    for (const char* name : names) paths.push_back(folder + "/" + name);
  }
  for (const char* name : names) paths.emplace_back(name);
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
    if (tried != nullptr) *tried += (tried->empty() ? "" : "; ") + std::string(dlerror());
  }
  return nullptr;
}

/// Sets `function` to a function of `library`; throws `Error(kNotFound)` when it has none of that
/// name.
template <typename Function>
void bind(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw Error(ErrorCode::kNotFound, std::string("expected the function ") + name +
                                          " in a library loaded at run time, found none");
  }
}

}  // namespace kvtier::bench
