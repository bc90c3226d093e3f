#include "benchmarks/tiers/fio.h"

#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <stdexcept>

namespace kvtier::bench {
namespace {

std::string output_of(const std::string& command) {
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("fio: expected a process, found none");
  std::string text;
  std::array<char, 4096> buffer{};
  for (std::size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    text.append(buffer.data(), got);
  }
  if (::pclose(pipe) != 0) {
    throw std::runtime_error("expected fio (apt package fio) to read, found: " + text);
  }
  return text;
}

}  // namespace

double fio_read(const FioSettings& settings) {
  // Sizes of a job are one thread's.
  const std::size_t jobs = settings.uring ? 1 : settings.depth;
  std::string names;
  for (const auto& file : settings.files) names += (names.empty() ? "" : ":") + file.string();
  const std::string command =
      "fio --name=pages --readonly --rw=randread --randrepeat=0 --norandommap --group_reporting "
      "--output-format=json --filename='" +
      names + "' --bs=" + std::to_string(settings.block_bytes) +
      " --io_size=" + std::to_string(settings.total_bytes / jobs) +
      " --direct=" + (settings.direct ? "1" : "0") +
      (settings.uring
           ? " --ioengine=io_uring --fixedbufs --iodepth=" + std::to_string(settings.depth)
           : " --ioengine=psync --thread --numjobs=" + std::to_string(jobs));
  const std::string text = output_of(command);
  const std::size_t begin = text.find('{');
  if (begin == std::string::npos) throw std::runtime_error("fio: expected JSON, found " + text);
  return nlohmann::json::parse(text.substr(begin)).at("jobs").at(0).at("read").at("bw_bytes");
}

std::string fio_version() {
  const std::string text = output_of("fio --version");
  return text.substr(0, text.find('\n'));
}

}  // namespace kvtier::bench
