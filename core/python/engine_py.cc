// Endpoint (init), shutdown, topology, process sets and the timeline, all of the process's default engine.
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"

namespace ronde::python {
namespace {

constexpr ronde_engine kDefaultEngine = 0;  // the one made last and still alive

class Endpoint {
 public:
  Endpoint(std::int32_t rank, std::int32_t size, std::uint64_t generation, const std::optional<std::string>& host_name,
           const std::optional<std::string>& host_id, const std::optional<std::string>& secret,
           const std::optional<std::string>& store_url) {
    ronde_config config{};
    config.struct_size = sizeof(config);
    config.rank = rank;
    config.size = size;
    config.generation = generation;
    config.host_name = OrNull(host_name);
    config.host_id = OrNull(host_id);
    config.secret = OrNull(secret);
    config.store_url = OrNull(store_url);
    ronde_endpoint* endpoint = nullptr;
    Check(ronde_endpoint_create(&config, &endpoint));
    endpoint_.reset(endpoint);
  }

  py::bytes Blob() const {
    RequireUnused();
    std::size_t size = 0;
    const void* blob = ronde_endpoint_blob(endpoint_.get(), &size);
    return {static_cast<const char*>(blob), size};
  }

  void Connect(const std::vector<py::bytes>& blobs, double timeout) {
    RequireUnused();
    std::vector<std::string> copies;
    for (const py::bytes& blob : blobs) {
      ByteView view(blob);
      copies.emplace_back(view.data, view.size);
    }
    // Owned by the call, which may go on when a signal ends this function.
    struct Call {
      Owner endpoint;
      std::vector<std::string> blobs;
      double timeout;
      ronde_engine engine;
    };
    auto call = std::make_shared<Call>(Call{std::move(endpoint_), std::move(copies), timeout, 0});
    RunInterruptibly(
        [call] {
          std::vector<const void*> data;
          std::vector<std::size_t> sizes;
          for (const std::string& blob : call->blobs) {
            data.push_back(blob.data());
            sizes.push_back(blob.size());
          }
          return ronde_endpoint_connect(call->endpoint.release(), data.data(), sizes.data(), call->timeout,
                                        &call->engine);
        },
        [call] { Discard(ronde_shutdown(call->engine, "interrupted by a signal during init()")); });
  }

 private:
  struct Freer {
    void operator()(ronde_endpoint* endpoint) const { ronde_endpoint_free(endpoint); }
  };
  using Owner = std::unique_ptr<ronde_endpoint, Freer>;

  void RequireUnused() const {
    if (!endpoint_) throw Failure(kArgument, "this endpoint was used up by connect(): make a new one");
  }

  Owner endpoint_;
};

void Shutdown(const std::optional<std::string>& failure, Parked* parked) {
  Check(WithoutGil([&] { return ronde_shutdown(kDefaultEngine, OrNull(failure)); }));
  parked->SweepAll();
}

py::dict Topology() {
  ronde_topology topology{};
  topology.struct_size = sizeof(topology);
  Check(ronde_get_topology(kDefaultEngine, &topology));
  py::dict result;
  result["rank"] = topology.rank;
  result["size"] = topology.size;
  result["local_rank"] = topology.local_rank;
  result["local_size"] = topology.local_size;
  result["cross_rank"] = topology.cross_rank;
  result["cross_size"] = topology.cross_size;
  result["is_homogeneous"] = topology.is_homogeneous;
  result["shared_memory"] = topology.shared_memory;
  return result;
}

std::vector<std::int32_t> ProcessSetRanks(std::uint32_t process_set) {
  std::vector<std::int32_t> ranks;
  std::uint32_t count = 64;
  do {
    ranks.resize(count);
    Check(ronde_process_set_ranks(kDefaultEngine, process_set, ranks.data(), static_cast<std::uint32_t>(ranks.size()),
                                  &count));
  } while (count > ranks.size());
  ranks.resize(count);
  return ranks;
}

// Groups become dictionaries; nanoseconds become seconds.
py::dict Metrics() {
  std::vector<ronde_metric> rows;
  std::uint32_t count = 0;
  do {  // asks how many there are, then for them
    rows.resize(count);
    Check(WithoutGil([&] {
      return ronde_get_metrics(kDefaultEngine, rows.data(), static_cast<std::uint32_t>(rows.size()), &count);
    }));
  } while (count > rows.size());
  rows.resize(count);
  py::dict result;
  for (const ronde_metric& row : rows) {
    std::string name = row.name;
    py::object value = py::int_(row.value);
    if (const std::string prefix = "nanoseconds."; name.rfind(prefix, 0) == 0) {
      name = "seconds." + name.substr(prefix.size());
      value = py::float_(static_cast<double>(row.value) / 1e9);
    }
    py::dict group = result;
    for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
      py::str key(name.substr(0, dot));
      if (!group.contains(key)) group[key] = py::dict();
      group = group[key];
      name.erase(0, dot + 1);
    }
    group[py::str(name)] = value;
  }
  return result;
}

}  // namespace

void BindEngine(py::module_& module, Parked* parked) {
  py::class_<Endpoint>(module, "Endpoint", "First half of init: listens; the blob goes to every rank.")
      .def(py::init<std::int32_t, std::int32_t, std::uint64_t, const std::optional<std::string>&,
                    const std::optional<std::string>&, const std::optional<std::string>&,
                    const std::optional<std::string>&>(),
           py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("generation") = 0,
           py::arg("host_name") = py::none(), py::arg("host_id") = py::none(), py::arg("secret") = py::none(),
           py::arg("store_url") = py::none())
      .def("blob", &Endpoint::Blob)
      .def("connect", &Endpoint::Connect, py::arg("blobs"), py::arg("timeout"),
           "Second half: meets the others and starts the process's engine. The endpoint is used up.");
  module.def(
      "shutdown", [parked](const std::optional<std::string>& failure) { Shutdown(failure, parked); },
      py::arg("failure") = py::none(),
      "Ends the engine. With a failure the other ranks abort, and their errors say it.");
  module.def("is_initialized", [] { return ronde_is_initialized(kDefaultEngine) != 0; });
  module.def("topology", &Topology);
  module.def("process_set_ranks", &ProcessSetRanks, py::arg("process_set"));
  module.def(
      "start_timeline",
      [](const std::string& path, bool mark_cycles) {
        Check(WithoutGil([&] { return ronde_start_timeline(kDefaultEngine, path.c_str(), mark_cycles); }));
      },
      py::arg("path"), py::arg("mark_cycles") = false);
  module.def("stop_timeline", [] { Check(WithoutGil([] { return ronde_stop_timeline(kDefaultEngine); })); });
  module.def("metrics", &Metrics);
}

}  // namespace ronde::python
