/* An allreduce of any number of host arrays inside of JAX's jit: one foreign function for a whole step.
 *
 * It returns when the operation has ended. XLA runs such calls on its own few threads, in an order that it may choose
 * differently on each rank: of two calls in a program, one must wait for the other.
 */
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ronde/ronde.h"
#include "xla_ffi.h"

namespace ronde::jax {
namespace {

struct ErrorDeleter {
  void operator()(ronde_error* error) const { ronde_error_free(error); }
};
using CoreError = std::unique_ptr<ronde_error, ErrorDeleter>;

struct HandleDeleter {
  void operator()(ronde_handle* handle) const { ronde_handle_free(handle); }
};
using Handle = std::unique_ptr<ronde_handle, HandleDeleter>;

Error* NewError(const CallFrame& call, int code, const std::string& message) {
  ErrorArgs args{sizeof(ErrorArgs), nullptr, message.c_str(), code};
  return call.api->create_error(&args);
}

// The message starts with the name of the Python class that it stands for.
Error* NewError(const CallFrame& call, const ronde_error* error) {
  std::string name = "RondeError";
  for (uint32_t index = 0; const ronde_row* row = ronde_error_row(index); ++index) {
    if (row->number == ronde_error_code(error)) name = std::string(row->extra, std::strcspn(row->extra, " "));
  }
  const bool of_user = name == "ArgumentError" || name == "MismatchError";
  const int code = of_user ? kInvalidArgument : name == "NotInitializedError" ? kFailedPrecondition : kUnknown;
  return NewError(call, code, "ronde " + name + ": " + ronde_error_message(error));
}

template <typename T>
const T* Attribute(const CallFrame& call, std::string_view name) {
  for (int64_t i = 0; i < call.attributes.size; ++i) {
    const Span& found = *call.attributes.names[i];
    if (name == std::string_view(found.data, found.size)) return static_cast<const T*>(call.attributes.values[i]);
  }
  return nullptr;
}

int32_t AllreduceNumber() {
  for (uint32_t index = 0; const ronde_row* row = ronde_op_row(index); ++index) {
    if (std::strcmp(row->name, "allreduce") == 0) return row->number;
  }
  return -1;
}

/* Arguments: the arrays, and perhaps one more, which is only waited for. Attributes: name (string), numbers (int32:
 * reduction, process set, the arrays' dtypes by the core's numbers), scales (float64: before, after). */
Error* Allreduce(const CallFrame& call) {
  const auto* name = Attribute<Span>(call, "name");
  const auto* numbers = Attribute<Array>(call, "numbers");
  const auto* scales = Attribute<Array>(call, "scales");
  const auto count = static_cast<size_t>(call.results.size);
  if (name == nullptr || numbers == nullptr || scales == nullptr || numbers->size != 2 + count || scales->size != 2 ||
      call.arguments.size < call.results.size) {
    return NewError(call, kInvalidArgument, "ronde: this call is not one that ronde.keras makes");
  }
  const auto* number = static_cast<const int32_t*>(numbers->data);
  const auto* scale = static_cast<const double*>(scales->data);
  std::vector<ronde_tensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    const Buffer& argument = *call.arguments.buffers[i];
    tensors[i].input = argument.data;
    tensors[i].output = call.results.buffers[i]->data;
    tensors[i].dtype = number[2 + i];
    tensors[i].ndim = static_cast<int32_t>(argument.ndim);
    tensors[i].shape = argument.shape;
  }
  const std::string text(name->data, name->size);
  ronde_request request{};
  request.struct_size = sizeof(request);
  request.op = AllreduceNumber();
  request.reduction = number[0];
  request.process_set = static_cast<uint32_t>(number[1]);
  request.device = -1;
  request.prescale_factor = scale[0];
  request.postscale_factor = scale[1];
  request.name = text.c_str();
  request.tensors = tensors.data();
  request.num_tensors = static_cast<uint32_t>(count);
  ronde_handle* submitted = nullptr;
  if (CoreError refused{ronde_submit(0, &request, &submitted)}) return NewError(call, refused.get());
  const Handle handle(submitted);
  ronde_wait(handle.get(), -1);
  if (CoreError failed{ronde_handle_error(handle.get())}) return NewError(call, failed.get());
  return nullptr;
}

}  // namespace
}  // namespace ronde::jax

// The foreign function. XLA also calls it to ask for which version of the interface it was made: any that has these
// structs.
extern "C" __attribute__((visibility("default"))) ronde::jax::Error* ronde_jax_allreduce(ronde::jax::CallFrame* call) {
  using namespace ronde::jax;
  for (Extension* each = call->extensions; each != nullptr; each = each->next) {
    if (each->type != kMetadata) continue;
    Version& version = reinterpret_cast<MetadataExtension*>(each)->metadata->version;
    version.major = 0;
    version.minor = call->api != nullptr ? call->api->version.minor : 1;
    return nullptr;
  }
  return Allreduce(*call);
}
