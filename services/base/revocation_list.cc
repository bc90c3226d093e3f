#include "services/base/revocation_list.h"

#include "kvtier/error.h"

#include <algorithm>
#include <array>
#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <vector>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxAnswers = 1024;

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};
using Bio = std::unique_ptr<BIO, Deleter<BIO_free>>;
using Certificate = std::unique_ptr<X509, Deleter<X509_free>>;
using Crl = std::unique_ptr<X509_CRL, Deleter<X509_CRL_free>>;

[[noreturn]] void bad(const std::string& expected, const std::string& found) {
  throw Error(ErrorCode::kInvalidArgument,
              "tls-client-crl: expected " + expected + ", found " + found);
}

/// Reads every object of one kind.
template <typename Pointer, auto Read>
std::vector<Pointer> read_all(const std::string& pem) {
  const Bio text(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  std::vector<Pointer> all;
  while (text) {
    Pointer next(Read(text.get(), nullptr, nullptr, nullptr));
    if (!next) break;
    all.push_back(std::move(next));
  }
  return all;
}

std::string name_of(const X509_NAME* name) {
  std::array<char, 256> text{};
  X509_NAME_oneline(name, text.data(), static_cast<int>(text.size()));
  return text.data();
}

bool is_signed_by(X509_CRL* list, X509* authority) {
  return X509_NAME_cmp(X509_CRL_get_issuer(list), X509_get_subject_name(authority)) == 0 &&
         X509_CRL_verify(list, X509_get0_pubkey(authority)) == 1;
}

/// Returns when a list is to be replaced; 0: it does not say.
std::time_t check(X509_CRL* list, const std::vector<Certificate>& authorities) {
  const std::string issuer = name_of(X509_CRL_get_issuer(list));
  if (std::ranges::none_of(authorities,
                           [&](const auto& one) { return is_signed_by(list, one.get()); })) {
    bad("lists that a client CA has signed", "one of " + issuer + " that none has");
  }
  if (X509_cmp_current_time(X509_CRL_get0_lastUpdate(list)) > 0) {
    bad("lists that are valid now", "one of " + issuer + " that begins later");
  }
  const ASN1_TIME* end = X509_CRL_get0_nextUpdate(list);
  std::tm time{};
  if (end == nullptr || ASN1_TIME_to_tm(end, &time) != 1) return 0;
  if (X509_cmp_current_time(end) < 0) {
    bad("lists that are valid now", "one of " + issuer + " that has expired");
  }
  return ::timegm(&time);
}

}  // namespace

struct RevocationList::Lists {
  std::vector<Crl> all;
};

RevocationList::RevocationList(const std::string& lists, const std::string& authorities)
    : lists_(std::make_unique<const Lists>(Lists{read_all<Crl, PEM_read_bio_X509_CRL>(lists)})) {
  if (lists_->all.empty()) bad("revocation lists in PEM", "none");
  const auto issuers = read_all<Certificate, PEM_read_bio_X509>(authorities);
  for (const Crl& list : lists_->all) {
    const std::time_t end = check(list.get(), issuers);
    if (end != 0 && (next_update_ == 0 || end < next_update_)) next_update_ = end;
  }
}

RevocationList::~RevocationList() = default;

bool RevocationList::has(const std::string& certificate) const {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = answers_.find(certificate); known != answers_.end()) {
      return known->second;
    }
  }
  const auto read = read_all<Certificate, PEM_read_bio_X509>(certificate);
  const bool is_revoked =
      read.empty() || std::ranges::any_of(lists_->all, [&](const Crl& list) {
        X509_REVOKED* entry = nullptr;
        return X509_NAME_cmp(X509_CRL_get_issuer(list.get()),
                             X509_get_issuer_name(read.front().get())) == 0 &&
               X509_CRL_get0_by_cert(list.get(), &entry, read.front().get()) == 1;
      });
  const std::lock_guard lock(mutex_);
  if (answers_.size() >= kMaxAnswers) answers_.clear();
  answers_[certificate] = is_revoked;
  return is_revoked;
}

}  // namespace kvtier::services
