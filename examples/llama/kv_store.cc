#include "llama/kv_store.h"

#include "include/types/failure.h"
#include "llama/runtime_options.h"

#include <climits>

#include <array>
#include <dlfcn.h>
#include <unistd.h>

namespace kvtier::llama {
namespace {

class EmbeddedStore final : public KvStore {
 public:
  explicit EmbeddedStore(const Config& config) : engine_(config) {}
  std::unique_ptr<KvSession> open(std::int64_t capacity_tokens) override {
    return std::make_unique<EmbeddedSession<Session>>(
        engine_.open({.capacity_tokens = capacity_tokens}));
  }
  [[nodiscard]] std::string place() const override { return backend_name(engine_.backend()); }
  [[nodiscard]] Stats stats() const override { return engine_.stats(); }

 private:
  Engine engine_;
};

using MakeRemote = KvStore* (*)(const Config&, const std::string&);

/// The folder of this program, with the slash.
std::string program_folder() {
  std::array<char, PATH_MAX> path{};
  const ssize_t size = ::readlink("/proc/self/exe", path.data(), path.size());
  const std::string program(path.data(), size > 0 ? static_cast<std::size_t>(size) : 0);
  return program.substr(0, program.rfind('/') + 1);
}

// gRPC and what it needs are many times as large as this program, so they are in a module that is
// loaded when a server is asked for. The module is never unloaded: gRPC has threads.
MakeRemote load_remote() {
  constexpr const char* kModule = "kvtier_llama_remote.so";
  const std::string folder = program_folder();
  void* module = nullptr;
  for (const std::string& path : {folder + kModule, folder + "../lib/kvtier/" + kModule}) {
    if (module == nullptr) module = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (module == nullptr) {
    throw_error(ErrorCode::kUnimplemented, "--kv: expected ", kModule,
                " beside the program, found: ", ::dlerror());
  }
  return reinterpret_cast<MakeRemote>(::dlsym(module, "kvtier_llama_make_remote_store"));
}

}  // namespace

std::unique_ptr<KvStore> make_kv_store(const Config& config, const std::string& server) {
  if (server.empty()) return std::make_unique<EmbeddedStore>(config);
  static const MakeRemote make_remote = load_remote();
  if (make_remote == nullptr) {
    throw Error(ErrorCode::kUnimplemented, "--kv: expected the module of this version");
  }
  return std::unique_ptr<KvStore>(make_remote(config, server));
}

}  // namespace kvtier::llama
