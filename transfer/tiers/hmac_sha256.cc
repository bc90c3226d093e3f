#include "transfer/tiers/hmac_sha256.h"

#include <openssl/evp.h>
#include <openssl/params.h>
#include <string>

namespace kvtier::tiers {

void HmacSha256::Free::operator()(evp_mac_ctx_st* context) const { EVP_MAC_CTX_free(context); }

bool HmacSha256::set_key(std::span<const unsigned char> key,
                         std::span<const unsigned char> prefix) {
  EVP_MAC* const algorithm = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  keyed_.reset(EVP_MAC_CTX_new(algorithm));
  EVP_MAC_free(algorithm);  // the context holds it
  std::string digest = "SHA256";
  const std::array<OSSL_PARAM, 2> parameters{
      OSSL_PARAM_construct_utf8_string("digest", digest.data(), 0), OSSL_PARAM_construct_end()};
  return keyed_ && EVP_MAC_init(keyed_.get(), key.data(), key.size(), parameters.data()) == 1 &&
         EVP_MAC_update(keyed_.get(), prefix.data(), prefix.size()) == 1;
}

bool HmacSha256::compute(std::span<const unsigned char> first,
                         std::span<const unsigned char> second, Digest& digest) const {
  const Context context(EVP_MAC_CTX_dup(keyed_.get()));
  std::size_t size = 0;
  return context && EVP_MAC_update(context.get(), first.data(), first.size()) == 1 &&
         EVP_MAC_update(context.get(), second.data(), second.size()) == 1 &&
         EVP_MAC_final(context.get(), digest.data(), &size, digest.size()) == 1 &&
         size == digest.size();
}

}  // namespace kvtier::tiers
