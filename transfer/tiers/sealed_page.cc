#include "transfer/tiers/sealed_page.h"

#include "kvtier/error.h"

#include "include/types/failure.h"
#include "transfer/tiers/hmac_sha256.h"

#include <algorithm>
#include <cstring>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

namespace kvtier::tiers {
namespace {

constexpr std::uint32_t kMagic = 0x3150564b;  // "KVP1"
constexpr std::size_t kHeaderBytes = 36;
constexpr std::size_t kTagBytes = 16;
constexpr std::size_t kNameBytes = 24;
static_assert(PageSealer::kOverhead == kHeaderBytes + kTagBytes);

using Digest = HmacSha256::Digest;
using Header = std::array<unsigned char, kHeaderBytes>;

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};
using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, Deleter<EVP_CIPHER_CTX_free>>;

/// A digest that is wiped when it goes.
struct SecretDigest {
  Digest bytes{};

  SecretDigest() = default;
  ~SecretDigest() { OPENSSL_cleanse(bytes.data(), bytes.size()); }
  SecretDigest(const SecretDigest&) = delete;  // one place to wipe
  SecretDigest& operator=(const SecretDigest&) = delete;
};

const unsigned char* raw(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}
unsigned char* raw(std::span<std::byte> bytes) {
  return reinterpret_cast<unsigned char*>(bytes.data());
}

void store(unsigned char* to, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
}

Header header_of(const PagePart& part, const Generation& generation) {
  Header header{};
  store(header.data(), kMagic, 4);
  store(header.data() + 4, part.index, 4);
  store(header.data() + 8, part.num_parts, 4);
  store(header.data() + 12, part.page_bytes, 8);
  std::copy(generation.begin(), generation.end(), header.begin() + 20);
  return header;
}

[[noreturn]] void fail(const char* what) {
  throw_error(ErrorCode::kUnavailable, "sealed pages: expected ", what,
              " from OpenSSL, found none");
}

void derive(std::string_view tenant, std::string_view purpose, std::span<const std::byte> secret,
            Digest& key) {
  const std::unique_ptr<EVP_KDF, Deleter<EVP_KDF_free>> kdf(
      EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const std::unique_ptr<EVP_KDF_CTX, Deleter<EVP_KDF_CTX_free>> context(EVP_KDF_CTX_new(kdf.get()));
  std::string digest = "SHA256";
  std::string salt = "kvtier remote tier 1";
  std::string info = std::string(purpose) + '\0' + std::string(tenant);
  std::vector<unsigned char> material(raw(secret), raw(secret) + secret.size());
  const std::array<OSSL_PARAM, 5> parameters{
      OSSL_PARAM_construct_utf8_string("digest", digest.data(), 0),
      OSSL_PARAM_construct_octet_string("key", material.data(), material.size()),
      OSSL_PARAM_construct_octet_string("salt", salt.data(), salt.size()),
      OSSL_PARAM_construct_octet_string("info", info.data(), info.size()),
      OSSL_PARAM_construct_end()};
  const bool derived =
      context && EVP_KDF_derive(context.get(), key.data(), key.size(), parameters.data()) == 1;
  OPENSSL_cleanse(material.data(), material.size());
  if (!derived) fail("HKDF-SHA256");
}

/// HMAC-SHA256 of a page's key and bytes.
class Mac {
 public:
  void set_key(const Digest& key) {
    if (!hmac_.set_key(key)) fail("HMAC-SHA256");
  }

  void compute(const PageKey& page, std::span<const std::uint8_t> rest, Digest& digest) const {
    if (!hmac_.compute(page, rest, digest)) fail("memory for a MAC");
  }

 private:
  HmacSha256 hmac_;
};

}  // namespace

struct PageSealer::Keys {
  Mac names, pages;
  std::unique_ptr<EVP_CIPHER, Deleter<EVP_CIPHER_free>> cipher;

  /// A context for one part, after its associated data.
  CipherContext begin(const PageKey& page, std::uint32_t index, const Generation& generation,
                      std::span<const unsigned char> header, bool encrypt) const {
    SecretDigest key;
    pages.compute(page, generation, key.bytes);
    std::array<unsigned char, 12> nonce{};
    store(nonce.data(), index, 4);
    CipherContext context(EVP_CIPHER_CTX_new());
    int size = 0;
    if (!context ||
        EVP_CipherInit_ex2(context.get(), cipher.get(), key.bytes.data(), nonce.data(),
                           encrypt ? 1 : 0, nullptr) != 1 ||
        EVP_CipherUpdate(context.get(), nullptr, &size, page.data(),
                         static_cast<int>(page.size())) != 1 ||
        EVP_CipherUpdate(context.get(), nullptr, &size, header.data(),
                         static_cast<int>(header.size())) != 1) {
      fail("memory for AES-256-GCM");
    }
    return context;
  }

  /// Whether the tag is right, the plain text then being in `bytes`.
  bool authentic(const PageKey& page, std::uint32_t index, std::span<const std::byte> sealed,
                 std::span<std::byte> bytes) const {
    Generation generation;
    std::copy_n(raw(sealed) + 20, generation.size(), generation.begin());
    const CipherContext context =
        begin(page, index, generation, {raw(sealed), kHeaderBytes}, /*encrypt=*/false);
    std::array<unsigned char, kTagBytes> tag;
    std::copy_n(raw(sealed.last(kTagBytes)), kTagBytes, tag.begin());
    int size = 0;
    std::array<unsigned char, 16> rest{};
    return EVP_CipherUpdate(context.get(), raw(bytes), &size, raw(sealed.subspan(kHeaderBytes)),
                            static_cast<int>(bytes.size())) == 1 &&
           EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag.data()) == 1 &&
           EVP_CipherFinal_ex(context.get(), rest.data(), &size) == 1;
  }
};

Generation draw_generation() {
  Generation generation{};
  if (RAND_bytes(generation.data(), static_cast<int>(generation.size())) != 1) fail("random bytes");
  return generation;
}

PageSealer::PageSealer(std::string_view tenant, std::span<const std::byte> secret)
    : keys_(std::make_unique<Keys>()) {
  if (tenant.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "sealed pages: expected a tenant's name, found none");
  }
  if (secret.size() < kMinSecretBytes) {
    throw_error(ErrorCode::kInvalidArgument, "sealed pages: expected a secret of at least ",
                kMinSecretBytes, " bytes, found ", secret.size());
  }
  SecretDigest key;
  derive(tenant, "names", secret, key.bytes);
  keys_->names.set_key(key.bytes);
  derive(tenant, "pages", secret, key.bytes);
  keys_->pages.set_key(key.bytes);
  keys_->cipher.reset(EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr));
  if (!keys_->cipher) fail("AES-256-GCM");
}

PageSealer::~PageSealer() = default;

std::string PageSealer::name(const PageKey& page, std::uint32_t index) const {
  std::array<std::uint8_t, 4> part{};
  store(part.data(), index, 4);
  Digest digest{};
  keys_->names.compute(page, part, digest);
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string name = "kvtier:";
  for (std::size_t i = 0; i < kNameBytes; ++i) {
    name += kDigits[digest[i] >> 4];
    name += kDigits[digest[i] & 15];
  }
  return name;
}

std::vector<std::byte> PageSealer::seal(const PagePart& part, const Generation& generation,
                                        std::span<const std::byte> bytes) const {
  const Header header = header_of(part, generation);
  std::vector<std::byte> sealed(kOverhead + bytes.size());
  std::memcpy(sealed.data(), header.data(), header.size());
  const CipherContext context =
      keys_->begin(part.page, part.index, generation, header, /*encrypt=*/true);
  unsigned char* const text = raw(std::span(sealed)) + kHeaderBytes;
  unsigned char* const tag = text + bytes.size();
  int size = 0;
  if (EVP_CipherUpdate(context.get(), text, &size, raw(bytes), static_cast<int>(bytes.size())) !=
          1 ||
      EVP_CipherFinal_ex(context.get(), tag, &size) != 1 ||
      EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag) != 1) {
    fail("an AES-256-GCM seal");
  }
  return sealed;
}

TierStatus PageSealer::open(const PagePart& part, std::span<const std::byte> sealed,
                            std::span<std::byte> bytes, Generation& generation,
                            const Generation* expected) const {
  if (sealed.size() < kOverhead) return TierStatus::kCorrupt;
  Generation found;
  std::copy_n(raw(sealed) + 20, found.size(), found.begin());
  const Header header = header_of(part, found);
  const bool as_asked = std::equal(header.begin(), header.end(), raw(sealed)) &&
                        sealed.size() == kOverhead + bytes.size() &&
                        (expected == nullptr || *expected == found);
  if (as_asked) {
    if (!keys_->authentic(part.page, part.index, sealed, bytes)) return TierStatus::kCorrupt;
    generation = found;
    return TierStatus::kOk;
  }
  // Another put's, or another geometry's, or of no put: the tag says so.
  std::vector<std::byte> scratch(sealed.size() - kOverhead);
  const bool same_part = std::equal(header.begin(), header.begin() + 8, raw(sealed));
  return same_part && keys_->authentic(part.page, part.index, sealed, scratch)
             ? TierStatus::kMiss
             : TierStatus::kCorrupt;
}

}  // namespace kvtier::tiers
