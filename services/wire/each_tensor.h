#pragma once

#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"

/// `each_tensor(message, visit)`: calls `visit` with the tensors of a request or reply of
/// AttentionService, in the order in which they stand in it, those of a batch item by item. Of page
/// lookups, which have none, it does nothing.
namespace kvtier::services {

template <typename Visit>
void each_tensor(v1::AppendRequest& message, Visit visit) {
  visit(*message.mutable_key());
  visit(*message.mutable_value());
}
template <typename Visit>
void each_tensor(v1::SelectRequest& message, Visit visit) {
  visit(*message.mutable_query());
}
template <typename Visit>
void each_tensor(v1::AttendRequest& message, Visit visit) {
  visit(*message.mutable_query());
  if (message.has_selected()) visit(*message.mutable_selected());
  if (message.has_bias()) visit(*message.mutable_bias());
}
template <typename Visit>
void each_tensor(v1::DecodeRequest& message, Visit visit) {
  visit(*message.mutable_query());
  visit(*message.mutable_key());
  visit(*message.mutable_value());
  if (message.has_selected()) visit(*message.mutable_selected());
  if (message.has_bias()) visit(*message.mutable_bias());
}
template <typename Visit>
void each_tensor(v1::FetchRequest& message, Visit visit) {
  visit(*message.mutable_tokens());
}
template <typename Visit>
void each_tensor(v1::FetchResponse& message, Visit visit) {
  visit(*message.mutable_key());
  visit(*message.mutable_value());
}
template <typename Visit>
void each_tensor(v1::BatchLookupPagesRequest& /*message*/, Visit /*visit*/) {}
template <typename Visit>
void each_tensor(v1::BatchLookupPagesResponse& /*message*/, Visit /*visit*/) {}
template <typename Visit>
void each_tensor(v1::AppendResponse& /*message*/, Visit /*visit*/) {}
template <typename Visit>
void each_tensor(v1::SelectResponse& message, Visit visit) {
  visit(*message.mutable_ids());
  if (message.has_scores()) visit(*message.mutable_scores());
  if (message.has_bias()) visit(*message.mutable_bias());
}
template <typename Message, typename Visit>
requires requires(Message& message) { message.mutable_lse(); }
void each_tensor(Message& message, Visit visit) {
  visit(*message.mutable_out());
  visit(*message.mutable_lse());
  if (message.has_missed()) visit(*message.mutable_missed());
}
template <typename Message, typename Visit>
requires requires(Message& message) { message.mutable_items(); }
void each_tensor(Message& message, Visit visit) {
  for (auto& item : *message.mutable_items()) {
    if constexpr (requires { item.mutable_response(); }) {
      if (item.has_response()) each_tensor(*item.mutable_response(), visit);
    } else {
      each_tensor(item, visit);
    }
  }
}

}  // namespace kvtier::services
