#include "transfer/tiers/remote_tier.h"

#include <algorithm>
#include <utility>

namespace kvtier::tiers {

RemoteTier::RemoteTier(std::shared_ptr<RemoteCluster> cluster, const RemoteTierOptions& options)
    : cluster_(std::move(cluster)),
      sealer_(options.tenant, options.secret),
      part_bytes_(cluster_->options().value_limit - PageSealer::kOverhead) {}

std::size_t RemoteTier::num_parts(std::size_t page_bytes) const {
  return (page_bytes + part_bytes_ - 1) / part_bytes_;
}

PagePart RemoteTier::part_of(const PageKey& page, std::size_t page_bytes, std::size_t index) const {
  return {.page = page,
          .page_bytes = page_bytes,
          .index = static_cast<std::uint32_t>(index),
          .num_parts = static_cast<std::uint32_t>(num_parts(page_bytes))};
}

void RemoteTier::put(std::span<TierPut> pages, Deadline deadline) {
  check_pages(pages, kMaxPageBytes);
  const auto sealed = [&](const TierPut& page, const Generation& generation, std::size_t index) {
    const std::size_t first = index * part_bytes_;
    const auto bytes = page.bytes.subspan(first, std::min(part_bytes_, page.bytes.size() - first));
    return RemoteOp{
        .name = sealer_.name(page.key, static_cast<std::uint32_t>(index)),
        .value = sealer_.seal(part_of(page.key, page.bytes.size(), index), generation, bytes)};
  };
  // Commit records of pages in one part need not wait for any other.
  std::vector<Generation> generations;
  std::vector<std::size_t> owners;
  std::vector<RemoteOp> ops;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    pages[p].status = TierStatus::kOk;
    generations.push_back(draw_generation());
    const std::size_t count = num_parts(pages[p].bytes.size());
    for (std::size_t index = count == 1 ? 0 : 1; index < count; ++index) {
      ops.push_back(sealed(pages[p], generations[p], index));
      owners.push_back(p);
    }
  }
  const auto settle = [&] {
    cluster_->run(RemoteVerb::kSet, ops, deadline);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      TierStatus& status = pages[owners[i]].status;
      if (ops[i].status != TierStatus::kOk && status != TierStatus::kFull) status = ops[i].status;
    }
    ops.clear();
    owners.clear();
  };
  settle();
  for (std::size_t p = 0; p < pages.size(); ++p) {
    if (pages[p].status != TierStatus::kOk || num_parts(pages[p].bytes.size()) == 1) continue;
    ops.push_back(sealed(pages[p], generations[p], 0));
    owners.push_back(p);
  }
  settle();
}

void RemoteTier::get(std::span<TierGet> pages, Deadline deadline) {
  check_pages(pages, kMaxPageBytes);
  std::vector<RemoteOp> ops;
  for (const TierGet& page : pages) {
    for (std::size_t index = 0; index < num_parts(page.bytes.size()); ++index) {
      ops.push_back({.name = sealer_.name(page.key, static_cast<std::uint32_t>(index))});
    }
  }
  cluster_->run(RemoteVerb::kGet, ops, deadline);

  std::vector<RemoteOp> corrupt;
  std::size_t first = 0;
  for (TierGet& page : pages) {
    const std::size_t count = num_parts(page.bytes.size());
    page.status = open(page, std::span(ops).subspan(first, count), corrupt);
    first += count;
  }
  if (!corrupt.empty()) cluster_->run(RemoteVerb::kRemove, corrupt, deadline);
}

TierStatus RemoteTier::open(const TierGet& page, std::span<const RemoteOp> ops,
                            std::vector<RemoteOp>& corrupt) const {
  TierStatus worst = TierStatus::kOk;
  Generation committed{};
  for (std::size_t index = 0; index < ops.size(); ++index) {
    TierStatus status = ops[index].status;
    // Of a page that is not there as a whole the other parts are not worth opening.
    if (status == TierStatus::kOk && worst != TierStatus::kOk) continue;
    if (status == TierStatus::kOk) {
      const std::size_t first = index * part_bytes_;
      const std::size_t bytes = std::min(part_bytes_, page.bytes.size() - first);
      Generation generation{};
      status = sealer_.open(part_of(page.key, page.bytes.size(), index), ops[index].found.bytes,
                            page.bytes.subspan(first, bytes), generation,
                            index == 0 ? nullptr : &committed);
      if (index == 0) committed = generation;
    }
    if (status == TierStatus::kCorrupt) {
      corrupt.push_back({.name = ops[0].name});
      if (index > 0) corrupt.push_back({.name = ops[index].name});
      return TierStatus::kCorrupt;
    }
    // A part that is missing says more than one without an answer.
    if (status == TierStatus::kMiss || worst == TierStatus::kOk) worst = status;
  }
  return worst;
}

void RemoteTier::remove(std::span<const PageKey> keys, Deadline deadline) {
  std::vector<RemoteOp> ops;
  for (const PageKey& key : keys) ops.push_back({.name = sealer_.name(key, 0)});
  cluster_->run(RemoteVerb::kRemove, ops, deadline);
  for (const RemoteOp& op : ops) {
    if (op.status == TierStatus::kMiss) continue;
    ++(op.status == TierStatus::kOk ? num_removed_ : num_not_removed_);
  }
}

TierStats RemoteTier::stats() const {
  TierStats stats{.removed = num_removed_, .remove_failures = num_not_removed_};
  for (const RemoteServerState& server : cluster_->servers()) {
    ++stats.servers;
    if (server.circuit == CircuitState::kOpen) ++stats.servers_open;
    if (server.circuit == CircuitState::kHalfOpen) ++stats.servers_probing;
  }
  return stats;
}

std::string RemoteTier::describe() const {
  return cluster_->describe() + "; sealed by AES-256-GCM, parts of " + std::to_string(part_bytes_) +
         " bytes";
}

}  // namespace kvtier::tiers
