/* ronde's operations as TensorFlow ops: asynchronous, for host tensors, in eager mode, tf.function and TF 1 sessions.
 *
 * One kernel serves all. An op hands its tensors to the engine and returns; the engine's completion ends it, so any
 * number of ops is in flight whatever the number of TensorFlow's threads. All ops take lists: one tensor is a group of
 * one. They are stateful, so TensorFlow neither folds nor merges them.
 *
 * Who outlives whom: a kernel (one per node) outlives its calls; a Call lives from Compute to the engine's `done`.
 */
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ronde/ronde.h"
#include "tensorflow_api.h"

namespace ronde::tensorflow {
namespace {

Api api;
std::string load_error;

// ---- Small owners ----

struct Status {
  TF_Status* const get = api.TF_NewStatus();
  Status() = default;
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status() { api.TF_DeleteStatus(get); }
  bool ok() const { return api.TF_GetCode(get) == kOk; }
};

// Calls an entry of the table.
template <auto* function>
struct Deleter {
  template <typename T>
  void operator()(T* owned) const {
    (*function)(owned);
  }
};
using Tensor = std::unique_ptr<TF_Tensor, Deleter<&api.TF_DeleteTensor>>;
using Shape = std::unique_ptr<TF_ShapeHandle, Deleter<&api.TF_DeleteShapeHandle>>;

struct ErrorDeleter {
  void operator()(ronde_error* error) const { ronde_error_free(error); }
};
using Error = std::unique_ptr<ronde_error, ErrorDeleter>;

// The message starts with the name of the Python class that it stands for: "ronde MismatchError: ...".
void SetStatus(TF_Status* status, const ronde_error* error) {
  std::string name = "RondeError";
  for (uint32_t index = 0; const ronde_row* row = ronde_error_row(index); ++index) {
    if (row->number == ronde_error_code(error)) name = std::string(row->extra, std::strcspn(row->extra, " "));
  }
  const bool of_user = name == "ArgumentError" || name == "MismatchError";
  const int code = of_user ? kInvalidArgument : name == "NotInitializedError" ? kFailedPrecondition : kUnknown;
  api.TF_SetStatus(status, code, ("ronde " + name + ": " + ronde_error_message(error)).c_str());
}

int64_t ElementSize(int32_t dtype) {
  for (uint32_t index = 0; const ronde_row* row = ronde_dtype_row(index); ++index) {
    if (row->number == dtype) return row->size;
  }
  return 0;
}

// ---- The table of ops ----

enum class Result { kLikeInput, kRows, kNumber, kNone };  // rows: the first dimension is known at the end only

struct Row {
  const char* op;  // the core's name of the operation
  const char* name;
  Result result;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
};

constexpr size_t kRowCount = 7;
const std::array<Row, kRowCount> kRows = {{
    {"allreduce", "RondeAllreduce", Result::kLikeInput, {"tensors: T"}, {"results: T"}},
    {"broadcast", "RondeBroadcast", Result::kLikeInput, {"tensors: T"}, {"results: T"}},
    {"allgather", "RondeAllgather", Result::kRows, {"tensors: T"}, {"results: T"}},
    {"reducescatter", "RondeReducescatter", Result::kRows, {"tensors: T"}, {"results: T"}},
    {"alltoall", "RondeAlltoall", Result::kRows, {"tensors: T", "splits: int64"}, {"results: T", "received: int64"}},
    {"barrier", "RondeBarrier", Result::kNone, {}, {}},
    {"join", "RondeJoin", Result::kNumber, {}, {"last: int32"}},
}};

// ---- Kernels: what is fixed when a node is made ----

struct Kernel {
  explicit Kernel(const Row& row) : row(row) {}
  const Row& row;
  int32_t op = -1;
  int32_t reduction = 0, root_rank = 0, process_set = 0;
  double prescale = 1, postscale = 1;
  std::string name;
  std::vector<int32_t> dtypes;  // of the tensors, by the core's numbers
};

std::string StringAttr(TF_OpKernelConstruction* construction, const char* name, TF_Status* status) {
  int32_t list = 0, size = 0;
  api.TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &size, status);
  std::string value(size > 0 ? static_cast<size_t>(size) : 0, '\0');
  if (!value.empty()) {
    api.TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  }
  return value;
}

int32_t IntAttr(TF_OpKernelConstruction* construction, const char* name, TF_Status* status) {
  int32_t value = 0;
  api.TF_OpKernelConstruction_GetAttrInt32(construction, name, &value, status);
  return value;
}

// TensorFlow's attributes have no double: it travels as text, read whatever the process's locale is.
double DoubleAttr(TF_OpKernelConstruction* construction, const char* name, TF_Status* status) {
  const std::string text = StringAttr(construction, name, status);
  double value = 1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void* Create(const Row& row, TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>(row);
  for (uint32_t index = 0; const ronde_row* op = ronde_op_row(index); ++index) {
    if (std::strcmp(op->name, row.op) == 0) kernel->op = op->number;
  }
  Status status;
  auto* s = status.get;
  kernel->name = StringAttr(construction, "tensor_name", s);
  if (status.ok()) kernel->process_set = IntAttr(construction, "process_set", s);
  if (status.ok()) kernel->reduction = IntAttr(construction, "reduction", s);
  if (status.ok()) kernel->root_rank = IntAttr(construction, "root_rank", s);
  if (status.ok()) kernel->prescale = DoubleAttr(construction, "prescale", s);
  if (status.ok()) kernel->postscale = DoubleAttr(construction, "postscale", s);
  int32_t count = 0, bytes = 0;
  if (status.ok()) api.TF_OpKernelConstruction_GetAttrSize(construction, "dtypes", &count, &bytes, s);
  kernel->dtypes.resize(count > 0 ? static_cast<size_t>(count) : 0);
  if (status.ok() && count > 0) {
    api.TF_OpKernelConstruction_GetAttrInt32List(construction, "dtypes", kernel->dtypes.data(), count, s);
  }
  if (!status.ok()) api.TF_OpKernelConstruction_Failure(construction, s);
  return kernel.release();
}

// ---- Completion ----

// TensorFlow hands a kernel the address of a std::function<void()> that dies when the kernel's function returns, and
// its C interface has no way to keep it: it is moved out of there.
using Done = std::function<void()>;

// Whether that is what the address leads to: the last two of the four words of libstdc++'s std::function point into the
// code of one loaded library.
bool IsFunction(const TF_AsyncOpKernelDoneCallback* done) {
  static_assert(sizeof(Done) == 4 * sizeof(void*), "this is not libstdc++");
  void* words[4];
  std::memcpy(words, reinterpret_cast<const void*>(done), sizeof(words));
  Dl_info manager, invoker;
  return words[2] != nullptr && words[3] != nullptr && dladdr(words[2], &manager) != 0 &&
         dladdr(words[3], &invoker) != 0 && manager.dli_fbase == invoker.dli_fbase;
}

// ---- Calls: one run of a node ----

struct Call {
  Call(const Kernel& kernel, TF_OpKernelContext* context, Done done)
      : kernel(kernel), context(context), done(std::move(done)) {}
  const Kernel& kernel;
  TF_OpKernelContext* context;
  Done done;
  Status status;
  std::vector<Tensor> held;                  // keeps memory alive that the engine uses
  std::vector<std::vector<int64_t>> shapes;  // of the tensors
  std::vector<int> types;                    // of the tensors, TensorFlow's numbers
  std::vector<ronde_tensor> tensors;
  std::vector<int64_t> splits;
  ronde_handle* handle = nullptr;
  std::atomic<int> steps{2};  // the submission's return and the operation's end, in either order

  bool ok() const { return status.ok(); }
};

char no_elements;  // the address of tensors that have none

void* Hold(Call* call, Tensor tensor) {
  void* data = api.TF_TensorData(tensor.get());
  call->held.push_back(std::move(tensor));
  return data == nullptr ? &no_elements : data;
}

Tensor GetInput(Call* call, int index) {
  TF_Tensor* tensor = nullptr;
  api.TF_GetInput(call->context, index, &tensor, call->status.get);
  return Tensor(tensor);
}

void* Allocate(Call* call, int index, int type, const int64_t* shape, int32_t ndim, int64_t element_size) {
  int64_t bytes = element_size;
  for (int32_t dim = 0; dim < ndim; ++dim) bytes *= shape[dim];
  Tensor tensor(
      api.TF_AllocateOutput(call->context, index, type, shape, ndim, static_cast<size_t>(bytes), call->status.get));
  return call->ok() ? Hold(call, std::move(tensor)) : nullptr;
}

void* AllocateRows(void* context, uint32_t index, const int64_t* shape, int32_t ndim) {
  auto* call = static_cast<Call*>(context);
  return Allocate(call, static_cast<int>(index), call->types[index], shape, ndim,
                  ElementSize(call->kernel.dtypes[index]));
}

// Reads tensor `index`; its result goes into the input's memory when nobody else reads that.
void ReadTensor(Call* call, int index) {
  Tensor input = GetInput(call, index);
  if (!call->ok()) return;
  std::vector<int64_t> shape(static_cast<size_t>(api.TF_NumDims(input.get())));
  for (size_t dim = 0; dim < shape.size(); ++dim) shape[dim] = api.TF_Dim(input.get(), static_cast<int>(dim));
  ronde_tensor tensor{};
  const int32_t ndim = static_cast<int32_t>(shape.size());
  call->types.push_back(api.TF_TensorType(input.get()));
  if (call->kernel.row.result == Result::kLikeInput) {
    input.reset();  // a second reference would keep TensorFlow from giving the memory away
    int forwarded = -1;
    Tensor output(api.TF_ForwardInputOrAllocateOutput(call->context, &index, 1, index, shape.data(), ndim, &forwarded,
                                                      call->status.get));
    if (!call->ok()) return;
    tensor.output = Hold(call, std::move(output));
    if (forwarded == index) tensor.input = tensor.output;
    if (forwarded != index) input = GetInput(call, index);
  }
  if (input) tensor.input = Hold(call, std::move(input));
  tensor.dtype = call->kernel.dtypes[static_cast<size_t>(index)];
  tensor.ndim = ndim;
  call->shapes.push_back(std::move(shape));
  call->tensors.push_back(tensor);
}

void ReadSplits(Call* call, int index) {
  Tensor input = GetInput(call, index);
  if (!call->ok()) return;
  const auto* first = static_cast<const int64_t*>(api.TF_TensorData(input.get()));
  call->splits.assign(first, first + api.TF_TensorByteSize(input.get()) / sizeof(int64_t));
}

// Outputs beside the tensors.
void WriteExtras(Call* call) {
  const int index = static_cast<int>(call->tensors.size());
  if (call->kernel.row.result == Result::kNumber) {
    void* data = Allocate(call, index, kInt32, nullptr, 0, sizeof(int32_t));
    if (data != nullptr) *static_cast<int32_t*>(data) = static_cast<int32_t>(ronde_handle_value(call->handle, nullptr));
  }
  if (call->kernel.row.outputs.size() == 2) {
    uint32_t count = 0;
    const int64_t* received = ronde_handle_received_splits(call->handle, 0, &count);
    const int64_t size = count;
    void* data = Allocate(call, index, kInt64, &size, 1, sizeof(int64_t));
    if (data != nullptr) std::copy_n(received, count, static_cast<int64_t*>(data));
  }
}

void Finish(Call* taken) {
  std::unique_ptr<Call> call(taken);
  if (call->ok() && call->handle != nullptr) WriteExtras(call.get());
  if (call->handle != nullptr) ronde_handle_free(call->handle);
  if (!call->ok()) api.TF_OpKernelContext_Failure(call->context, call->status.get);
  Done done = std::move(call->done);
  call.reset();  // before TensorFlow goes on: it may free the kernel
  done();
}

void Step(Call* call) {
  if (call->steps.fetch_sub(1, std::memory_order_acq_rel) == 1) Finish(call);
}

void OperationEnded(void* context, const ronde_error* error) {
  auto* call = static_cast<Call*>(context);
  if (error != nullptr && call->ok()) SetStatus(call->status.get, error);
  Step(call);
}

void Submit(Call* call) {
  const Kernel& kernel = call->kernel;
  for (size_t i = 0; i < call->tensors.size(); ++i) call->tensors[i].shape = call->shapes[i].data();
  ronde_request request{};
  request.struct_size = sizeof(request);
  request.op = kernel.op;
  request.reduction = kernel.reduction;
  request.root_rank = kernel.root_rank;
  request.process_set = static_cast<uint32_t>(kernel.process_set);
  request.device = -1;
  request.flags = RONDE_CALLER_WAITS;
  request.prescale_factor = kernel.prescale;
  request.postscale_factor = kernel.postscale;
  request.name = kernel.name.empty() ? nullptr : kernel.name.c_str();
  request.tensors = call->tensors.data();
  request.num_tensors = static_cast<uint32_t>(call->tensors.size());
  request.splits = call->splits.data();
  request.num_splits = static_cast<uint32_t>(call->splits.size());
  request.allocate = kernel.row.result == Result::kRows ? AllocateRows : nullptr;
  request.done = OperationEnded;
  request.context = call;
  if (Error refused{ronde_submit(0, &request, &call->handle)}) {
    SetStatus(call->status.get, refused.get());
    Finish(call);
  } else {
    Step(call);
  }
}

void Compute(void* made, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& kernel = *static_cast<const Kernel*>(made);
  static const bool is_function = IsFunction(done);
  if (!is_function) {
    Status status;
    api.TF_SetStatus(status.get, kUnknown,
                     "this TensorFlow release completes operations in a way that this ronde does not know: use a newer "
                     "ronde or an older TensorFlow");
    api.TF_OpKernelContext_Failure(context, status.get);
    api.TF_RunAsyncOpKernelDoneCallback(done);
    return;
  }
  auto call = std::make_unique<Call>(kernel, context, std::move(*reinterpret_cast<Done*>(done)));
  const int count = static_cast<int>(kernel.dtypes.size());
  for (int index = 0; index < count && call->ok(); ++index) ReadTensor(call.get(), index);
  if (call->ok() && kernel.row.inputs.size() == 2) ReadSplits(call.get(), count);
  if (call->ok()) {
    Submit(call.release());
  } else {
    Finish(call.release());
  }
}

void Delete(void* kernel) { delete static_cast<Kernel*>(kernel); }

// ---- Shapes ----

class Shapes {
 public:
  Shapes(TF_ShapeInferenceContext* context, TF_Status* status) : context_(context), status_(status) {}

  int inputs() const { return static_cast<int>(api.TF_ShapeInferenceContextNumInputs(context_)); }
  Shape Input(int index) {
    Shape shape(api.TF_NewShapeHandle());
    api.TF_ShapeInferenceContextGetInput(context_, index, shape.get(), status_);
    return shape;
  }
  // One dimension of unknown size.
  Shape Vector() {
    Shape unknown(api.TF_NewShapeHandle()), vector(api.TF_NewShapeHandle());
    if (ok()) api.TF_ShapeInferenceContextWithRank(context_, unknown.get(), 1, vector.get(), status_);
    return vector;
  }
  // The shape with another, unknown number of rows.
  Shape Rows(const Shape& shape) {
    Shape checked(api.TF_NewShapeHandle()), row(api.TF_NewShapeHandle()), result(api.TF_NewShapeHandle());
    if (ok()) api.TF_ShapeInferenceContextWithRankAtLeast(context_, shape.get(), 1, checked.get(), status_);
    if (ok()) api.TF_ShapeInferenceContextSubshape(context_, checked.get(), 1, INT64_MAX, row.get(), status_);
    Shape rows = Vector();
    if (ok()) {
      api.TF_ShapeInferenceContextConcatenateShapes(context_, rows.get(), row.get(), result.get(), status_);
    }
    return result;
  }
  Shape Scalar() { return Shape(api.TF_ShapeInferenceContextScalar(context_)); }
  void SetOutput(int index, const Shape& shape) {
    if (ok()) api.TF_ShapeInferenceContextSetOutput(context_, index, shape.get(), status_);
  }

 private:
  bool ok() const { return api.TF_GetCode(status_) == kOk; }

  TF_ShapeInferenceContext* const context_;
  TF_Status* const status_;
};

void Infer(const Row& row, TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  const int tensors = shapes.inputs() - (row.inputs.size() == 2 ? 1 : 0);
  for (int index = 0; index < tensors; ++index) {
    Shape input = shapes.Input(index);
    if (row.result == Result::kRows) input = shapes.Rows(input);
    shapes.SetOutput(index, input);
  }
  if (row.outputs.size() == 2) shapes.SetOutput(tensors, shapes.Vector());
  if (row.result == Result::kNumber) shapes.SetOutput(0, shapes.Scalar());
}

// ---- What a rank knows about itself, at the time when the graph runs ----

void* CreateTopology(TF_OpKernelConstruction* construction) {
  Status status;
  auto field = std::make_unique<std::string>(StringAttr(construction, "field", status.get));
  if (!status.ok()) api.TF_OpKernelConstruction_Failure(construction, status.get);
  return field.release();
}

// Fields: rank, local_rank, local_size, size:SET, included:SET.
ronde_error* ReadTopology(const std::string& field, int32_t* value) {
  ronde_topology topology{};
  topology.struct_size = sizeof(topology);
  if (ronde_error* error = ronde_get_topology(0, &topology)) return error;
  const size_t colon = field.find(':');
  if (colon == std::string::npos) {
    *value = field == "rank" ? topology.rank : field == "local_rank" ? topology.local_rank : topology.local_size;
    return nullptr;
  }
  uint32_t process_set = 0, count = 0;
  std::from_chars(field.data() + colon + 1, field.data() + field.size(), process_set);
  std::vector<int32_t> ranks(static_cast<size_t>(topology.size));
  const auto capacity = static_cast<uint32_t>(ranks.size());
  if (ronde_error* error = ronde_process_set_ranks(0, process_set, ranks.data(), capacity, &count)) return error;
  ranks.resize(count);
  const bool included = std::find(ranks.begin(), ranks.end(), topology.rank) != ranks.end();
  *value = field.compare(0, colon, "size") == 0 ? static_cast<int32_t>(count) : included;
  return nullptr;
}

void ComputeTopology(void* field, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  Status status;
  int32_t value = 0;
  if (Error error{ReadTopology(*static_cast<const std::string*>(field), &value)}) {
    SetStatus(status.get, error.get());
  } else {
    Tensor output(api.TF_AllocateOutput(context, 0, kInt32, nullptr, 0, sizeof(value), status.get));
    if (status.ok()) *static_cast<int32_t*>(api.TF_TensorData(output.get())) = value;
  }
  if (!status.ok()) api.TF_OpKernelContext_Failure(context, status.get);
  api.TF_RunAsyncOpKernelDoneCallback(done);
}

void DeleteTopology(void* field) { delete static_cast<std::string*>(field); }

void InferScalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.SetOutput(0, shapes.Scalar());
}

// ---- Registration ----

void Register(const char* name, const std::vector<const char*>& attributes, const std::vector<const char*>& inputs,
              const std::vector<const char*>& outputs, InferShapes infer, CreateKernel create, ComputeAsync compute,
              DeleteKernel destroy) {
  if (!load_error.empty()) return;
  Status status;
  TF_OpDefinitionBuilder* op = api.TF_NewOpDefinitionBuilder(name);
  for (const char* attribute : attributes) api.TF_OpDefinitionBuilderAddAttr(op, attribute);
  for (const char* input : inputs) api.TF_OpDefinitionBuilderAddInput(op, input);
  for (const char* output : outputs) api.TF_OpDefinitionBuilderAddOutput(op, output);
  api.TF_OpDefinitionBuilderSetIsStateful(op, true);
  api.TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer);
  api.TF_RegisterOpDefinition(op, status.get);
  if (status.ok()) {
    api.TF_RegisterKernelBuilder(name, api.TF_NewAsyncKernelBuilder(name, "CPU", create, compute, destroy), status.get);
  }
  if (!status.ok()) load_error = std::string(name) + " cannot be registered: " + api.TF_Message(status.get);
}

// C functions take no context: one instance for each row of the table.
template <size_t number>
void* CreateRow(TF_OpKernelConstruction* construction) {
  return Create(kRows[number], construction);
}
template <size_t number>
void InferRow(TF_ShapeInferenceContext* context, TF_Status* status) {
  Infer(kRows[number], context, status);
}

template <size_t number>
void RegisterRow() {
  const Row& row = kRows[number];
  std::vector<const char*> attributes = {
      "tensor_name: string = ''", "process_set: int = 0",    "reduction: int = 0",     "root_rank: int = 0",
      "prescale: string = '1'",   "postscale: string = '1'", "dtypes: list(int) = []",
  };
  if (!row.inputs.empty()) attributes.push_back("T: list(type) >= 1");
  Register(row.name, attributes, row.inputs, row.outputs, InferRow<number>, CreateRow<number>, Compute, Delete);
}

template <size_t... numbers>
void RegisterRows(std::index_sequence<numbers...>) {
  (RegisterRow<numbers>(), ...);
}

// TensorFlow takes over what is registered while it loads this library.
const bool loaded = [] {
  load_error = LoadApi(&api);
  RegisterRows(std::make_index_sequence<kRowCount>());
  Register("RondeTopology", {"field: string"}, {}, {"value: int32"}, InferScalar, CreateTopology, ComputeTopology,
           DeleteTopology);
  return load_error.empty();
}();

}  // namespace
}  // namespace ronde::tensorflow

// Why nothing was registered, or "". Python asks after loading.
extern "C" __attribute__((visibility("default"))) const char* ronde_tensorflow_error() {
  return ronde::tensorflow::load_error.c_str();
}
