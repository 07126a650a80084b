/* What ops.cc uses of XLA's interface for foreign functions: structs of version 0.1 and later, which only grow at their
 * ends. Names are XLA's without "XLA_FFI_".
 */
#ifndef RONDE_ADAPTERS_JAX_XLA_FFI_H_
#define RONDE_ADAPTERS_JAX_XLA_FFI_H_

#include <cstddef>
#include <cstdint>

namespace ronde::jax {

struct Error;  // XLA's own

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
constexpr int kMetadata = 1;

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArgs {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};
constexpr int kUnknown = 2;  // codes
constexpr int kInvalidArgument = 3;
constexpr int kFailedPrecondition = 9;

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArgs* args);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t ndim;
  int64_t* shape;
};

struct Buffers {  // arguments or results
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Buffer** buffers;
};

struct Span {
  const char* data;
  size_t size;
};

struct Array {
  int dtype;
  size_t size;
  const void* data;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Span** names;
  void** values;
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

}  // namespace ronde::jax

#endif  // RONDE_ADAPTERS_JAX_XLA_FFI_H_
