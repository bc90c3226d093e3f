#include "formats/safetensors.h"

#include "formats/atomic_file.h"
#include "include/types/failure.h"
#include "include/types/float16.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace kvtier::formats {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kDataAlignment = 64;
constexpr std::size_t kMaxHeaderBytes = std::size_t{100} << 20;
constexpr int kMaxHeaderDepth = 3;  // file, tensor, shape
constexpr std::size_t kMaxNamesInMessage = 32;
constexpr std::string_view kMetadataName = "__metadata__";
using Named = std::pair<std::string_view, DType>;
constexpr std::array<Named, 4> kFormatNames{{{"F32", DType::kFloat32},
                                             {"F16", DType::kFloat16},
                                             {"BF16", DType::kBFloat16},
                                             {"I32", DType::kInt32}}};

template <typename... Parts>
[[noreturn]] void fail(ErrorCode code, const std::filesystem::path& path, const Parts&... parts) {
  throw_error(code, path.string(), ": ", parts...);
}

/// What a message quotes of a file, which may be hostile.
std::string quote(std::string text) {
  constexpr std::size_t kMost = 200;
  if (text.size() > kMost) text.replace(kMost, std::string::npos, "...");
  return text;
}

std::string quote(const json& value) { return quote(value.dump()); }

std::span<const std::byte> map_file(const std::filesystem::path& path) {
  // Without O_NONBLOCK a FIFO would block the caller until a writer opens it.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(ErrorCode::kNotFound, path, std::strerror(errno));
  struct stat status {};
  const bool known = ::fstat(file, &status) == 0;
  const auto bytes = known ? static_cast<std::size_t>(status.st_size) : 0;
  const bool regular = known && S_ISREG(status.st_mode);
  void* data = MAP_FAILED;
  if (regular && bytes >= kLengthBytes) {
    data = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  }
  const int reason = errno;
  ::close(file);
  if (!regular) fail(ErrorCode::kNotFound, path, "expected a regular file, found something else");
  if (bytes < kLengthBytes) {
    fail(ErrorCode::kDataLoss, path, "expected at least ", kLengthBytes, " bytes, found ", bytes);
  }
  if (data == MAP_FAILED) fail(ErrorCode::kNotFound, path, std::strerror(reason));
  return {static_cast<const std::byte*>(data), bytes};
}

/// Parses the header, and refuses what the parser would let pass: a key given twice, and nesting
/// that no header has.
json parse_header(const std::filesystem::path& path, const char* begin, const char* end) {
  std::set<std::string> keys[kMaxHeaderDepth + 1];
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= kMaxHeaderDepth) {
        fail(ErrorCode::kDataLoss, path, "header: expected at most ", kMaxHeaderDepth,
             " levels, found more");
      }
      keys[depth + 1].clear();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys[depth].insert(key).second) {
        fail(ErrorCode::kDataLoss, path, "header: expected each name once, found '", quote(key),
             "' twice");
      }
    }
    return true;
  };
  try {
    return json::parse(begin, end, check);
  } catch (const json::exception& error) {
    fail(ErrorCode::kDataLoss, path, "header: expected JSON, found ",
         quote(std::string(error.what())));
  }
}

/// One entry of the header being read: what an error says about it.
struct Entry {
  const std::filesystem::path& path;
  const std::string& name;
  const json& value;

  template <typename... Parts>
  [[noreturn]] void reject(ErrorCode code, const Parts&... parts) const {
    fail(code, path, "tensor '", quote(name), "': ", parts...);
  }
  [[nodiscard]] const json& member(const char* key) const {
    const auto found = value.find(key);
    if (found == value.end()) {
      reject(ErrorCode::kDataLoss, "expected ", key, ", found none");
    }
    return *found;
  }
  /// Reads an array of integers that fit in int64 and are not negative.
  [[nodiscard]] std::vector<std::int64_t> integers(const char* key) const {
    const json& array = member(key);
    std::vector<std::int64_t> numbers;
    if (!array.is_array()) {
      reject(ErrorCode::kDataLoss, key, ": expected an array, found ", quote(array));
    }
    for (const json& number : array) {
      constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      if (!number.is_number_unsigned() || number.get<std::uint64_t>() > kMost) {
        reject(ErrorCode::kDataLoss, key, ": expected integers from 0 to 2^63 - 1, found ",
               quote(number));
      }
      numbers.push_back(number.get<std::int64_t>());
    }
    return numbers;
  }
  [[nodiscard]] DType dtype() const {
    const json& dtype = member("dtype");
    if (!dtype.is_string()) {
      reject(ErrorCode::kDataLoss, "dtype: expected a string, found ", quote(dtype));
    }
    const auto& name_found = dtype.get_ref<const std::string&>();
    for (const auto& [format_name, type] : kFormatNames) {
      if (name_found == format_name) return type;
    }
    reject(ErrorCode::kInvalidArgument, "dtype: expected F32, F16, BF16 or I32, found ",
           quote(name_found));
  }
};

std::optional<std::int64_t> checked_bytes(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return std::nullopt;
  }
  if (__builtin_mul_overflow(product, static_cast<std::int64_t>(dtype_bytes(dtype)), &product)) {
    return std::nullopt;
  }
  return product;
}

struct Placed {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const std::string* name = nullptr;
};

/// Reads one entry; the place of its bytes goes to `placed`.
Tensor read_entry(const Entry& entry, std::int64_t data_bytes, Placed& placed) {
  if (!entry.value.is_object()) {
    entry.reject(ErrorCode::kDataLoss, "expected an object, found ", quote(entry.value));
  }
  Tensor tensor;
  tensor.dtype = entry.dtype();
  tensor.shape = entry.integers("shape");
  const std::optional<std::int64_t> bytes = checked_bytes(tensor.shape, tensor.dtype);
  if (!bytes) {
    entry.reject(ErrorCode::kDataLoss, "shape: expected fewer than 2^63 bytes, found ",
                 quote(entry.member("shape")));
  }
  const std::vector<std::int64_t> offsets = entry.integers("data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    entry.reject(ErrorCode::kDataLoss, "data_offsets: expected begin <= end <= ", data_bytes,
                 ", found ", quote(entry.member("data_offsets")));
  }
  if (offsets[1] - offsets[0] != *bytes) {
    entry.reject(ErrorCode::kDataLoss, "data_offsets: expected the ", *bytes,
                 " bytes of its shape, found ", offsets[1] - offsets[0]);
  }
  tensor.bytes = static_cast<std::size_t>(*bytes);
  placed = {offsets[0], offsets[1], &entry.name};
  return tensor;
}

std::map<std::string, std::string, std::less<>> read_metadata(const std::filesystem::path& path,
                                                              const json& value) {
  try {
    return value.get<std::map<std::string, std::string, std::less<>>>();
  } catch (const json::exception&) {
    fail(ErrorCode::kDataLoss, path, "__metadata__: expected an object of strings, found ",
         quote(value));
  }
}

/// The tensors have to cover the data exactly.
void check_coverage(const std::filesystem::path& path, std::vector<Placed> placed,
                    std::int64_t data_bytes) {
  std::ranges::sort(placed, [](const Placed& a, const Placed& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t covered = 0;
  for (const Placed& one : placed) {
    if (one.begin != covered) {
      fail(ErrorCode::kDataLoss, path, "tensor '", quote(*one.name), "': expected its data at ",
           covered, one.begin < covered ? ", found an overlap at " : ", found a hole up to ",
           one.begin);
    }
    covered = one.end;
  }
  if (covered != data_bytes) {
    fail(ErrorCode::kDataLoss, path, "expected ", covered, " bytes of data, found ", data_bytes);
  }
}

/// A tensor to be written, by its name.
using Stored = std::pair<const std::string, Tensor>;

void check_tensor(const std::string& name, const Tensor& tensor) {
  const std::optional<std::int64_t> bytes = checked_bytes(tensor.shape, tensor.dtype);
  if (!bytes || static_cast<std::uint64_t>(*bytes) != tensor.bytes ||
      (tensor.bytes > 0 && tensor.data == nullptr)) {
    throw_invalid("tensor '" + name + "'", "the bytes of its shape", tensor.bytes);
  }
  if (name == kMetadataName) throw_invalid("tensor name", "any but __metadata__", name);
}

/// Wide elements first: then each tensor is aligned to its elements without padding.
std::vector<const Stored*> in_file_order(const std::map<std::string, Tensor>& tensors) {
  std::vector<const Stored*> order;
  for (const Stored& entry : tensors) order.push_back(&entry);
  std::ranges::stable_sort(order, [](const Stored* a, const Stored* b) {
    return dtype_bytes(a->second.dtype) > dtype_bytes(b->second.dtype);
  });
  return order;
}

/// Returns the length and the JSON, padded with blanks.
std::string make_header(const std::vector<const Stored*>& order,
                        const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header[std::string(kMetadataName)] = metadata;
  std::uint64_t offset = 0;
  for (const auto* entry : order) {
    const Tensor& tensor = entry->second;
    header[entry->first] = {
        {"dtype", std::ranges::find(kFormatNames, tensor.dtype, &Named::second)->first},
        {"shape", tensor.shape},
        {"data_offsets", {offset, offset + tensor.bytes}}};
    offset += tensor.bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& error) {
    throw_invalid("names and metadata", "UTF-8", error.what());
  }
  const std::size_t end = kLengthBytes + text.size();
  text.append((kDataAlignment - end % kDataAlignment) % kDataAlignment, ' ');
  const auto length = static_cast<std::uint64_t>(text.size());
  std::string head(kLengthBytes, '\0');
  std::memcpy(head.data(), &length, kLengthBytes);
  return head + text;
}

}  // namespace

std::int64_t Tensor::elements() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? std::string("any") : std::to_string(shape[i]);
  }
  return text + "]";
}

std::string describe(const Tensor& tensor) {
  return join(dtype_name(tensor.dtype), " ", shape_text(tensor.shape));
}

std::vector<float> to_float(const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  with_float_type(tensor.dtype, [&]<typename Float>(Float) {
    std::transform(tensor.as<Float>(), tensor.as<Float>() + values.size(), values.begin(),
                   [](Float value) { return value.to_float(); });
  });
  return values;
}

SafeTensors SafeTensors::open(const std::filesystem::path& path) {
  SafeTensors file;
  file.path_ = path;
  const std::span<const std::byte> mapping = map_file(path);
  file.mapping_ = {mapping.data(), Unmap{mapping.size()}};

  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping.data(), kLengthBytes);
  const std::size_t most = std::min(mapping.size() - kLengthBytes, kMaxHeaderBytes);
  if (header_bytes > most) {
    fail(ErrorCode::kDataLoss, path, "expected a safetensors file, with a header of at most ", most,
         " bytes, found one of ", header_bytes);
  }
  const char* begin = reinterpret_cast<const char*>(mapping.data() + kLengthBytes);
  const json header = parse_header(path, begin, begin + header_bytes);
  if (!header.is_object()) {
    fail(ErrorCode::kDataLoss, path, "header: expected an object, found something else");
  }

  const std::byte* data = mapping.data() + kLengthBytes + header_bytes;
  const auto data_bytes = static_cast<std::int64_t>(mapping.size() - kLengthBytes -
                                                    static_cast<std::size_t>(header_bytes));
  std::vector<Placed> all;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataName) {
      file.metadata_ = read_metadata(path, value);
      continue;
    }
    Placed placed;
    Tensor tensor = read_entry({path, name, value}, data_bytes, placed);
    tensor.data = data + placed.begin;
    const auto [where, inserted] = file.tensors_.emplace(name, std::move(tensor));
    placed.name = &where->first;
    all.push_back(placed);
  }
  check_coverage(path, std::move(all), data_bytes);

  for (auto& [name, tensor] : file.tensors_) {
    if (tensor.bytes == 0) tensor.data = mapping.data();
    if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(tensor.dtype) == 0) continue;
    file.aligned_copies_.emplace_back(tensor.data, tensor.data + tensor.bytes);
    tensor.data = file.aligned_copies_.back().data();
  }
  return file;
}

void SafeTensors::Unmap::operator()(const std::byte* data) const noexcept {
  ::munmap(const_cast<std::byte*>(data), bytes);
}

const Tensor& SafeTensors::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;

  std::string names;
  std::size_t listed = 0;
  for (const auto& [other, tensor] : tensors_) {
    if (listed == kMaxNamesInMessage) break;
    names += (listed++ == 0 ? "" : ", ") + other;
  }
  if (listed < tensors_.size()) names += ", ... (" + std::to_string(tensors_.size()) + " in all)";
  fail(ErrorCode::kNotFound, path_, "expected tensor '", name,
       "', found: ", listed == 0 ? "none" : names);
}

bool SafeTensors::contains(std::string_view name) const { return tensors_.contains(name); }

const Tensor& SafeTensors::at(std::string_view name, DType dtype,
                              const std::vector<std::int64_t>& shape) const {
  const Tensor& tensor = at(name);
  const bool fits = std::ranges::equal(
      shape, tensor.shape,
      [](std::int64_t wanted, std::int64_t found) { return wanted == -1 || wanted == found; });
  if (tensor.dtype != dtype || !fits) {
    fail(ErrorCode::kInvalidArgument, path_, "tensor '", name, "': expected ", dtype_name(dtype),
         " ", shape_text(shape), ", found ", describe(tensor));
  }
  return tensor;
}

void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, tensor] : tensors) check_tensor(name, tensor);
  const std::vector<const Stored*> order = in_file_order(tensors);
  const std::string header = make_header(order, metadata);

  AtomicFile file(path);
  file.write(header);
  for (const Stored* entry : order) {
    file.write({reinterpret_cast<const char*>(entry->second.data), entry->second.bytes});
  }
  file.commit();
}

}  // namespace kvtier::formats
