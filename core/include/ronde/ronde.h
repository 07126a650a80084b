/* The C interface of libronde: all that adapters and the Python module use. Plain C structs that only grow (see
 * struct_size), so one binary serves every framework release.
 *
 * Errors. Functions that can fail return NULL on success, else an error that the caller frees with ronde_error_free.
 * Threads. Every function may be called from any thread. After fork() the child gets an error from each.
 */
#ifndef RONDE_RONDE_H_
#define RONDE_RONDE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RONDE_ABI_VERSION 1
#define RONDE_API __attribute__((visibility("default")))

typedef struct ronde_error ronde_error;
typedef struct ronde_endpoint ronde_endpoint;
typedef struct ronde_handle ronde_handle;
typedef struct ronde_store ronde_store;
typedef struct ronde_store_server ronde_store_server;

RONDE_API uint32_t ronde_abi_version(void);
RONDE_API const char* ronde_version(void);

/* ---- Errors ---- */
RONDE_API int32_t ronde_error_code(const ronde_error* error);        /* a number of errors.def */
RONDE_API const char* ronde_error_message(const ronde_error* error); /* for the user; lives as long as the error */
RONDE_API void ronde_error_free(ronde_error* error);

/* ---- Tables: the vocabulary, for bindings that must not list it again ---- */
typedef struct ronde_row {
  const char* name;
  int32_t number;
  int32_t size;      /* dtypes: bytes per element */
  const char* extra; /* reductions: public name; dtypes: kind; errors: "PythonClass BaseClass retry|final" */
} ronde_row;
typedef struct ronde_option_row {
  const char* name; /* FUSION_THRESHOLD: read as RONDE_..., else HOROVOD_... */
  const char* type; /* Bool, Int, Double, String */
  const char* default_text;
  const char* scope; /* Job or Rank */
  const char* flag;  /* of ronderun; "" if none */
  double flag_scale;
  const char* section; /* of ronderun's config file */
  const char* help;
} ronde_option_row;
/* The row, or NULL past the end. */
RONDE_API const ronde_row* ronde_dtype_row(uint32_t index);
RONDE_API const ronde_row* ronde_op_row(uint32_t index);
RONDE_API const ronde_row* ronde_reduction_row(uint32_t index);
RONDE_API const ronde_row* ronde_error_row(uint32_t index);
RONDE_API const ronde_option_row* ronde_option_row_at(uint32_t index);

/* ---- Stores: key-value rendezvous ("unix:/path", "tcp:host:port", "file:/directory") ---- */
RONDE_API ronde_error* ronde_store_open(const char* url, const char* secret, ronde_store** store);
RONDE_API ronde_error* ronde_store_set(ronde_store* store, const char* key, const void* value, size_t size);
/* *value is freed with ronde_free. Waits at most `seconds`. */
RONDE_API ronde_error* ronde_store_get(ronde_store* store, const char* key, double seconds, void** value, size_t* size);
/* Hands in blob `index` of `count` and waits for all; values[i] and sizes[i] (arrays of count) are filled, each value
 * freed with ronde_free. */
RONDE_API ronde_error* ronde_store_exchange(ronde_store* store, const char* key, uint32_t index, uint32_t count,
                                            const void* blob, size_t size, double seconds, void** values,
                                            size_t* sizes);
RONDE_API void ronde_store_close(ronde_store* store);
RONDE_API ronde_error* ronde_store_serve(const char* url, const char* secret, ronde_store_server** server);
/* Where it listens ("tcp:127.0.0.1:0" gets a port). Lives as long as the server. */
RONDE_API const char* ronde_store_server_url(const ronde_store_server* server);
RONDE_API void ronde_store_server_stop(ronde_store_server* server);
RONDE_API void ronde_free(void* memory);

/* ---- Life cycle of an engine ---- */
/* Engine ids are never reused. 0 stands for the engine made last and still alive (the process's default). */
typedef uint64_t ronde_engine;

typedef struct ronde_config {
  uint32_t struct_size; /* sizeof(ronde_config) */
  int32_t rank;
  int32_t size;
  uint64_t generation;   /* counts init() in this job */
  const char* host_name; /* for messages; NULL: gethostname() */
  const char* host_id;   /* NULL: found by itself; equal exactly for ranks that share a host */
  const char* secret;    /* of the job; NULL for size 1 */
  const char* store_url; /* where death/<rank> is looked up after a lost connection; NULL: nowhere */
} ronde_config;

/* Reads the options from the environment, listens. */
RONDE_API ronde_error* ronde_endpoint_create(const ronde_config* config, ronde_endpoint** endpoint);
/* What every other rank needs to know of this one; valid until connect or free. */
RONDE_API const void* ronde_endpoint_blob(const ronde_endpoint* endpoint, size_t* size);
/* Meets the other ranks and starts the engine. Takes the endpoint, also on failure. */
RONDE_API ronde_error* ronde_endpoint_connect(ronde_endpoint* endpoint, const void* const* blobs, const size_t* sizes,
                                              double seconds, ronde_engine* engine);
RONDE_API void ronde_endpoint_free(ronde_endpoint* endpoint);
/* Ends the engine: pending operations fail. failure NULL: an orderly goodbye; else the other ranks abort and their
 * errors say it, e.g. "ValueError: boom". Ending an unknown engine is no error. */
RONDE_API ronde_error* ronde_shutdown(ronde_engine engine, const char* failure);
RONDE_API int32_t ronde_is_initialized(ronde_engine engine);

typedef struct ronde_topology {
  uint32_t struct_size;
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size;
  int32_t is_homogeneous; /* as many ranks on every host */
  int32_t shared_memory;  /* the ranks of this host exchange data through it */
} ronde_topology;
RONDE_API ronde_error* ronde_get_topology(ronde_engine engine, ronde_topology* topology);

/* ---- Memory that the ranks of this host reach without copies ---- */
typedef struct ronde_memory ronde_memory;
/* At least 64-byte aligned, not zeroed. Where the ranks share no memory it is ordinary memory; an argument error when
 * RONDE_SHARED_BYTES or the host has no more. It may outlive the engine. */
RONDE_API ronde_error* ronde_allocate_shared(ronde_engine engine, size_t bytes, ronde_memory** memory);
RONDE_API void* ronde_memory_data(const ronde_memory* memory);
RONDE_API void ronde_memory_free(ronde_memory* memory);

/* ---- Operations ---- */
typedef struct ronde_tensor {
  const char* name;  /* of a group's member; NULL: derived from the request's name */
  const void* input; /* borrowed until done */
  void* output;      /* borrowed until done; may equal input. NULL: from `allocate`, else memory of the handle's */
  int32_t dtype;     /* wire number */
  int32_t ndim;
  const int64_t* shape; /* of the input */
} ronde_tensor;

/* Flag of a request: its caller can do nothing else until it ends, though not in ronde_wait. For stall reports. */
#define RONDE_CALLER_WAITS 1u

typedef struct ronde_request {
  uint32_t struct_size; /* sizeof(ronde_request) */
  int32_t op;           /* wire number */
  int32_t reduction;
  int32_t root_rank; /* broadcast: rank in the job */
  uint32_t process_set;
  int32_t device; /* -1: host memory */
  double prescale_factor;
  double postscale_factor;
  const char* name;            /* NULL: unnamed, matched by order among unnamed ones of the same set and op */
  const ronde_tensor* tensors; /* all or nothing */
  uint32_t num_tensors;
  uint32_t num_splits;   /* alltoall: 0 (rows split evenly) or tensors x members */
  const int64_t* splits; /* rows to each member, tensor after tensor */
  const int32_t* ranks;  /* add_process_set: the members; remove_process_set: the id */
  uint32_t num_ranks;
  uint32_t flags; /* of RONDE_CALLER_WAITS */
  /* Memory for output `tensor` of this shape, called on an engine thread; NULL: fail the operation. */
  void* (*allocate)(void* context, uint32_t tensor, const int64_t* shape, int32_t ndim);
  /* Called exactly once when the operation ended, on an engine thread or inside ronde_submit; may be NULL. `error` is
   * borrowed; NULL on success. */
  void (*done)(void* context, const ronde_error* error);
  void* context;
} ronde_request;

/* What ronde_submit would refuse at once, for callers that submit later. */
RONDE_API ronde_error* ronde_check(ronde_engine engine, const ronde_request* request);
/* An error here means that nothing was submitted and `done` will not be called. *handle may be NULL if not wanted. */
RONDE_API ronde_error* ronde_submit(ronde_engine engine, const ronde_request* request, ronde_handle** handle);
RONDE_API int32_t ronde_poll(const ronde_handle* handle);
/* 1 when the operation has ended, 0 when `seconds` passed before. Negative seconds: no limit (the engine's own limits
 * hold). */
RONDE_API int32_t ronde_wait(ronde_handle* handle, double seconds);
/* The error of an ended operation, NULL on success. */
RONDE_API ronde_error* ronde_handle_error(const ronde_handle* handle);
typedef struct ronde_output {
  void* data;
  const int64_t* shape;
  int32_t ndim;
  int32_t dtype;
} ronde_output;
/* Of an operation that succeeded; valid as long as the handle. 0: no such tensor. */
RONDE_API int32_t ronde_handle_output(const ronde_handle* handle, uint32_t tensor, ronde_output* output);
/* join: the last rank; add_process_set: the id (flag 1: it existed already). */
RONDE_API int64_t ronde_handle_value(const ronde_handle* handle, int32_t* flag);
/* alltoall: rows received from each member. */
RONDE_API const int64_t* ronde_handle_received_splits(const ronde_handle* handle, uint32_t tensor, uint32_t* count);
/* May be called before the operation ended; the borrowed memory still belongs to the engine until done. */
RONDE_API void ronde_handle_free(ronde_handle* handle);

/* ---- Process sets ---- */
/* Members, ascending; writes at most `capacity`; *count is their number. Error when the set is unknown. */
RONDE_API ronde_error* ronde_process_set_ranks(ronde_engine engine, uint32_t process_set, int32_t* ranks,
                                               uint32_t capacity, uint32_t* count);

/* ---- Timeline (Chrome trace events) ---- */
/* Rank 0 writes one, the other ranks only with RONDE_TIMELINE_ALL_RANKS (t.json becomes t.rank1.json); for them the
 * call does nothing. An error when one is open already or the file cannot be written. Stopping without one is no error.
 */
RONDE_API ronde_error* ronde_start_timeline(ronde_engine engine, const char* path, int32_t mark_cycles);
RONDE_API ronde_error* ronde_stop_timeline(ronde_engine engine);

/* ---- Metrics: what an engine did since it was made ---- */
typedef struct ronde_metric {
  char name[56]; /* a dot leads into a group: "bytes", "nanoseconds.pack", "ops.allreduce.bytes" */
  int64_t value;
} ronde_metric;
/* Writes at most `capacity` rows; *count is their number, constant in a process. */
RONDE_API ronde_error* ronde_get_metrics(ronde_engine engine, ronde_metric* metrics, uint32_t capacity,
                                         uint32_t* count);

#ifdef __cplusplus
}
#endif
#endif /* RONDE_RONDE_H_ */
