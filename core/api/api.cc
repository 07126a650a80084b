#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "api/error.h"
#include "api/registry.h"
#include "backends/host/factory.h"
#include "negotiation/negotiator.h"
#include "store/store.h"
#include "transport/tcp/factory.h"

using namespace ronde;  // NOLINT: this file is the seam between the two namespaces

struct ronde_endpoint {
  ronde_config config;
  std::string host_name, host_id, secret, store_url;
  Options options;
  Log log;
  std::unique_ptr<Endpoint> endpoint;
  std::string blob;
};

struct ronde_memory {
  std::shared_ptr<std::byte> memory;
};

// An operation and what its caller holds of it, in one piece of memory: the engine shares it until the operation ends.
struct ronde_handle {
  ronde_handle(Request request, std::weak_ptr<Engine> in) : operation(std::move(request)), engine(std::move(in)) {}
  Operation operation;
  const std::weak_ptr<Engine> engine;
  std::shared_ptr<ronde_handle> self;  // the caller's share; null once it is freed
};

namespace {

std::string Text(const char* text) { return text ? text : ""; }

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "localhost";
}

// Whether an optional field of a caller's struct lies within what that caller knew.
#define RONDE_HAS_FIELD(object, field) \
  ((object)->struct_size >= offsetof(std::remove_cvref_t<decltype(*(object))>, field) + sizeof((object)->field))

Result CheckConfig(const ronde_config* config) {
  if (config == nullptr || !RONDE_HAS_FIELD(config, store_url)) {
    return Result(Code::kArgument, "ronde_config is smaller than this library's; rebuild the caller");
  }
  if (config->size < 1 || config->rank < 0 || config->rank >= config->size) {
    return Result(Code::kArgument,
                  "rank " + std::to_string(config->rank) + " of " + std::to_string(config->size) + " makes no sense");
  }
  if (config->size > 1 && (config->secret == nullptr || config->secret[0] == '\0')) {
    return Result(Code::kArgument, "a job of several ranks needs a secret");
  }
  return Ok();
}

Result CheckOptions(const Options& options) {
  if (options.cpu_operations != "host" && options.cpu_operations != "gloo" && options.cpu_operations != "GLOO") {
    return Result(Code::kArgument, "RONDE_CPU_OPERATIONS is '" + options.cpu_operations +
                                       "'; this release has host (gloo means the same)");
  }
  if (options.transport != "auto" && options.transport != "tcp") {
    return Result(Code::kArgument, "RONDE_TRANSPORT is '" + options.transport + "'; it must be auto or tcp");
  }
  return Ok();
}

// What the launcher wrote about a dead rank.
std::function<std::string(int, Deadline)> CauseOfDeath(const std::string& url, const std::string& secret) {
  if (url.empty()) return nullptr;
  return [url, secret](int rank, Deadline deadline) -> std::string {
    auto store = OpenStore(url, secret, deadline);
    if (!store.ok()) return "";
    auto cause = store.value()->Get("death/" + std::to_string(rank), deadline);
    return cause.ok() ? cause.value() : "";
  };
}

// How long a batch that all agreed to may wait for one peer's next piece. Engines move by themselves, whatever their
// programs compute, so a peer that does not is stopped or broken; the limit is that of a stall.
double WaitSeconds(const Options& options) {
  if (options.stall_check_disable) return 0;
  return options.stall_abort_seconds >= 0 ? options.stall_abort_seconds : Seconds(kDefaultStallAbort);
}

Expected<std::shared_ptr<Engine>> Connect(ronde_endpoint& endpoint, const std::vector<std::string>& blobs,
                                          Deadline deadline) {
  auto connected = endpoint.endpoint->Connect(blobs, deadline);
  if (!connected.ok()) return connected.error();
  Connections& made = connected.value();
  RONDE_RETURN_IF_ERROR(endpoint.options.AdoptJob(made.job_options));
  EngineConfig config;
  config.options = endpoint.options;
  config.log = endpoint.log;
  config.topology.rank = endpoint.config.rank;
  config.topology.size = endpoint.config.size;
  config.topology.host_ids = made.host_ids;
  config.topology.host_names = made.host_names;
  config.mailbox = std::move(made.mailbox);
  config.segment = std::move(made.segment);
  config.transport = std::move(made.transport);
  HostBackendConfig host;
  host.chunk_bytes = static_cast<std::size_t>(config.options.chunk_bytes);
  host.segment = config.segment.get();
  host.transport = config.transport.get();
  host.wait_seconds = WaitSeconds(config.options);
  config.backends.push_back(CreateHostBackend(host));
  config.cause_of_death = CauseOfDeath(endpoint.store_url, endpoint.secret);
  std::shared_ptr<Engine> engine = Engine::Create(std::move(config));
  const Options& options = endpoint.options;
  if (!options.timeline.empty() && options.timeline != "DYNAMIC") {
    Result started = engine->StartTimeline(options.timeline, options.timeline_mark_cycles);
    if (!started.ok()) {
      engine->Shutdown(started.message());
      return started;
    }
  }
  return engine;
}

Result ReadRequest(const ronde_request& in, Request* out) {
  if (!RONDE_HAS_FIELD(&in, context)) {
    return Result(Code::kArgument, "ronde_request is smaller than this library's; rebuild the caller");
  }
  if (in.op < 0 || in.op >= static_cast<int>(std::size(kOps))) {
    return Result(Code::kArgument, "there is no operation " + std::to_string(in.op));
  }
  if (in.reduction < 0 || in.reduction >= static_cast<int>(std::size(kReductions))) {
    return Result(Code::kArgument, "there is no reduction " + std::to_string(in.reduction));
  }
  out->op = static_cast<Op>(in.op);
  out->reduction = static_cast<Reduction>(in.reduction);
  out->prescale = in.prescale_factor;
  out->postscale = in.postscale_factor;
  out->root = in.root_rank;
  out->set = in.process_set;
  out->device = in.device;
  out->caller_waits = (in.flags & RONDE_CALLER_WAITS) != 0;
  out->name = Text(in.name);
  out->splits.assign(in.splits, in.splits + in.num_splits);
  out->ranks.assign(in.ranks, in.ranks + in.num_ranks);
  out->tensors.reserve(in.num_tensors);
  for (uint32_t i = 0; i < in.num_tensors; ++i) {
    const ronde_tensor& t = in.tensors[i];
    if (t.dtype < 0 || t.dtype >= static_cast<int>(std::size(kDTypes))) {
      return Result(Code::kArgument, "there is no element type " + std::to_string(t.dtype));
    }
    out->tensors.push_back(
        TensorRequest{Text(t.name), t.input, t.output, static_cast<DType>(t.dtype), Shape(t.shape, t.shape + t.ndim)});
  }
  if (in.allocate != nullptr) {
    out->allocate = [allocate = in.allocate, context = in.context](std::uint32_t tensor, const Shape& shape) {
      return allocate(context, tensor, shape.data(), static_cast<int32_t>(shape.size()));
    };
  }
  if (in.done != nullptr) {
    out->done = [done = in.done, context = in.context](const Result& result) {
      ronde_error error{result.code(), result.ok() ? "" : result.message()};
      done(context, result.ok() ? nullptr : &error);
    };
  }
  return Ok();
}

}  // namespace

extern "C" {

uint32_t ronde_abi_version(void) { return RONDE_ABI_VERSION; }
const char* ronde_version(void) { return RONDE_VERSION; }

int32_t ronde_error_code(const ronde_error* error) { return static_cast<int32_t>(error->code); }
const char* ronde_error_message(const ronde_error* error) { return error->message.c_str(); }
void ronde_error_free(ronde_error* error) { delete error; }

ronde_error* ronde_endpoint_create(const ronde_config* config, ronde_endpoint** result) {
  if (InForkedChild()) return ToC(FindEngine(0).error());
  if (Result bad = CheckConfig(config); !bad.ok()) return ToC(bad);
  auto options = Options::FromEnvironment();
  if (!options.ok()) return ToC(options.error());
  if (Result bad = CheckOptions(options.value()); !bad.ok()) return ToC(bad);
  LogLevel level = LogLevel::kWarning;
  if (!ParseLogLevel(options->log_level, &level)) {
    return ToC(Result(Code::kArgument, "RONDE_LOG_LEVEL is '" + options->log_level +
                                           "'; it must be trace, debug, info, warning, error, fatal or off"));
  }
  auto made = std::make_unique<ronde_endpoint>();
  made->config = *config;
  made->host_name = config->host_name ? config->host_name : HostName();
  made->host_id = config->host_id ? config->host_id : HostId();
  made->secret = Text(config->secret);
  made->store_url = Text(config->store_url);
  made->options = options.value();
  made->log = Log(level, !options->log_hide_time, "rank " + std::to_string(config->rank));
  EndpointConfig endpoint;
  endpoint.rank = config->rank;
  endpoint.size = config->size;
  endpoint.host_id = made->host_id;
  endpoint.host_name = made->host_name;
  endpoint.secret = made->secret;
  endpoint.generation = config->generation;
  endpoint.job_options = options->EncodeJob();
  endpoint.heap_bytes = options->shared_bytes;
  endpoint.network_interfaces = options->network_interfaces;
  endpoint.shared.ring_bytes = static_cast<std::uint64_t>(options->ring_bytes);
  endpoint.shared.shared_memory = options->transport == "auto";
  endpoint.shared.peer_timeout = options->peer_timeout;
  auto listening = Endpoint::Create(endpoint, made->log);
  if (!listening.ok()) return ToC(listening.error());
  made->endpoint = std::move(listening.value());
  made->blob = made->endpoint->blob();
  *result = made.release();
  return nullptr;
}

const void* ronde_endpoint_blob(const ronde_endpoint* endpoint, size_t* size) {
  *size = endpoint->blob.size();
  return endpoint->blob.data();
}

ronde_error* ronde_endpoint_connect(ronde_endpoint* taken, const void* const* blobs, const size_t* sizes,
                                    double seconds, ronde_engine* engine) {
  std::unique_ptr<ronde_endpoint> endpoint(taken);
  std::vector<std::string> all;
  for (int32_t i = 0; i < endpoint->config.size; ++i) {
    all.emplace_back(static_cast<const char*>(blobs[i]), sizes[i]);
  }
  try {
    auto made = Connect(*endpoint, all, After(seconds));
    if (!made.ok()) return ToC(made.error());
    *engine = RegisterEngine(std::move(made.value()));
    return nullptr;
  } catch (const std::system_error& error) {  // the only exception that the core leaves to others: std::thread's
    return ToC(Result(Code::kTransport, std::string("a thread cannot be started: ") + error.what()));
  }
}

void ronde_endpoint_free(ronde_endpoint* endpoint) { delete endpoint; }

ronde_error* ronde_shutdown(ronde_engine engine, const char* failure) {
  if (auto found = UnregisterEngine(engine)) found->Shutdown(Text(failure));
  return nullptr;
}

int32_t ronde_is_initialized(ronde_engine engine) { return FindEngine(engine).ok(); }

ronde_error* ronde_get_topology(ronde_engine engine, ronde_topology* topology) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  const Topology& t = found.value()->topology();
  topology->rank = t.rank;
  topology->size = t.size;
  topology->local_rank = t.local_rank();
  topology->local_size = t.local_size();
  topology->cross_rank = t.cross_rank();
  topology->cross_size = t.cross_size();
  topology->is_homogeneous = t.is_homogeneous();
  topology->shared_memory = found.value()->has_shared_memory();
  return nullptr;
}

ronde_error* ronde_check(ronde_engine engine, const ronde_request* request) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  Request read;
  if (Result bad = ReadRequest(*request, &read); !bad.ok()) return ToC(bad);
  return ToC(found.value()->Check(read));
}

ronde_error* ronde_submit(ronde_engine engine, const ronde_request* request, ronde_handle** handle) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  Request read;
  if (Result bad = ReadRequest(*request, &read); !bad.ok()) return ToC(bad);
  auto made = std::make_shared<ronde_handle>(std::move(read), found.value());
  Result refused = found.value()->Submit(std::shared_ptr<Operation>(made, &made->operation));
  if (!refused.ok()) return ToC(refused);
  if (handle != nullptr) {
    *handle = made.get();
    (*handle)->self = std::move(made);
  }
  return nullptr;
}

// In a forked child an operation of the parent's never ends; to the child it has failed.
int32_t ronde_poll(const ronde_handle* handle) { return handle->operation.done() || InForkedChild(); }

int32_t ronde_wait(ronde_handle* handle, double seconds) {
  if (ronde_poll(handle)) return 1;
  Deadline deadline = seconds < 0 ? Deadline::max() : After(seconds);
  // The engine ends every operation before it goes, so without one the operation is over.
  auto engine = handle->engine.lock();
  return engine ? engine->Wait(handle->operation, deadline) : handle->operation.Wait(deadline);
}

ronde_error* ronde_handle_error(const ronde_handle* handle) {
  if (!handle->operation.done() && InForkedChild()) return ToC(FindEngine(0).error());
  return ToC(handle->operation.result());
}

int32_t ronde_handle_output(const ronde_handle* handle, uint32_t tensor, ronde_output* output) {
  const auto& operation = handle->operation;
  if (!operation.done() || tensor >= operation.outputs.size()) return 0;
  const auto& o = operation.outputs[tensor];
  output->data = o.data;
  output->shape = o.shape.data();
  output->ndim = static_cast<int32_t>(o.shape.size());
  output->dtype = static_cast<int32_t>(operation.request().tensors[tensor].dtype);
  return 1;
}

int64_t ronde_handle_value(const ronde_handle* handle, int32_t* flag) {
  if (flag != nullptr) *flag = handle->operation.flag;
  return handle->operation.value;
}

const int64_t* ronde_handle_received_splits(const ronde_handle* handle, uint32_t tensor, uint32_t* count) {
  const auto& outputs = handle->operation.outputs;
  *count = 0;
  if (!handle->operation.done() || tensor >= outputs.size()) return nullptr;
  *count = static_cast<uint32_t>(outputs[tensor].received_splits.size());
  return outputs[tensor].received_splits.data();
}

void ronde_handle_free(ronde_handle* handle) {
  if (handle == nullptr || InForkedChild()) return;  // in a child its locks may be held by threads that are not there
  auto last = std::move(handle->self);
}

ronde_error* ronde_allocate_shared(ronde_engine engine, size_t bytes, ronde_memory** memory) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  auto made = found.value()->AllocateShared(bytes);
  if (!made.ok()) return ToC(made.error());
  *memory = new ronde_memory{std::move(made.value())};
  return nullptr;
}

void* ronde_memory_data(const ronde_memory* memory) { return memory->memory.get(); }

void ronde_memory_free(ronde_memory* memory) {
  if (!InForkedChild()) delete memory;  // in a child it is not mapped, and the parent still uses it
}

ronde_error* ronde_process_set_ranks(ronde_engine engine, uint32_t process_set, int32_t* ranks, uint32_t capacity,
                                     uint32_t* count) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  auto members = found.value()->Members(process_set);
  if (!members.ok()) return ToC(members.error());
  *count = static_cast<uint32_t>(members->size());
  std::copy_n(members->begin(), std::min<std::size_t>(capacity, members->size()), ranks);
  return nullptr;
}

ronde_error* ronde_start_timeline(ronde_engine engine, const char* path, int32_t mark_cycles) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  return ToC(found.value()->StartTimeline(Text(path), mark_cycles != 0));
}

ronde_error* ronde_stop_timeline(ronde_engine engine) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  found.value()->StopTimeline();
  return nullptr;
}

ronde_error* ronde_get_metrics(ronde_engine engine, ronde_metric* metrics, uint32_t capacity, uint32_t* count) {
  auto found = FindEngine(engine);
  if (!found.ok()) return ToC(found.error());
  const MetricRows rows = found.value()->Metrics();
  *count = static_cast<uint32_t>(rows.size());
  for (std::size_t i = 0; i < std::min<std::size_t>(capacity, rows.size()); ++i) {
    std::snprintf(metrics[i].name, sizeof metrics[i].name, "%s", rows[i].first.c_str());
    metrics[i].value = rows[i].second;
  }
  return nullptr;
}
}
