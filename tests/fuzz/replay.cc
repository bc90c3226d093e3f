// Runs a fuzz target over files: the corpus, or an input that libFuzzer has found. With --mutate it
// goes on for so long with inputs made of these, by chance and without a look at what they reach;
// the one at work is in the file of --last, which is what to run again when the program ends.
//
//   TARGET [--mutate SECONDS --last FILE] FILE_OR_FOLDER...

#include "tests/fuzz/fuzz.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

constexpr std::size_t kMaxBytes = 8192;

using Random = std::mt19937_64;
using Bytes = std::vector<char>;

void run(const Bytes& bytes) {
  (void)LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

/// Changes one thing.
void mutate(Bytes& bytes, const Bytes& other, Random& random) {
  const auto below = [&random](std::size_t bound) { return bound == 0 ? 0 : random() % bound; };
  const auto at = [](Bytes& in, std::size_t i) {
    return in.begin() + static_cast<std::ptrdiff_t>(i);
  };
  const std::size_t first = below(bytes.size() + 1);
  const std::size_t end = first + below(std::min<std::size_t>(bytes.size() - first, 64) + 1);
  switch (below(6)) {
    case 0:
      if (first < bytes.size())
        bytes[first] = static_cast<char>(bytes[first] ^ static_cast<char>(1U << below(8)));
      break;
    case 1: {
      constexpr char kEdges[] = {0, 1, 2, 0x10, 0x7F, '\x80', '\xFE', '\xFF'};
      if (first < bytes.size()) bytes[first] = kEdges[below(sizeof(kEdges))];
      break;
    }
    case 2:
      bytes.erase(at(bytes, first), at(bytes, end));
      break;
    case 3: {
      const Bytes part(at(bytes, first), at(bytes, end));
      bytes.insert(at(bytes, below(bytes.size() + 1)), part.begin(), part.end());
      break;
    }
    case 4: {
      Bytes part(1 + below(8));
      for (char& byte : part) byte = static_cast<char>(random());
      bytes.insert(at(bytes, first), part.begin(), part.end());
      break;
    }
    default:
      bytes.resize(first);
      bytes.insert(bytes.end(),
                   other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)),
                   other.end());
  }
  if (bytes.size() > kMaxBytes) bytes.resize(kMaxBytes);
}

/// A file that has the input at work, whatever becomes of the program meanwhile.
class LastInput {
 public:
  explicit LastInput(const std::string& path)
      : fd_(::open(path.c_str(), O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0600)) {}
  ~LastInput() { ::close(fd_); }
  LastInput(const LastInput&) = delete;  // owns a descriptor
  LastInput& operator=(const LastInput&) = delete;

  /// Returns whether it is written.
  bool keep(const Bytes& bytes) const {
    const auto size = static_cast<off_t>(bytes.size());
    return ::pwrite(fd_, bytes.data(), bytes.size(), 0) == size && ::ftruncate(fd_, size) == 0;
  }

 private:
  int fd_;
};

/// Returns whether it could keep the input at work.
bool mutate_for(std::chrono::seconds time, const std::string& last,
                const std::vector<Bytes>& corpus) {
  Random random(std::random_device{}());
  const LastInput file(last);
  std::size_t count = 0;
  const auto end = std::chrono::steady_clock::now() + time;
  for (; std::chrono::steady_clock::now() < end; ++count) {
    Bytes bytes = corpus[random() % corpus.size()];
    for (std::size_t i = 1 + random() % 6; i > 0; --i) {
      mutate(bytes, corpus[random() % corpus.size()], random);
    }
    if (!file.keep(bytes)) {
      std::cerr << "expected a file that can be written, found " << last << '\n';
      return false;
    }
    run(bytes);
  }
  std::cout << count << " inputs made of them\n";
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::chrono::seconds time{0};
  std::string last;
  if (arguments.size() > 4 && arguments[0] == "--mutate" && arguments[2] == "--last") {
    time = std::chrono::seconds(std::stoi(arguments[1]));
    last = arguments[3];
    arguments.erase(arguments.begin(), arguments.begin() + 4);
  }
  std::vector<fs::path> files;
  for (const fs::path path : arguments) {
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
      files.push_back(entry.path());
    }
  }
  std::vector<Bytes> corpus;
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file) {
      std::cerr << "expected a readable file, found " << path << '\n';
      return 1;
    }
    std::cerr << path.filename().string() << '\n';  // the last one named is the one that failed
    run(corpus.back());
  }
  std::cout << files.size() << " inputs\n";
  if (files.empty()) return 1;
  if (time.count() > 0 && !mutate_for(time, last, corpus)) return 1;
  return 0;
}
