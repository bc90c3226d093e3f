#pragma once

#include "kvtier/v1/attention.pb.h"
#include "kvtier/v1/page.pb.h"

namespace kvtier::services {

/// Calls `visit` with the tensors of a request or reply of AttentionService, in the order in which
/// they stand in it, those of a batch item by item. Of page lookups, which have none, it does
/// nothing.
template <typename Message, typename Visit>
void each_tensor(Message& message, Visit visit) {
  if constexpr (requires { message.mutable_items(); }) {
    for (auto& item : *message.mutable_items()) {
      if constexpr (requires { item.mutable_response(); }) {
        if (item.has_response()) each_tensor(*item.mutable_response(), visit);
      } else {
        each_tensor(item, visit);
      }
    }
  }
  // No message has two fields in another order than this.
  if constexpr (requires { message.mutable_query(); }) visit(*message.mutable_query());
  if constexpr (requires { message.mutable_key(); }) visit(*message.mutable_key());
  if constexpr (requires { message.mutable_value(); }) visit(*message.mutable_value());
  if constexpr (requires { message.mutable_tokens(); }) visit(*message.mutable_tokens());
  if constexpr (requires { message.mutable_ids(); }) visit(*message.mutable_ids());
  if constexpr (requires { message.mutable_scores(); }) {
    if (message.has_scores()) visit(*message.mutable_scores());
  }
  if constexpr (requires { message.mutable_selected(); }) {
    if (message.has_selected()) visit(*message.mutable_selected());
  }
  if constexpr (requires { message.mutable_out(); }) visit(*message.mutable_out());
  if constexpr (requires { message.mutable_lse(); }) visit(*message.mutable_lse());
  if constexpr (requires { message.mutable_missed(); }) {
    if (message.has_missed()) visit(*message.mutable_missed());
  }
  if constexpr (requires { message.mutable_bias(); }) {
    if (message.has_bias()) visit(*message.mutable_bias());
  }
}

}  // namespace kvtier::services
