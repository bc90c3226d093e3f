#include "services/base/tenants.h"

#include "services/base/secrets.h"
#include "services/base/service_error.h"

#include <nlohmann/json.hpp>

#include <absl/strings/escaping.h>
#include <algorithm>
#include <map>
#include <set>

namespace kvtier::services {
namespace {

constexpr std::size_t kMaxTenants = 4096;
constexpr std::size_t kMaxToken = 4096;

bool all_in(std::string_view text, std::string_view alphabet) {
  return text.find_first_not_of(alphabet) == std::string_view::npos;
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= 64 &&
         all_in(text, "abcdefghijklmnopqrstuvwxyz0123456789_.-");
}

[[noreturn]] void bad(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "tenants: " + what);
}

ServiceError unauthenticated() {
  return {Code::kUnauthenticated, "UNAUTHENTICATED", "expected the credentials of a tenant"};
}

TenantConfig tenant_of(const nlohmann::json& entry) {
  if (!entry.is_object()) bad("expected objects in the list");
  TenantConfig tenant;
  TenantLimits& limits = tenant.limits;
  const auto share = [&limits](Shared what) {
    return &limits.shares[static_cast<std::size_t>(what)];
  };
  const std::map<std::string_view, std::string*> texts{{"name", &tenant.name},
                                                       {"token_sha256", &tenant.token_sha256},
                                                       {"certificate", &tenant.certificate}};
  struct Number {
    std::int64_t *to, least;
  };
  const std::map<std::string_view, Number> numbers{
      {"max_sessions", {&limits.max_sessions, 0}},
      {"max_kv_bytes", {&limits.max_kv_bytes, 0}},
      {"max_inflight_bytes", {&limits.max_inflight_bytes, 0}},
      {"weight", {&limits.weight, 0}},
      {"max_leases", {share(Shared::kLeases), 1}},
      {"max_attachments", {share(Shared::kAttachments), 1}},
      {"max_session_memory_bytes", {share(Shared::kSessionMemory), 1}},
      {"max_models", {share(Shared::kEngines), 1}}};
  for (const auto& [key, value] : entry.items()) {
    if (const auto text = texts.find(key); text != texts.end()) {
      if (!value.is_string()) bad(key + ": expected a string");
      *text->second = value.get<std::string>();
      continue;
    }
    const auto number = numbers.find(key);
    if (number == numbers.end()) bad("expected a known key, found " + key);
    const auto [to, least] = number->second;
    if (!value.is_number_integer() || value.get<std::int64_t>() < 0) {
      bad(key + ": expected an integer of at least 0");
    }
    *to = value.get<std::int64_t>();
    if (*to < least) bad(key + ": expected at least 1, found " + std::to_string(*to));
  }
  if (limits.weight < 1 || limits.weight > 100) {
    bad("weight: expected 1 to 100, found " + std::to_string(limits.weight));
  }
  return tenant;
}

/// Throws as the constructor of `Tenants`.
void check_tenants(const std::vector<TenantConfig>& configs) {
  if (configs.size() > kMaxTenants) bad("expected at most " + std::to_string(kMaxTenants));
  std::set<std::string> seen;
  const auto once = [&seen](const std::string& kind, const std::string& value) {
    if (!seen.insert(kind + " " + value).second) bad(kind + ": two tenants share one");
  };
  for (const TenantConfig& config : configs) {
    if (!is_name(config.name)) bad("name: expected 1 to 64 of a-z, 0-9, _, . and -");
    once("name", config.name);
    if (config.token_sha256.empty() && config.certificate.empty()) {
      bad(config.name + ": expected token_sha256 or certificate, found neither");
    }
    if (!config.token_sha256.empty()) {
      if (config.token_sha256.size() != 64 || !all_in(config.token_sha256, "0123456789abcdef")) {
        bad(config.name + ": token_sha256: expected 64 hex digits, lower case");
      }
      once("token_sha256", config.token_sha256);
    }
    if (!config.certificate.empty()) once("certificate", config.certificate);
  }
}

/// Parses, and refuses a key that stands twice in an object: the last would win.
nlohmann::json parse_once(const std::string& text) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> keys;
  std::string twice;
  const auto note_key = [&](int /*depth*/, Event event, nlohmann::json& parsed) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(text, note_key);
  } catch (const nlohmann::json::parse_error& error) {
    const std::string_view before =
        std::string_view(text).substr(0, std::max<std::size_t>(error.byte, 1) - 1);
    bad("expected JSON, found an error in line " +
        std::to_string(1 + std::ranges::count(before, '\n')) + ", column " +
        std::to_string(before.size() - (before.rfind('\n') + 1) + 1));
  } catch (const nlohmann::json::exception&) {
    bad("expected JSON, found a number out of range");
  }
  if (!twice.empty()) bad("expected each key once, found " + twice + " twice");
  return root;
}

}  // namespace

Tenant::Tenant(std::uint32_t index, const TenantConfig& config, std::size_t num_tenants)
    : index_(index),
      name_(config.name),
      num_tenants_(static_cast<std::int64_t>(num_tenants)),
      shares_(config.limits.shares),
      max_sessions_(config.limits.max_sessions),
      max_kv_bytes_(config.limits.max_kv_bytes),
      max_inflight_(config.limits.max_inflight_bytes),
      weight_(static_cast<int>(config.limits.weight)) {
  draw(std::as_writable_bytes(std::span(prefix_secret_)), "tenants");
}

TenantLimits Tenant::limits() const noexcept {
  return {.max_sessions = max_sessions_,
          .max_kv_bytes = max_kv_bytes_,
          .max_inflight_bytes = max_inflight_,
          .weight = weight_,
          .shares = shares_};
}

void Tenant::set_quota(std::int64_t max_sessions, std::int64_t max_kv_bytes) noexcept {
  max_sessions_ = max_sessions;
  max_kv_bytes_ = max_kv_bytes;
}

void Tenant::set_limits(const TenantLimits& limits) noexcept {
  set_quota(limits.max_sessions, limits.max_kv_bytes);
  max_inflight_ = limits.max_inflight_bytes;
}

void Tenant::charge_session() {
  const std::int64_t limit = max_sessions_;
  if (!add_below(sessions_, 1, limit)) {
    throw ServiceError::quota(
        "sessions", "the tenant may hold " + std::to_string(limit) + " sessions and holds as many");
  }
}

void Tenant::charge_kv(std::int64_t bytes) {
  const std::int64_t limit = max_kv_bytes_;
  if (!add_below(kv_bytes_, bytes, limit)) {
    throw ServiceError::quota("kv_bytes", "the tenant may hold " + std::to_string(limit) +
                                              " bytes: " + std::to_string(bytes) +
                                              " more do not fit");
  }
}

std::int64_t Tenant::part_of(Shared what, std::int64_t whole) const noexcept {
  const std::int64_t own = shares_[index_of(what)];
  return own > 0 ? own : std::min(whole, std::max<std::int64_t>(whole / num_tenants_, 1));
}

bool Tenant::take(Shared what, std::int64_t amount, std::int64_t whole) noexcept {
  return add_below(held_[index_of(what)], amount, part_of(what, whole));
}

bool Tenant::take_inflight(std::int64_t bytes, std::int64_t whole) noexcept {
  const std::int64_t own = max_inflight_;
  const std::int64_t part = std::min(whole, std::max(whole / num_tenants_, kLeastInflight));
  return add_below(inflight_, bytes, own < kUnlimitedBytes ? own : part);
}

Tenants::Tenants(const std::vector<TenantConfig>& configs, const TenantLimits& default_limits)
    : configs_(configs) {
  if (configs.empty()) {
    all_.push_back(std::make_unique<Tenant>(0, TenantConfig{"default", "", "", default_limits}));
    return;
  }
  check_tenants(configs);
  for (const TenantConfig& config : configs_) {
    all_.push_back(
        std::make_unique<Tenant>(static_cast<std::uint32_t>(all_.size()), config, configs_.size()));
  }
}

void Tenants::replace(const std::vector<TenantConfig>& configs) {
  check_tenants(configs);
  std::vector<TenantConfig> fresh;
  for (const auto& tenant : all_) fresh.push_back({tenant->name(), "", "", tenant->limits()});
  for (const TenantConfig& config : configs) {
    const auto place = std::ranges::find(fresh, config.name, &TenantConfig::name);
    if (place == fresh.end()) {
      bad("expected tenants of the start, found " + config.name + ": a new one needs a restart");
    }
    *place = config;
  }
  const std::unique_lock lock(mutex_);
  configs_ = std::move(fresh);
  for (std::size_t i = 0; i < all_.size(); ++i) all_[i]->set_limits(configs_[i].limits);
  ++version_;
}

void Tenants::revoke(std::shared_ptr<const RevocationList> revoked) {
  const std::unique_lock lock(mutex_);
  revoked_ = std::move(revoked);
  ++version_;
}

std::time_t Tenants::revocations_end() const {
  const std::shared_lock lock(mutex_);
  return revoked_ ? revoked_->next_update() : 0;
}

Tenant& Tenants::authenticate(const Credentials& credentials) const {
  const std::shared_lock lock(mutex_);
  if (revoked_ && !credentials.certificate.empty() && revoked_->has(credentials.certificate)) {
    throw unauthenticated();
  }
  if (configs_.empty()) return *all_.front();
  const bool has_token =
      !credentials.bearer_token.empty() && credentials.bearer_token.size() <= kMaxToken;
  const std::string digest =
      has_token ? absl::BytesToHexString(sha256(credentials.bearer_token)) : std::string();
  Tenant* found = nullptr;
  bool has_known_token = credentials.bearer_token.empty();
  for (std::size_t i = 0; i < configs_.size(); ++i) {
    const TenantConfig& config = configs_[i];
    const bool by_token = has_token && config.token_sha256 == digest;
    const auto& names = credentials.certificate_names;
    const bool by_certificate =
        !config.certificate.empty() && std::ranges::find(names, config.certificate) != names.end();
    has_known_token = has_known_token || by_token;
    if (!by_token && !by_certificate) continue;
    if (found != nullptr) throw unauthenticated();
    found = all_[i].get();
  }
  if (found == nullptr || !has_known_token) throw unauthenticated();
  return *found;
}

Tenant& Tenants::by_name(const std::string& name) const {
  for (const auto& tenant : all_) {
    if (tenant->name() == name) return *tenant;
  }
  throw ServiceError(Code::kNotFound, "NOT_FOUND", "no such tenant");
}

std::vector<TenantConfig> parse_tenants(const std::string& json) {
  const nlohmann::json root = parse_once(json);
  if (!root.is_object() || root.size() != 1 || !root.contains("tenants") ||
      !root["tenants"].is_array()) {
    bad("expected {\"tenants\": [...]}, found something else");
  }
  std::vector<TenantConfig> tenants;
  for (const auto& entry : root["tenants"]) tenants.push_back(tenant_of(entry));
  if (tenants.empty()) bad("expected at least one, found none");
  return tenants;
}

}  // namespace kvtier::services
