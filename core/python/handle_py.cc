// Handle, Buffer and the dropped submissions (Parked).
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "handle.h"

namespace ronde::python {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr double kSignalInterval = 0.1;  // seconds between two looks for signals

const char* DTypeName(std::int32_t number, std::int32_t* size) {
  for (std::uint32_t index = 0; const ronde_row* row = ronde_dtype_row(index); ++index) {
    if (row->number != number) continue;
    *size = row->size;
    return row->name;
  }
  throw Failure(kInternal, "the core gave an output of the unknown dtype " + std::to_string(number));
}

// Memory that the core allocated, as a tensor. Shares the ownership of the object that owns it.
class Buffer {
 public:
  Buffer(std::shared_ptr<void> owner, void* data, std::int32_t dtype, std::vector<std::int64_t> shape)
      : owner_(std::move(owner)), data_(data), shape_(std::move(shape)) {
    std::int32_t item_size = 0;
    dtype_ = DTypeName(dtype, &item_size);
    num_bytes_ = item_size;
    for (std::int64_t dimension : shape_) num_bytes_ *= dimension;
  }
  py::tuple shape() const { return py::tuple(py::cast(shape_)); }
  const char* dtype() const { return dtype_; }
  std::int64_t num_bytes() const { return num_bytes_; }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data_); }
  py::buffer_info Info() const {
    return {data_, 1, py::format_descriptor<std::uint8_t>::format(), static_cast<py::ssize_t>(num_bytes_)};
  }

 private:
  std::shared_ptr<void> owner_;
  void* data_;
  std::vector<std::int64_t> shape_;
  const char* dtype_ = nullptr;
  std::int64_t num_bytes_ = 0;
};

Buffer Output(const Handle& handle, std::uint32_t index) {
  handle.RequireSuccess();
  ronde_output output{};
  if (!ronde_handle_output(handle.get().get(), index, &output)) {
    throw Failure(kArgument, handle.what() + " has no output " + std::to_string(index));
  }
  return {handle.get(), output.data, output.dtype, {output.shape, output.shape + output.ndim}};
}

std::string OfShape(const py::object& given) {
  std::string text = py::repr(given);
  if (text.size() > 200) text = text.substr(0, 200) + "...";
  return "empty_shared of shape " + text + ": ";
}

// A number or a sequence of numbers, as NumPy and PyTorch take shapes.
std::vector<std::int64_t> ShapeOf(const py::object& given) {
  auto number = [&](PyObject* object) -> std::optional<std::int64_t> {
    if (!PyIndex_Check(object)) return std::nullopt;
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object));
    if (!index) {  // an array of several numbers, for one
      PyErr_Clear();
      return std::nullopt;
    }
    int overflow = 0;
    const std::int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow < 0 || (overflow == 0 && value < 0))
      throw Failure(kArgument, OfShape(given) + "a dimension is negative");
    if (overflow > 0) throw Failure(kArgument, OfShape(given) + "it is too large");
    return value;
  };
  if (auto only = number(given.ptr())) return {*only};
  const bool is_text = PyUnicode_Check(given.ptr()) || PyBytes_Check(given.ptr()) || PyByteArray_Check(given.ptr());
  if (!PySequence_Check(given.ptr()) || is_text) {
    throw py::type_error(OfShape(given) + "it is no number and no sequence of numbers");
  }
  std::vector<std::int64_t> shape;
  for (py::handle item : given) {
    auto value = number(item.ptr());
    if (!value) throw py::type_error(OfShape(given) + "it has to be of whole numbers");
    shape.push_back(*value);
  }
  return shape;
}

Buffer AllocateShared(std::int32_t dtype, const py::object& given) {
  std::int32_t item_size = 0;
  if (!DTypeName(dtype, &item_size)) throw Failure(kArgument, "there is no element type " + std::to_string(dtype));
  const std::vector<std::int64_t> shape = ShapeOf(given);
  std::int64_t bytes = item_size;
  for (std::int64_t dimension : shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) throw Failure(kArgument, OfShape(given) + "it is too large");
  }
  ronde_memory* made = nullptr;
  try {
    Check(WithoutGil([&] { return ronde_allocate_shared(0, static_cast<std::size_t>(bytes), &made); }));
  } catch (const Failure& failure) {
    throw Failure(failure.code(), OfShape(given) + failure.what());
  }
  std::shared_ptr<ronde_memory> memory(made, ronde_memory_free);
  void* data = ronde_memory_data(made);
  return {std::move(memory), data, dtype, shape};
}

std::vector<std::int64_t> ReceivedSplits(const Handle& handle, std::uint32_t index) {
  handle.RequireSuccess();
  std::uint32_t count = 0;
  const std::int64_t* splits = ronde_handle_received_splits(handle.get().get(), index, &count);
  if (!splits) throw Failure(kArgument, handle.what() + " has no received splits of tensor " + std::to_string(index));
  return {splits, splits + count};
}

std::int64_t Value(const Handle& handle) {
  handle.RequireSuccess();
  return ronde_handle_value(handle.get().get(), nullptr);
}

bool Existed(const Handle& handle) {
  handle.RequireSuccess();
  std::int32_t flag = 0;
  ronde_handle_value(handle.get().get(), &flag);
  return flag != 0;
}

}  // namespace

Handle::~Handle() {
  if (keepalive_ && !Poll()) parked_->Add(std::move(handle_), std::move(keepalive_));
}

bool WaitWithSignals(ronde_handle* handle, std::optional<double> timeout) {
  if (ronde_poll(handle)) return true;
  auto start = std::chrono::steady_clock::now();
  do {
    double slice = kSignalInterval;
    if (timeout) {
      double left = *timeout - Seconds(std::chrono::steady_clock::now() - start).count();
      if (left <= 0) return false;
      slice = std::min(slice, left);
    }
    WithoutGil([&] { return ronde_wait(handle, slice); });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  } while (!ronde_poll(handle));
  return true;
}

void Handle::Wait(std::optional<double> timeout) {
  if (timeout && std::isnan(*timeout)) throw Failure(kArgument, "timeout: not a number");
  if (!WaitWithSignals(handle_.get(), timeout)) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", *timeout);
    throw Failure(kTimeout, what() + " has not ended within " + text + " s");
  }
  // Moved out first: what this frees may run Python code that comes back here.
  py::object ended = std::move(keepalive_);
  Check(ronde_handle_error(handle_.get()));
}

void Handle::RequireSuccess() const {
  if (!Poll()) throw Failure(kArgument, what() + " has not ended yet: wait() for it first");
  Check(ronde_handle_error(handle_.get()));
}

std::string Handle::what() const {
  std::string result = "operation " + std::to_string(op_);
  for (std::uint32_t index = 0; const ronde_row* row = ronde_op_row(index); ++index) {
    if (row->number == op_) result = row->name;
  }
  return name_.empty() ? result : result + " '" + name_ + "'";
}

void Parked::Add(std::shared_ptr<ronde_handle> handle, py::object keepalive) {
  entries_.push_back({std::move(handle), std::move(keepalive)});
}

bool Parked::SweepOne(std::size_t index) {
  if (!ronde_poll(entries_[index].handle.get())) return false;
  // Out of the list first: what this frees may run Python code that comes back here.
  Entry ended = std::move(entries_[index]);
  if (index + 1 < entries_.size()) entries_[index] = std::move(entries_.back());
  entries_.pop_back();
  return true;
}

void Parked::Sweep() {
  for (int looks = 0; looks < 2 && !entries_.empty(); ++looks) {
    if (next_ >= entries_.size()) next_ = 0;
    if (!SweepOne(next_)) ++next_;
  }
}

void Parked::SweepAll() {
  for (std::size_t index = 0; index < entries_.size();) {
    if (!SweepOne(index)) ++index;
  }
}

void BindHandle(py::module_& module, Parked* parked) {
  py::class_<Buffer>(module, "Buffer", py::buffer_protocol(),
                     "Memory that the core allocated: flat bytes, writable. Keeps its memory alive.")
      .def_buffer(&Buffer::Info)
      .def_property_readonly("shape", &Buffer::shape)
      .def_property_readonly("dtype", &Buffer::dtype)
      .def_property_readonly("nbytes", &Buffer::num_bytes)
      .def_property_readonly("address", &Buffer::address);
  module.def("allocate_shared", &AllocateShared, py::arg("dtype"), py::arg("shape"));
  py::class_<Handle>(module, "Handle", "A submitted operation.")
      .def("poll", &Handle::Poll, "Whether the operation has ended (well or not).")
      .def("wait", &Handle::Wait, py::arg("timeout") = py::none(),
           "Waits without the interpreter lock, checks signals every 100 ms; raises the operation's error.\n\n"
           "TimeoutError if `timeout` seconds passed. May be called again.")
      .def("output", &Output, py::arg("index"), "Output `index` that the core allocated.")
      .def("received_splits", &ReceivedSplits, py::arg("index"), "alltoall: rows received from each member.")
      .def("value", &Value, "join: the last rank; add_process_set: the id.")
      .def("existed", &Existed, "add_process_set: whether the set was there already.");
  BindSubmit(module, parked);
  BindPrepared(module, parked);
}

}  // namespace ronde::python
