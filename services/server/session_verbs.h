#pragma once

#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/session.pb.h"

#include "services/server/admission.h"
#include "services/server/session_table.h"

#include <cstdint>

/// What calls do to one session, on its strand. They check everything that depends on the session,
/// charge its tenant and throw with nothing changed.
namespace kvtier::services {

/// Most tokens of one chunk or query.
inline constexpr std::int64_t kMaxChunkTokens = 8192;

/// Fills `layer_lengths`.
void append_to(SessionEntry& entry, const v1::AppendRequest& request, v1::AppendResponse& response);
void select_in(SessionEntry& entry, const v1::SelectRequest& request, ReplyBudget& budget,
               v1::SelectResponse& response);
void attend_in(SessionEntry& entry, const v1::AttendRequest& request, ReplyBudget& budget,
               v1::AttendResponse& response);
/// A repeated (layer, step) is answered with the stored reply.
void decode_in(SessionEntry& entry, const v1::DecodeRequest& request, ReplyBudget& budget,
               v1::DecodeResponse& response);
void fetch_in(SessionEntry& entry, const v1::FetchRequest& request, ReplyBudget& budget,
              v1::FetchResponse& response);
/// Charges the tenant for the tokens that a new session begins with.
void charge_stored(SessionEntry& entry);
void publish_from(SessionEntry& entry, const v1::PublishPrefixRequest& request,
                  v1::PublishPrefixResponse& response);
void truncate_to(SessionEntry& entry, std::int64_t tokens);

}  // namespace kvtier::services
