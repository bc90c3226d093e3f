// Handles: none that the server has not made is ever valid.

#include "services/base/handle.h"
#include "tests/fuzz/fuzz.h"

#include <cstring>
#include <string>

namespace {

using kvtier::fuzz::Input;
using kvtier::fuzz::require;
using kvtier::services::DecodedHandle;
using kvtier::services::HandleCodec;
using kvtier::services::HandleFields;
using kvtier::services::HandleState;

std::uint32_t take_u32(Input& input) {
  std::uint32_t value = 0;
  const std::string_view bytes = input.take(sizeof(value));
  std::memcpy(&value, bytes.data(), bytes.size());
  return value;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const HandleCodec codec("fuzz");
  static const HandleCodec other("other");
  Input input(data, size);

  // As it stands: valid only if it is what the codec writes for these fields.
  const DecodedHandle found = codec.decode(input.rest());
  if (found.state == HandleState::kValid) {
    require(codec.encode(found.fields) == input.rest(), "a valid handle is one that was made");
  }

  HandleFields fields;
  fields.tenant = take_u32(input);
  fields.slot = take_u32(input);
  fields.generation = take_u32(input);
  std::string handle = codec.encode(fields);
  require(handle.size() == HandleCodec::kCharacters, "a handle has 32 characters");
  const DecodedHandle read = codec.decode(handle);
  require(read.state == HandleState::kValid && read.fields == fields, "a handle is read back");
  require(other.decode(handle).state != HandleState::kValid, "kinds of handles are apart");

  // Changed by what is left of the input.
  const std::string before = handle;
  const std::string_view changes = input.rest().substr(0, handle.size());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    handle[i] = static_cast<char>(handle[i] ^ changes[i]);
  }
  const bool same = handle == before;
  require((codec.decode(handle).state == HandleState::kValid) == same,
          "a handle that was changed is not valid");
  require(codec.decode(handle + "A").state == HandleState::kForged, "a longer one is forged");
  return 0;
}
