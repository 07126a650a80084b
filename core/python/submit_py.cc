// submit(). Training calls it once per tensor and step, hence the vectorcall convention: no argument tuple, no dict.
#include <array>

#include "arguments.h"
#include "bindings.h"
#include "handle.h"

namespace ronde::python {
namespace {

enum Argument {
  kOp,
  kName,
  kTensors,
  kKeepalive,
  kReduction,
  kPrescale,
  kPostscale,
  kRoot,
  kProcessSet,
  kDevice,
  kSplits,
  kRanks,
  kNames,
  kNumArguments,
};
constexpr std::array<const char*, kNumArguments> kArguments = {
    "op",   "name",        "tensors", "keepalive", "reduction", "prescale", "postscale",
    "root", "process_set", "device",  "splits",    "ranks",     "names"};
constexpr int kNumRequired = kTensors + 1;
constexpr const char* kDoc =
    "submit(op, name, tensors, keepalive=None, reduction=0, prescale=1.0, postscale=1.0, root=0, process_set=0, "
    "device=-1, splits=(), ranks=(), names=())\n--\n\n"
    "Starts an operation. tensors: (input address, output address or 0, dtype, shape) each; keepalive is held until "
    "the "
    "operation has ended.";

// What the function needs between calls; the `self` of the function. Lives as long as the process.
struct State {
  Parked* parked;
  std::array<PyObject*, kNumArguments> keywords;  // interned
  PyMethodDef method;
};

using Arguments = std::array<PyObject*, kNumArguments>;  // borrowed; nullptr: not given

int FindKeyword(const State& state, PyObject* keyword) {
  for (int i = 0; i < kNumArguments; ++i) {
    if (state.keywords[i] == keyword) return i;
  }
  for (int i = 0; i < kNumArguments; ++i) {  // not interned
    if (PyUnicode_CompareWithASCIIString(keyword, kArguments[i]) == 0) return i;
  }
  Raise(PyExc_TypeError, "submit() got an unknown argument: " + py::str(py::handle(keyword)).cast<std::string>());
}

Arguments ReadArguments(const State& state, PyObject* const* given, Py_ssize_t num_positional, PyObject* keywords) {
  Arguments result{};
  if (num_positional > kNumArguments) Raise(PyExc_TypeError, "submit() got too many arguments");
  for (Py_ssize_t i = 0; i < num_positional; ++i) result[i] = given[i];
  Py_ssize_t num_keywords = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    int index = FindKeyword(state, PyTuple_GET_ITEM(keywords, i));
    if (result[index]) Raise(PyExc_TypeError, std::string("submit() got two values for ") + kArguments[index]);
    result[index] = given[num_positional + i];
  }
  for (int i = 0; i < kNumRequired; ++i) {
    if (!result[i]) Raise(PyExc_TypeError, std::string("submit() needs the argument ") + kArguments[i]);
  }
  return result;
}

// The items of a list or tuple (of another sequence: of a copy), which must not change meanwhile.
class Items {
 public:
  Items(PyObject* object, const char* error) {
    if (!object) return;
    fast_ = py::reinterpret_steal<py::object>(PySequence_Fast(object, error));
    if (!fast_) throw py::error_already_set();
    data_ = PySequence_Fast_ITEMS(fast_.ptr());
    size_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
  }
  std::size_t size() const { return size_; }
  PyObject* operator[](std::size_t index) const { return data_[index]; }

 private:
  py::object fast_;
  PyObject** data_ = nullptr;
  std::size_t size_ = 0;
};

template <class Int>
std::vector<Int> ToInts(PyObject* object, const char* what) {
  std::vector<Int> result;
  if (!object) return result;
  Items items(object, (std::string(what) + ": not a sequence").c_str());
  result.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) result.push_back(ToInt<Int>(items[i], what));
  return result;
}

// The tensors of a request; `shapes` holds all dimensions, one tensor after the other.
struct Tensors {
  Tensors(PyObject* object, const Items& names) {
    Items items(object, "tensors: not a sequence");
    if (names.size() != 0 && names.size() != items.size()) {
      throw Failure(kArgument, "names: " + std::to_string(names.size()) + " of them for " +
                                   std::to_string(items.size()) + " tensors");
    }
    rows.resize(items.size());
    shapes.reserve(4 * items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      Items fields(items[i], "tensors: an item is not a tuple");
      if (fields.size() != 4) Raise(PyExc_TypeError, "tensors: an item is not (input, output, dtype, shape)");
      ronde_tensor& row = rows[i];
      row.name = names.size() ? ToText(names[i]) : nullptr;
      row.input = ToAddress(fields[0]);
      row.output = ToAddress(fields[1]);
      row.dtype = ToInt<std::int32_t>(fields[2], "dtype");
      Items shape(fields[3], "tensors: a shape is not a tuple");
      row.ndim = static_cast<std::int32_t>(shape.size());
      for (std::size_t k = 0; k < shape.size(); ++k) shapes.push_back(ToInt<std::int64_t>(shape[k], "shape"));
    }
    const std::int64_t* next = shapes.data();
    for (ronde_tensor& row : rows) {
      row.shape = next;
      next += row.ndim;
    }
  }
  std::vector<ronde_tensor> rows;
  std::vector<std::int64_t> shapes;
};

py::object Submit(const State& state, const Arguments& given) {
  state.parked->Sweep();
  Items names(given[kNames], "names: not a sequence");
  Tensors tensors(given[kTensors], names);
  std::vector<std::int64_t> splits = ToInts<std::int64_t>(given[kSplits], "splits");
  std::vector<std::int32_t> ranks = ToInts<std::int32_t>(given[kRanks], "ranks");

  ronde_request request{};
  request.struct_size = sizeof(request);
  request.op = ToInt<std::int32_t>(given[kOp], "op");
  if (given[kReduction]) request.reduction = ToInt<std::int32_t>(given[kReduction], "reduction");
  if (given[kRoot]) request.root_rank = ToInt<std::int32_t>(given[kRoot], "root");
  if (given[kProcessSet]) request.process_set = ToInt<std::uint32_t>(given[kProcessSet], "process_set");
  request.device = given[kDevice] ? ToInt<std::int32_t>(given[kDevice], "device") : -1;
  request.prescale_factor = given[kPrescale] ? ToDouble(given[kPrescale]) : 1;
  request.postscale_factor = given[kPostscale] ? ToDouble(given[kPostscale]) : 1;
  request.name = given[kName] == Py_None ? nullptr : ToText(given[kName]);
  request.tensors = tensors.rows.data();
  request.num_tensors = static_cast<std::uint32_t>(tensors.rows.size());
  request.splits = splits.data();
  request.num_splits = static_cast<std::uint32_t>(splits.size());
  request.ranks = ranks.data();
  request.num_ranks = static_cast<std::uint32_t>(ranks.size());

  py::object keepalive;
  if (given[kKeepalive] && given[kKeepalive] != Py_None) {
    keepalive = py::reinterpret_borrow<py::object>(given[kKeepalive]);
  }
  ronde_handle* handle = nullptr;
  Check(ronde_submit(0, &request, &handle));
  return py::cast(std::make_unique<Handle>(std::shared_ptr<ronde_handle>(handle, ronde_handle_free), request.op,
                                           request.name, std::move(keepalive), state.parked));
}

PyObject* SubmitEntry(PyObject* self, PyObject* const* given, Py_ssize_t num_positional, PyObject* keywords) {
  return Guarded([&] {
    const auto& state = *static_cast<const State*>(PyCapsule_GetPointer(self, nullptr));
    return Submit(state, ReadArguments(state, given, num_positional, keywords));
  });
}

}  // namespace

void BindSubmit(py::module_& module, Parked* parked) {
  auto* state = new State{};  // never deleted: the function refers to it
  state->parked = parked;
  for (int i = 0; i < kNumArguments; ++i) state->keywords[i] = PyUnicode_InternFromString(kArguments[i]);
  // The flags tell Python the true signature; the cast is how its table of methods wants it.
  auto* entry = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&SubmitEntry));
  state->method = {"submit", entry, METH_FASTCALL | METH_KEYWORDS, kDoc};
  py::capsule self(state, static_cast<const char*>(nullptr));
  auto function =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&state->method, self.ptr(), module.attr("__name__").ptr()));
  if (!function) throw py::error_already_set();
  module.attr("submit") = function;
}

}  // namespace ronde::python
