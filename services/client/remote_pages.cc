#include "include/types/failure.h"
#include "services/client/client_impl.h"
#include "services/client/page_plane.h"
#include "services/client/page_streams.h"

#include <algorithm>
#include <utility>

namespace kvtier {

namespace {

/// One call's bytes are to arrive within its time.
constexpr std::int64_t kCallBytes = std::int64_t{64} << 20;

}  // namespace

/// A lease, renewed by the client's thread.
class RemotePages::Impl {
 public:
  Impl(std::shared_ptr<Client::Impl> client_in, const v1::OpenLeaseResponse& opened_in)
      : client(std::move(client_in)), opened(opened_in) {
    client->add(name(), services::milliseconds_of(opened.lease().ttl()));
  }
  ~Impl() {
    client->remove(name());
    v1::CloseLeaseRequest request;
    request.set_name(name());
    client->connection.end<v1::CloseLeaseResponse>(request);
  }
  Impl(const Impl&) = delete;  // owns a lease
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return opened.lease().name(); }
  [[nodiscard]] std::size_t batch_pages() const noexcept {
    return static_cast<std::size_t>(opened.limits().max_batch_pages());
  }
  template <typename Request, typename Response>
  std::vector<Result> statuses(std::span<const std::string> handles) {
    std::vector<Result> results;
    each_part<Request, Response>(handles, [&](const Response& response) {
      for (const v1::ItemStatus& status : response.statuses()) {
        results.push_back(services::result_of(status));
      }
    });
    return results;
  }

  [[nodiscard]] static Found found_of(const v1::Page& page) {
    return {.handle = page.handle(), .bytes = page.length(), .crc32c = page.crc32c()};
  }

  /// Calls with handles, a batch at a time.
  template <typename Request, typename Response, typename Take>
  void each_part(std::span<const std::string> handles, Take take) {
    for (std::size_t first = 0; first < handles.size(); first += batch_pages()) {
      const auto part = handles.subspan(first, std::min(batch_pages(), handles.size() - first));
      Request request;
      request.set_lease(name());
      request.set_request_id(services::make_request_id());
      request.mutable_handles()->Add(part.begin(), part.end());
      take(client->connection.call<Response>(request));
    }
  }

  /// Asks for hashes in parts of a batch, over the data plane where there is one.
  template <typename Take>
  void each_lookup(v1::BatchLookupPagesRequest& request, std::span<const std::string> hashes,
                   std::span<const int> layers, Take take) {
    if (layers.empty() || layers.size() > batch_pages()) {
      throw_invalid("layers", join("1 to ", batch_pages()), layers.size());
    }
    request.set_lease(name());
    request.mutable_layers()->Add(layers.begin(), layers.end());
    const std::size_t per_call = batch_pages() / layers.size();
    for (std::size_t first = 0; first < hashes.size(); first += per_call) {
      const auto part = hashes.subspan(first, std::min(per_call, hashes.size() - first));
      request.clear_hashes();
      request.mutable_hashes()->Add(part.begin(), part.end());
      if (request.pin()) request.set_request_id(services::make_request_id());
      const auto response = client->run<v1::BatchLookupPagesResponse>(
          request, services::RequestTensors(client->memories));
      const auto hits = static_cast<std::size_t>(std::ranges::count(response.hits(), true));
      if (static_cast<std::size_t>(response.hits_size()) != part.size() ||
          static_cast<std::size_t>(response.pages_size()) !=
              (request.hits_only() ? 0 : hits * layers.size())) {
        throw Error(ErrorCode::kInternal,
                    "lookup: expected an answer for each hash, found another");
      }
      take(response);
    }
  }

  /// Reads pages to their places and compares their checksums; `stale_reads` of them were stale in
  /// shared memory.
  void read(std::span<const Get> pages, std::span<Result> results, std::size_t stale_reads,
            bool server_compares = false) {
    const services::PagesToRead read{name(), pages, server_compares, stale_reads};
    client->connection.retry(
        [&] { return services::read_pages(client->connection, read, results); });
  }
  /// As `read`; those that differ are read once more, compared by the server too, which does not
  /// serve a damaged page again.
  void read_verified(std::span<const Get> pages, std::span<Result> results,
                     std::size_t stale_reads) {
    read(pages, results, stale_reads);
    std::vector<Get> differing;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (results[i].code != ErrorCode::kDataLoss) continue;
      differing.push_back(pages[i]);
      places.push_back(i);
    }
    if (differing.empty()) return;
    std::vector<Result> again(differing.size());
    read(differing, again, 0, /*server_compares=*/true);
    for (std::size_t i = 0; i < places.size(); ++i) results[places[i]] = std::move(again[i]);
  }

  [[nodiscard]] std::vector<services::PageRead> read_shared(std::span<const Get> pages) {
    std::vector<services::PageRead> reads;
    for (const Get& page : pages) reads.push_back({.handle = page.handle, .to = page.to});
    if (const auto channel = client->channels.borrow()) {
      try {
        services::read_shared(*channel, reads, true);
      } catch (const ClientError&) {
        // What is not done goes the other way.
      }
    }
    return reads;
  }

  [[nodiscard]] std::size_t pages_per_call() const {
    const auto by_bytes = static_cast<std::size_t>(kCallBytes / opened.lease().page_bytes());
    return std::clamp<std::size_t>(by_bytes, 1, batch_pages());
  }

  std::vector<Result> put_part(std::span<const Put> pages) {
    v1::BatchReservePagesRequest request;
    request.set_lease(name());
    request.set_request_id(services::make_request_id());
    for (const Put& page : pages) {
      v1::PageKey& key = *request.add_keys();
      key.set_hash(page.hash);
      key.set_layer(page.layer);
    }
    const auto reserved = client->connection.call<v1::BatchReservePagesResponse>(request);
    std::vector<Result> results(pages.size());
    std::vector<std::string> handles(pages.size());  // of those to be written
    std::vector<std::size_t> written;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const v1::PageResult& item = reserved.items(static_cast<int>(i));
      take(item, results[i]);
      if (item.status().code() != 0 || item.page().existed()) continue;
      handles[i] = item.page().handle();
      written.push_back(i);
    }
    put_existed(pages, put_shared(pages, handles, results), results);
    std::erase_if(written, [&](std::size_t i) { return handles[i].empty(); });
    if (written.empty()) return results;
    const v1::WritePagesResponse response =
        services::write_pages(client->connection, opened, pages, handles);
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (static_cast<int>(i) < response.items_size()) {
        take(response.items(static_cast<int>(i)), results[written[i]]);
      }
    }
    return results;
  }

  /// Writes the pages that have a handle through shared memory, as far as that goes: their handles
  /// are taken away. Returns those of them of which another client has committed one meanwhile.
  std::vector<std::size_t> put_shared(std::span<const Put> pages, std::vector<std::string>& handles,
                                      std::vector<Result>& results) {
    std::vector<services::PageWrite> writes;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (handles[i].empty()) continue;
      writes.push_back({.handle = handles[i], .from = pages[i].bytes});
      places.push_back(i);
    }
    if (const auto channel = client->channels.borrow()) {
      try {
        services::write_shared(*channel, name(), writes);
      } catch (const ClientError&) {
        // Writing a committed page again, the other way, returns that it is committed.
      }
    }
    std::vector<std::size_t> existed;
    for (std::size_t i = 0; i < writes.size(); ++i) {
      if (!writes[i].done && !writes[i].existed) continue;
      if (writes[i].existed) existed.push_back(places[i]);
      results[places[i]] = {.handle = std::move(handles[places[i]]),
                            .crc32c = writes[i].crc,
                            .durable = writes[i].durable};
      handles[places[i]].clear();
    }
    return existed;
  }

  /// Finds the pages that others have committed; puts those that have gone since.
  void put_existed(std::span<const Put> pages, const std::vector<std::size_t>& existed,
                   std::vector<Result>& results) {
    if (existed.empty()) return;
    std::vector<Put> again;
    for (const std::size_t i : existed) again.push_back(pages[i]);
    const std::vector<Result> found = put_part(again);
    for (std::size_t i = 0; i < existed.size(); ++i) results[existed[i]] = found[i];
  }

  static void take(const v1::PageResult& item, Result& result) {
    result = services::result_of(item.status());
    if (item.status().code() != 0) return;
    result.handle = item.page().handle();
    result.crc32c = item.page().crc32c();
    result.existed = item.page().existed();
    result.durable = item.page().durable();
  }

  const std::shared_ptr<Client::Impl> client;
  const v1::OpenLeaseResponse opened;
};

RemotePages Client::open_pages(const RemotePagesConfig& config) {
  v1::OpenLeaseRequest request;
  request.set_request_id(services::make_request_id());
  request.set_model(config.model);
  request.set_page_bytes(config.page_bytes);
  const auto response = impl_->connection.call<v1::OpenLeaseResponse>(request);
  return RemotePages(std::make_unique<RemotePages::Impl>(impl_, response));
}

RemotePages::RemotePages(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
RemotePages::~RemotePages() = default;
RemotePages::RemotePages(RemotePages&&) noexcept = default;
RemotePages& RemotePages::operator=(RemotePages&&) noexcept = default;

const std::string& RemotePages::name() const noexcept { return impl_->name(); }
std::vector<RemotePages::Found> RemotePages::lookup(std::span<const std::string> hashes,
                                                    std::span<const int> layers, bool pin) {
  std::vector<Found> found;
  const std::size_t per_call = layers.empty() ? 1 : impl_->batch_pages() / layers.size();
  for (std::size_t first = 0; first < hashes.size() && !layers.empty();) {
    const auto part =
        hashes.subspan(first, std::min(std::max<std::size_t>(per_call, 1), hashes.size() - first));
    v1::LookupPrefixRequest request;
    request.set_lease(impl_->name());
    request.mutable_hashes()->Add(part.begin(), part.end());
    request.mutable_layers()->Add(layers.begin(), layers.end());
    request.set_pin(pin);
    if (pin) request.set_request_id(services::make_request_id());
    const auto response = impl_->client->connection.call<v1::LookupPrefixResponse>(request);
    for (const v1::Page& page : response.pages()) found.push_back(impl_->found_of(page));
    if (response.hits() < static_cast<int>(part.size())) break;
    first += part.size();
  }
  return found;
}

std::vector<std::vector<RemotePages::Found>> RemotePages::find(std::span<const std::string> hashes,
                                                               std::span<const int> layers,
                                                               bool pin) {
  std::vector<std::vector<Found>> found;
  v1::BatchLookupPagesRequest request;
  request.set_pin(pin);
  impl_->each_lookup(request, hashes, layers, [&](const v1::BatchLookupPagesResponse& response) {
    int next = 0;
    for (const bool hit : response.hits()) {
      found.emplace_back();
      for (std::size_t i = 0; hit && i < layers.size(); ++i) {
        found.back().push_back(impl_->found_of(response.pages(next++)));
      }
    }
  });
  return found;
}

std::vector<bool> RemotePages::contains(std::span<const std::string> hashes,
                                        std::span<const int> layers) {
  std::vector<bool> hits;
  v1::BatchLookupPagesRequest request;
  request.set_hits_only(true);
  impl_->each_lookup(request, hashes, layers, [&](const v1::BatchLookupPagesResponse& response) {
    hits.insert(hits.end(), response.hits().begin(), response.hits().end());
  });
  return hits;
}

std::vector<RemotePages::Result> RemotePages::put(std::span<const Put> pages) {
  const std::int64_t page_bytes = impl_->opened.lease().page_bytes();
  for (const Put& page : pages) {
    if (static_cast<std::int64_t>(page.bytes.size()) == page_bytes) continue;
    throw_invalid("bytes", join("pages of ", page_bytes, " bytes"), page.bytes.size());
  }
  std::vector<Result> results;
  for (std::size_t first = 0; first < pages.size(); first += impl_->pages_per_call()) {
    const auto part = pages.subspan(first, std::min(impl_->pages_per_call(), pages.size() - first));
    const std::vector<Result> more = impl_->put_part(part);
    results.insert(results.end(), more.begin(), more.end());
  }
  return results;
}

std::vector<RemotePages::Result> RemotePages::get(std::span<const Get> pages) {
  std::vector<Result> results(pages.size());
  std::vector<Get> left;  // what shared memory does not have, or does not say why
  std::vector<std::size_t> places;
  const std::vector<services::PageRead> read = impl_->read_shared(pages);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    results[i] = {.handle = pages[i].handle, .crc32c = read[i].crc};
    if (read[i].done) continue;
    left.push_back(pages[i]);
    places.push_back(i);
  }
  std::vector<Result> asked(left.size());
  for (std::size_t first = 0; first < left.size(); first += impl_->pages_per_call()) {
    const std::size_t count = std::min(impl_->pages_per_call(), left.size() - first);
    const auto stale = std::ranges::count_if(std::span(places).subspan(first, count),
                                             [&](std::size_t place) { return read[place].stale; });
    impl_->read_verified(std::span(left).subspan(first, count),
                         std::span(asked).subspan(first, count), static_cast<std::size_t>(stale));
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    results[places[i]] = std::move(asked[i]);
    results[places[i]].handle = left[i].handle;
  }
  return results;
}

std::vector<RemotePages::Result> RemotePages::pin(std::span<const std::string> handles) {
  std::vector<Result> results;
  impl_->each_part<v1::BatchPinPagesRequest, v1::BatchPinPagesResponse>(
      handles, [&](const v1::BatchPinPagesResponse& response) {
        for (const v1::PageResult& item : response.items()) {
          impl_->take(item, results.emplace_back());
          results.back().existed = false;
        }
      });
  return results;
}

std::vector<RemotePages::Result> RemotePages::unpin(std::span<const std::string> handles) {
  return impl_->statuses<v1::BatchUnpinPagesRequest, v1::BatchUnpinPagesResponse>(handles);
}
std::vector<RemotePages::Result> RemotePages::remove(std::span<const std::string> handles) {
  return impl_->statuses<v1::BatchDeletePagesRequest, v1::BatchDeletePagesResponse>(handles);
}

}  // namespace kvtier
