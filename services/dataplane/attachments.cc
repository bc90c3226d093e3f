#include "services/dataplane/attachments.h"

#include "services/base/from_message.h"
#include "services/base/secrets.h"
#include "services/wire/frame.h"

namespace kvtier::services {
namespace {

constexpr std::int64_t kUnit = 4096;
constexpr std::string_view kPrefix = "attachments/";

}  // namespace

Attachments::Created Attachments::create(Tenant& tenant, std::int64_t process_id,
                                         std::int64_t staging_bytes) {
  check_at_least("process_id", process_id, 0);
  check_within("staging_bytes", staging_bytes, 0, limits_.max_staging_bytes);
  if (staging_bytes == 0) staging_bytes = limits_.default_staging_bytes;
  staging_bytes = (staging_bytes + kUnit - 1) / kUnit * kUnit;
  std::string token(kAttachTokenBytes, 0);
  draw(std::as_writable_bytes(std::span(token)), "attachments");
  const std::string digest = sha256(token);
  const std::lock_guard lock(mutex_);
  std::int64_t own = 0, own_bytes = 0;
  for (const auto& [name, attachment] : by_name_) {
    if (&attachment->tenant != &tenant) continue;
    ++own;
    own_bytes += attachment->staging_bytes;
  }
  // Staging goes with attachments: a tenant's part of the bytes is its part of the number.
  const auto whole = static_cast<std::int64_t>(limits_.max_attachments);
  const std::int64_t part = std::min(tenant.part_of(Shared::kAttachments, whole), whole);
  if (own >= part || own_bytes + staging_bytes > limits_.max_total_staging_bytes * part / whole) {
    throw ServiceError::overloaded("TOO_MANY_ATTACHMENTS",
                                   "the tenant has all attachments that it may");
  }
  if (by_name_.size() >= limits_.max_attachments ||
      staging_bytes_ + staging_bytes > limits_.max_total_staging_bytes) {
    throw ServiceError::overloaded("TOO_MANY_ATTACHMENTS",
                                   "the server has all attachments that it may");
  }
  const HandleFields fields{.tenant = tenant.index(), .slot = ++last_slot_, .generation = 1};
  const std::string name = std::string(kPrefix) + codec_.encode(fields);
  auto attachment = std::make_shared<Attachment>(
      Attachment{tenant, name, process_id, staging_bytes, now_() + limits_.token_life, digest});
  by_name_.emplace(name, std::move(attachment));
  staging_bytes_ += staging_bytes;
  return {name, token, staging_bytes};
}

std::shared_ptr<Attachment> Attachments::redeem(std::string_view token, const Peer& peer,
                                                std::function<void()> close) {
  // By digest, so that the time of a look-up reveals nothing of the tokens there are.
  const std::string digest = sha256(token);
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      by_name_, [&](const auto& item) { return item.second->token_digest == digest; });
  const auto refuse = [] {
    return ServiceError(Code::kUnauthenticated, "UNAUTHENTICATED", "the token is not good here");
  };
  if (found == by_name_.end()) throw refuse();
  std::shared_ptr<Attachment> attachment = found->second;
  const bool in_time = now_() <= attachment->token_end;
  const bool same_process =
      attachment->process_id == 0 || !peer.process || *peer.process == attachment->process_id;
  const bool same_user = !peer.user || *peer.user == ::geteuid() || *peer.user == 0;
  const bool same_tenant = peer.tenant == nullptr || peer.tenant == &attachment->tenant;
  if (!in_time || !same_process || !same_user || !same_tenant) throw refuse();
  attachment->token_digest.clear();
  attachment->close = std::move(close);
  attachment->is_local = peer.user.has_value();
  return attachment;
}

void Attachments::forget(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  staging_bytes_ -= found->second->staging_bytes;
  for (const std::string& region : found->second->regions) {
    found->second->tenant.regions().remove(region);
  }
  by_name_.erase(found);
}

Attachment& Attachments::sharing(const Tenant& tenant, const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end() || &found->second->tenant != &tenant) {
    throw ServiceError::not_found();
  }
  Attachment& attachment = *found->second;
  if (!attachment.is_local) {
    throw ServiceError(Code::kFailedPrecondition, "NOT_LOCAL",
                       "expected an attachment that is connected over a Unix socket");
  }
  if (attachment.regions.size() >= limits_.max_regions) {
    throw ServiceError::overloaded("TOO_MANY_REGIONS",
                                   "the attachment shares all memory that it may");
  }
  return attachment;
}

std::string Attachments::share(Tenant& tenant, const std::string& name,
                               const std::function<DeviceRegion()>& open) {
  {
    const std::lock_guard lock(mutex_);
    static_cast<void>(sharing(tenant, name));
  }
  DeviceRegion region = open();
  const auto bytes = static_cast<std::int64_t>(region.bytes);
  const std::lock_guard lock(mutex_);
  Attachment& attachment = sharing(tenant, name);  // it may have ended meanwhile
  attachment.regions.reserve(attachment.regions.size() + 1);
  attachment.regions.push_back(tenant.regions().add(std::move(region)));
  attachment.device_bytes += bytes;
  return attachment.regions.back();
}

void Attachments::detach(const std::string& name) {
  const std::lock_guard lock(mutex_);
  forget(name);
}

void Attachments::remove(const Tenant& tenant, const std::string& name) {
  std::function<void()> close;
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_name_.find(name);
    if (found == by_name_.end() || &found->second->tenant != &tenant) {
      throw ServiceError::not_found();
    }
    close = std::move(found->second->close);
    forget(name);
  }
  if (close) close();
}

void Attachments::list(const Tenant& tenant, const v1::ListAttachmentsRequest& request,
                       v1::ListAttachmentsResponse& response) const {
  const auto size = static_cast<std::size_t>(page_size_of(request.page_size()));
  std::size_t skip = page_start_of(request.page_token());
  const std::lock_guard lock(mutex_);
  std::size_t index = 0;
  for (const auto& [name, attachment] : by_name_) {
    if (&attachment->tenant != &tenant) continue;
    if (index++ < skip) continue;
    if (static_cast<std::size_t>(response.attachments_size()) == size) {
      response.set_next_page_token(std::to_string(index - 1));
      return;
    }
    v1::Attachment& message = *response.add_attachments();
    message.set_name(name);
    message.set_process_id(attachment->process_id);
    message.set_staging_bytes(attachment->staging_bytes);
    message.set_connected(attachment->token_digest.empty());
    message.set_device_bytes(attachment->device_bytes);
  }
}

void Attachments::sweep() {
  const TimePoint now = now_();
  const std::lock_guard lock(mutex_);
  for (auto it = by_name_.begin(); it != by_name_.end();) {
    const std::string name = (it++)->first;
    const Attachment& attachment = *by_name_.at(name);
    if (!attachment.token_digest.empty() && attachment.token_end < now) forget(name);
  }
}

std::size_t Attachments::size() const {
  const std::lock_guard lock(mutex_);
  return by_name_.size();
}

std::int64_t Attachments::staging_bytes() const {
  const std::lock_guard lock(mutex_);
  return staging_bytes_;
}

}  // namespace kvtier::services
