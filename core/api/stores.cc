#include <cstdlib>
#include <cstring>

#include "api/error.h"
#include "store/store.h"

using ronde::Result;
using ronde::ToC;

struct ronde_store {
  std::unique_ptr<ronde::Store> store;
};
struct ronde_store_server {
  std::unique_ptr<ronde::StoreServer> server;
};

namespace {

constexpr double kConnectSeconds = 10;

std::string Text(const char* text) { return text ? text : ""; }

void* Copy(const std::string& value, size_t* size) {
  *size = value.size();
  void* memory = std::malloc(value.size() + 1);
  std::memcpy(memory, value.data(), value.size());
  return memory;
}

}  // namespace

extern "C" {

ronde_error* ronde_store_open(const char* url, const char* secret, ronde_store** store) {
  auto opened = ronde::OpenStore(Text(url), Text(secret), ronde::After(kConnectSeconds));
  if (!opened.ok()) return ToC(opened.error());
  *store = new ronde_store{std::move(opened.value())};
  return nullptr;
}

ronde_error* ronde_store_set(ronde_store* store, const char* key, const void* value, size_t size) {
  return ToC(store->store->Set(key, std::string(static_cast<const char*>(value), size)));
}

ronde_error* ronde_store_get(ronde_store* store, const char* key, double seconds, void** value, size_t* size) {
  auto found = store->store->Get(key, ronde::After(seconds));
  if (!found.ok()) return ToC(found.error());
  *value = Copy(found.value(), size);
  return nullptr;
}

ronde_error* ronde_store_exchange(ronde_store* store, const char* key, uint32_t index, uint32_t count, const void* blob,
                                  size_t size, double seconds, void** values, size_t* sizes) {
  auto all = store->store->Exchange(key, index, count, std::string(static_cast<const char*>(blob), size),
                                    ronde::After(seconds));
  if (!all.ok()) return ToC(all.error());
  for (uint32_t i = 0; i < count; ++i) values[i] = Copy(all.value()[i], &sizes[i]);
  return nullptr;
}

void ronde_store_close(ronde_store* store) { delete store; }

ronde_error* ronde_store_serve(const char* url, const char* secret, ronde_store_server** server) {
  auto started = ronde::StoreServer::Start(Text(url), Text(secret));
  if (!started.ok()) return ToC(started.error());
  *server = new ronde_store_server{std::move(started.value())};
  return nullptr;
}

const char* ronde_store_server_url(const ronde_store_server* server) { return server->server->url().c_str(); }
void ronde_store_server_stop(ronde_store_server* server) { delete server; }
void ronde_free(void* memory) { std::free(memory); }
}
