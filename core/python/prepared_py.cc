// PreparedAllreduce: an allreduce of one tensor in place that is started in every step. What stays the same is read
// once; it is its own handle, so that a step makes no object. A type of CPython's own, as generated methods would cost
// as much as the rest.
#include <pybind11/stl.h>

#include "arguments.h"
#include "bindings.h"
#include "handle.h"

namespace ronde::python {
namespace {

class Prepared {
 public:
  Prepared(const char* name, std::int32_t dtype, std::vector<std::int64_t> shape, std::int32_t reduction,
           double prescale, double postscale, std::uint32_t process_set, Parked* parked)
      : name_(name), shape_(std::move(shape)), parked_(parked) {
    tensor_.dtype = dtype;
    tensor_.ndim = static_cast<std::int32_t>(shape_.size());
    tensor_.shape = shape_.data();
    request_.struct_size = sizeof(request_);
    request_.op = AllreduceNumber();
    request_.reduction = reduction;
    request_.process_set = process_set;
    request_.device = -1;
    request_.prescale_factor = prescale;
    request_.postscale_factor = postscale;
    request_.name = name_.c_str();
    request_.tensors = &tensor_;
    request_.num_tensors = 1;
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  ~Prepared() { LetGo(); }

  void Start(void* address, py::object keepalive) {
    parked_->Sweep();
    LetGo();
    tensor_.input = tensor_.output = address;
    ronde_handle* handle = nullptr;
    Check(ronde_submit(0, &request_, &handle));
    handle_.reset(handle, ronde_handle_free);
    keepalive_ = std::move(keepalive);
  }

  void Wait() {
    if (!handle_) return;
    std::shared_ptr<ronde_handle> handle = handle_;  // another thread may start the next one meanwhile
    WaitWithSignals(handle.get(), std::nullopt);
    // Moved out first: what this frees may run Python code that comes back here.
    py::object ended;
    if (handle == handle_) ended = std::move(keepalive_);
    Check(ronde_handle_error(handle.get()));
    if (handle == handle_) handle_.reset();  // freed here, so that start() has less to do
  }

 private:
  static std::int32_t AllreduceNumber() {
    for (std::uint32_t index = 0; const ronde_row* row = ronde_op_row(index); ++index) {
      if (std::strcmp(row->name, "allreduce") == 0) return row->number;
    }
    throw Failure(kInternal, "the core has no allreduce");
  }

  // Parks the memory of an operation that nobody waited for.
  void LetGo() {
    std::shared_ptr<ronde_handle> handle = std::move(handle_);
    py::object keepalive = std::move(keepalive_);
    if (keepalive && !ronde_poll(handle.get())) parked_->Add(std::move(handle), std::move(keepalive));
  }

  std::string name_;
  std::vector<std::int64_t> shape_;
  ronde_tensor tensor_{};
  ronde_request request_{};
  std::shared_ptr<ronde_handle> handle_;  // of the operation started last, unless it is known to have ended well
  py::object keepalive_;
  Parked* parked_;
};

struct Object {
  PyObject_HEAD;
  Prepared* prepared;
};

Prepared& Of(PyObject* self) { return *reinterpret_cast<Object*>(self)->prepared; }

PyObject* Start(PyObject* self, PyObject* const* given, Py_ssize_t num_given) {
  return Guarded([&]() -> py::object {
    if (num_given != 2) Raise(PyExc_TypeError, "start() takes an address and what keeps the memory alive");
    Of(self).Start(ToAddress(given[0]), py::reinterpret_borrow<py::object>(given[1]));
    return py::none();
  });
}

PyObject* Wait(PyObject* self, PyObject*) {
  return Guarded([&]() -> py::object {
    Of(self).Wait();
    return py::none();
  });
}

void Free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->prepared;
  type->tp_free(self);
  Py_DECREF(type);
}

py::object MakeType() {
  // The cast is how Python's table of methods wants a function of this convention.
  static PyMethodDef methods[] = {
      {"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Start)), METH_FASTCALL,
       "start(address, keepalive)\n--\n\nStarts the operation on this memory; keepalive is held until it has ended."},
      {"wait", &Wait, METH_NOARGS,
       "wait()\n--\n\nAs Handle.wait(), of the operation that was started last. May be called again."},
      {nullptr, nullptr, 0, nullptr}};
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&Free)},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("An allreduce of one tensor in place, to be started again and again.")},
      {0, nullptr}};
  PyType_Spec spec = {"ronde._core.PreparedAllreduce", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  reinterpret_cast<PyTypeObject*>(type.ptr())->tp_new = nullptr;  // prepare_allreduce() makes them
  return type;
}

}  // namespace

void BindPrepared(py::module_& module, Parked* parked) {
  py::object type = MakeType();
  module.attr("PreparedAllreduce") = type;
  module.def(
      "prepare_allreduce",
      [type, parked](const py::str& name, std::int32_t dtype, std::vector<std::int64_t> shape, std::int32_t reduction,
                     double prescale, double postscale, std::uint32_t process_set) {
        auto prepared = std::make_unique<Prepared>(ToText(name.ptr()), dtype, std::move(shape), reduction, prescale,
                                                   postscale, process_set, parked);
        auto* class_ = reinterpret_cast<PyTypeObject*>(type.ptr());
        auto object = py::reinterpret_steal<py::object>(class_->tp_alloc(class_, 0));
        if (!object) throw py::error_already_set();
        reinterpret_cast<Object*>(object.ptr())->prepared = prepared.release();
        return object;
      },
      "An allreduce of one named tensor in place, to be started again and again. What is wrong with it start() says.",
      py::arg("name"), py::arg("dtype"), py::arg("shape"), py::arg("reduction") = 0, py::arg("prescale") = 1.0,
      py::arg("postscale") = 1.0, py::arg("process_set") = 0);
}

}  // namespace ronde::python
