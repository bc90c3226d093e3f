#pragma once

#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/session.pb.h"

#include "services/base/admission.h"
#include "services/core/session_table.h"

#include <cstdint>
#include <memory>

/// What calls do to one session, on its strand. They check everything that depends on the session,
/// charge its tenant and throw with nothing changed.
namespace kvtier::services {

/// Most tokens of one chunk or query.
inline constexpr std::int64_t kMaxChunkTokens = 8192;

/// A call that is done a piece at a time, with other calls of its engine between. Ended before the
/// last, it has changed nothing. Used on the session's strand; what it was made of must outlive it.
class CallInPieces {
 public:
  CallInPieces() = default;
  virtual ~CallInPieces() = default;
  CallInPieces(const CallInPieces&) = delete;  // one end for one call
  CallInPieces& operator=(const CallInPieces&) = delete;
  /// Does a piece and returns whether it was the last. A call that throws has ended.
  virtual bool next() = 0;
};

/// Fills `layer_lengths`.
void execute(SessionEntry& entry, const v1::AppendRequest& request, ReplyBudget& budget,
             v1::AppendResponse& response);
[[nodiscard]] std::unique_ptr<CallInPieces> execute(SessionEntry& entry,
                                                    const v1::SelectRequest& request,
                                                    ReplyBudget& budget,
                                                    v1::SelectResponse& response);
[[nodiscard]] std::unique_ptr<CallInPieces> execute(SessionEntry& entry,
                                                    const v1::AttendRequest& request,
                                                    ReplyBudget& budget,
                                                    v1::AttendResponse& response);
/// A repeated (layer, step) is answered at once with the stored reply.
[[nodiscard]] std::unique_ptr<CallInPieces> execute(SessionEntry& entry,
                                                    const v1::DecodeRequest& request,
                                                    ReplyBudget& budget,
                                                    v1::DecodeResponse& response);
void execute(SessionEntry& entry, const v1::FetchRequest& request, ReplyBudget& budget,
             v1::FetchResponse& response);
/// Charges the tenant for the tokens that a new session begins with.
void charge_stored(SessionEntry& entry);
void execute(SessionEntry& entry, const v1::PublishPrefixRequest& request, ReplyBudget& budget,
             v1::PublishPrefixResponse& response);
void truncate_to(SessionEntry& entry, std::int64_t tokens);

}  // namespace kvtier::services
