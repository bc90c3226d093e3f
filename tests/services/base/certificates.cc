#include "tests/services/base/certificates.h"

#include <cstdio>
#include <fstream>
#include <memory>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <random>
#include <sstream>
#include <stdexcept>

namespace kvtier::services::testing {
namespace {

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY_free>>;
using X509Pointer = std::unique_ptr<X509, Deleter<X509_free>>;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

File open_file(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode));
  if (!file) throw std::runtime_error("cannot open " + path);
  return file;
}

void extend(X509& certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, &certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  if (extension == nullptr) throw std::runtime_error("no extension " + value);
  X509_add_ext(&certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509Pointer make_certificate(const std::string& name, EVP_PKEY* key, X509* issuer,
                             long seconds = 86400) {
  X509Pointer certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()),
                   static_cast<long>(std::random_device{}() & 0x7FFFFFFFU));
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), seconds);
  X509_set_pubkey(certificate.get(), key);
  X509_NAME* subject = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(certificate.get(),
                       issuer != nullptr ? X509_get_subject_name(issuer) : subject);
  return certificate;
}

void write(const Certificate& files, X509* certificate, EVP_PKEY* key) {
  PEM_write_X509(open_file(files.certificate, "w").get(), certificate);
  PEM_write_PrivateKey(open_file(files.key, "w").get(), key, nullptr, nullptr, 0, nullptr, nullptr);
}

}  // namespace

std::string read_pem(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

Authority::Authority(const std::filesystem::path& folder, const std::string& name)
    : folder_(folder),
      name_(name),
      own_{(folder / (name + ".pem")).string(), (folder / (name + ".key")).string()} {
  const Key key(EVP_EC_gen("P-256"));
  const X509Pointer certificate = make_certificate(name, key.get(), nullptr);
  extend(*certificate, certificate.get(), NID_basic_constraints, "critical,CA:TRUE");
  X509_sign(certificate.get(), key.get(), EVP_sha256());
  write(own_, certificate.get(), key.get());
}

Certificate Authority::issue(const std::string& dns_name, long seconds) const {
  const X509Pointer issuer(
      PEM_read_X509(open_file(own_.certificate, "r").get(), nullptr, nullptr, nullptr));
  const Key issuer_key(
      PEM_read_PrivateKey(open_file(own_.key, "r").get(), nullptr, nullptr, nullptr));
  const Key key(EVP_EC_gen("P-256"));
  const X509Pointer certificate = make_certificate(dns_name, key.get(), issuer.get(), seconds);
  extend(*certificate, issuer.get(), NID_subject_alt_name,
         "DNS:" + dns_name + (dns_name == "localhost" ? ",IP:127.0.0.1" : ""));
  X509_sign(certificate.get(), issuer_key.get(), EVP_sha256());
  const std::string stem = (folder_ / (name_ + "-" + dns_name)).string();
  Certificate files{stem + ".pem", stem + ".key"};
  write(files, certificate.get(), key.get());
  return files;
}

std::string Authority::revoke(const std::vector<Certificate>& certificates, long seconds) const {
  const X509Pointer issuer(
      PEM_read_X509(open_file(own_.certificate, "r").get(), nullptr, nullptr, nullptr));
  const Key key(PEM_read_PrivateKey(open_file(own_.key, "r").get(), nullptr, nullptr, nullptr));
  const std::unique_ptr<X509_CRL, Deleter<X509_CRL_free>> list(X509_CRL_new());
  X509_CRL_set_version(list.get(), 1);
  X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(issuer.get()));
  const std::unique_ptr<ASN1_TIME, Deleter<ASN1_TIME_free>> time(ASN1_TIME_new());
  X509_gmtime_adj(time.get(), -3600);
  X509_CRL_set1_lastUpdate(list.get(), time.get());
  for (const Certificate& files : certificates) {
    const X509Pointer certificate(
        PEM_read_X509(open_file(files.certificate, "r").get(), nullptr, nullptr, nullptr));
    X509_REVOKED* entry = X509_REVOKED_new();
    X509_REVOKED_set_serialNumber(entry, X509_get_serialNumber(certificate.get()));
    X509_REVOKED_set_revocationDate(entry, time.get());
    X509_CRL_add0_revoked(list.get(), entry);
  }
  X509_gmtime_adj(time.get(), seconds);
  X509_CRL_set1_nextUpdate(list.get(), time.get());
  X509_CRL_sort(list.get());
  X509_CRL_sign(list.get(), key.get(), EVP_sha256());
  std::string path = (folder_ / (name_ + ".crl")).string();
  PEM_write_X509_CRL(open_file(path, "w").get(), list.get());
  return path;
}

}  // namespace kvtier::services::testing
