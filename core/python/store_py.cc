// Store and StoreServer.
#include <pybind11/stl.h>

#include "bindings.h"

namespace ronde::python {
namespace {

// Values that the C interface handed out.
struct Values {
  explicit Values(std::uint32_t count) : data(count, nullptr), sizes(count, 0) {}
  ~Values() {
    for (void* value : data) ronde_free(value);
  }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;
  py::bytes Bytes(std::size_t index) const { return {static_cast<const char*>(data[index]), sizes[index]}; }

  std::vector<void*> data;
  std::vector<std::size_t> sizes;
};

class Store {
 public:
  Store(const std::string& url, const std::optional<std::string>& secret) : url_(url) {
    auto opened = std::make_shared<ronde_store*>(nullptr);
    auto close = [opened] { ronde_store_close(*opened); };
    RunInterruptibly([url, secret, opened] { return ronde_store_open(url.c_str(), OrNull(secret), opened.get()); },
                     close);
    store_.reset(*opened, ronde_store_close);
  }

  void Set(const std::string& key, const py::bytes& value) const {
    ByteView view(value);
    RunInterruptibly([store = Open(), key, value = std::string(view.data, view.size)] {
      return ronde_store_set(store.get(), key.c_str(), value.data(), value.size());
    });
  }

  py::bytes Get(const std::string& key, double timeout) const {
    auto value = std::make_shared<Values>(1);
    RunInterruptibly([store = Open(), key, timeout, value] {
      return ronde_store_get(store.get(), key.c_str(), timeout, value->data.data(), value->sizes.data());
    });
    return value->Bytes(0);
  }

  py::list Exchange(const std::string& key, std::uint32_t index, std::uint32_t count, const py::bytes& blob,
                    double timeout) const {
    ByteView view(blob);
    auto values = std::make_shared<Values>(count);
    RunInterruptibly([store = Open(), key, index, count, blob = std::string(view.data, view.size), timeout, values] {
      return ronde_store_exchange(store.get(), key.c_str(), index, count, blob.data(), blob.size(), timeout,
                                  values->data.data(), values->sizes.data());
    });
    py::list result;
    for (std::uint32_t i = 0; i < count; ++i) result.append(values->Bytes(i));
    return result;
  }

  // A call that is still under way keeps the connection until it ended.
  void Close() { store_.reset(); }

 private:
  std::shared_ptr<ronde_store> Open() const {
    if (!store_) throw Failure(kArgument, "the store " + url_ + " was closed");
    return store_;
  }

  std::string url_;
  std::shared_ptr<ronde_store> store_;
};

class StoreServer {
 public:
  StoreServer(const std::string& url, const std::optional<std::string>& secret) {
    ronde_store_server* server = nullptr;
    Check(ronde_store_serve(url.c_str(), OrNull(secret), &server));
    server_.reset(server);
    url_ = ronde_store_server_url(server);
  }
  const std::string& url() const { return url_; }
  void Stop() {
    WithoutGil([this] {
      server_.reset();
      return true;
    });
  }

 private:
  struct Stopper {
    void operator()(ronde_store_server* server) const { ronde_store_server_stop(server); }
  };
  std::string url_;
  std::unique_ptr<ronde_store_server, Stopper> server_;
};

}  // namespace

void BindStore(py::module_& module) {
  py::class_<Store>(module, "Store", "Key-value rendezvous: unix:/path, tcp:host:port or file:/directory.")
      .def(py::init<const std::string&, const std::optional<std::string>&>(), py::arg("url"),
           py::arg("secret") = py::none())
      .def("set", &Store::Set, py::arg("key"), py::arg("value"))
      .def("get", &Store::Get, py::arg("key"), py::arg("timeout"),
           "Waits until the key is set; TimeoutError after `timeout` s.")
      .def("exchange", &Store::Exchange, py::arg("key"), py::arg("index"), py::arg("count"), py::arg("blob"),
           py::arg("timeout"), "Hands in blob `index` of `count`, waits for all and returns them in order.")
      .def("close", &Store::Close);
  py::class_<StoreServer>(module, "StoreServer", "Serves a store on threads of its own until stop().")
      .def(py::init<const std::string&, const std::optional<std::string>&>(), py::arg("url"),
           py::arg("secret") = py::none())
      .def_property_readonly("url", &StoreServer::url)
      .def("stop", &StoreServer::Stop);
}

}  // namespace ronde::python
