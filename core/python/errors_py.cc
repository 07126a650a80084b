// The exception classes, made from the error table, and the one way from an error of the core to a Python exception.
#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <thread>

#include "bindings.h"

namespace ronde::python {
namespace {

constexpr const char* kModule = "ronde._core";
constexpr const char* kBase = "RondeError";
constexpr const char* kRetryBase = "HorovodInternalError";

// A row's extra: "PythonClass BaseClass retry|final".
struct ErrorClass {
  explicit ErrorClass(const ronde_row& row) {
    std::string_view extra = row.extra;
    name = std::string(extra.substr(0, extra.find(' ')));
    retry = extra.ends_with("retry");
  }
  std::string name;
  bool retry = false;
};

// Built-in exceptions that scripts catch for these failures already; nullptr for all others.
PyObject* BuiltinBase(std::string_view class_name) {
  if (class_name == "ArgumentError" || class_name == "NotInitializedError") return PyExc_ValueError;
  if (class_name == "TimeoutError") return PyExc_TimeoutError;
  return nullptr;
}

py::object AddClass(py::module_& module, const char* name, const char* doc, py::tuple bases) {
  std::string qualified = std::string(kModule) + "." + name;
  auto made =
      py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr));
  if (!made) throw py::error_already_set();
  module.attr(name) = made;
  return made;
}

const char* ClassDoc(std::string_view name) {
  if (name == "ArgumentError") return "This rank's call cannot be right. Nothing was sent.";
  if (name == "MismatchError") return "Ranks disagree about an operation. Raised on all of them.";
  if (name == "PeerLostError") return "A rank died or its connection ended. The engine has stopped on every rank.";
  if (name == "StallError") return "Ranks waited for each other too long. The engine has stopped on every rank.";
  if (name == "ShutdownError") return "The engine was shut down, here or on another rank.";
  if (name == "TransportError") return "A socket, shared segment or file failed.";
  if (name == "TimeoutError") return "A wait reached its limit.";
  if (name == "NotInitializedError") return "Used before init(), after shutdown() or in a forked child.";
  return "An error of ronde.";
}

}  // namespace

void BindErrors(py::module_& module) {
  py::object base = AddClass(module, kBase, "Base of all errors of ronde, and a fault of its own when raised itself.",
                             py::make_tuple(py::handle(PyExc_RuntimeError)));
  py::object retry_base = AddClass(
      module, kRetryBase, "Base of the errors after which elastic training may start over.", py::make_tuple(base));
  for (std::uint32_t index = 0; const ronde_row* row = ronde_error_row(index); ++index) {
    ErrorClass made(*row);
    if (made.name == kBase) continue;
    py::object parent = made.retry ? retry_base : base;
    PyObject* builtin = BuiltinBase(made.name);
    py::tuple bases = builtin ? py::tuple(py::make_tuple(parent, py::handle(builtin))) : py::make_tuple(parent);
    AddClass(module, made.name.c_str(), ClassDoc(made.name), bases);
  }
  // Local to this module: exceptions of other extensions, perhaps of another C++ run-time, never come here.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      SetPythonError(failure);
    }
  });
}

std::string ErrorClassName(std::int32_t code) {
  for (std::uint32_t index = 0; const ronde_row* row = ronde_error_row(index); ++index) {
    if (row->number == code) return ErrorClass(*row).name;
  }
  return kBase;
}

void SetPythonError(const Failure& failure) {
  std::string name = ErrorClassName(failure.code());
  // Looked up in the module, so that nothing is kept outside it. Failures are rare.
  auto module = py::reinterpret_steal<py::object>(PyImport_ImportModule(kModule));
  if (!module) return;  // the import's own error is set
  auto type = py::reinterpret_steal<py::object>(PyObject_GetAttrString(module.ptr(), name.c_str()));
  if (!type) return;
  // Messages may quote what a peer or a file said; they need not be valid UTF-8.
  std::string_view text = failure.what();
  auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
  if (message) PyErr_SetObject(type.ptr(), message.ptr());
}

void Check(ronde_error* error) {
  if (!error) return;
  std::unique_ptr<ronde_error, decltype(&ronde_error_free)> owner(error, ronde_error_free);
  throw Failure(ronde_error_code(error), ronde_error_message(error));
}

void RunInterruptibly(std::function<ronde_error*()> call, std::function<void()> undo) {
  struct Shared {
    std::mutex mutex;  // guards the rest
    std::condition_variable ended_changed;
    bool ended = false;
    bool abandoned = false;
    ronde_error* error = nullptr;  // taken by the caller, else freed by the thread
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, call = std::move(call), undo]() mutable {
    // Signals are the business of Python's threads. Threads that the call makes inherit this.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ronde_error* error = call();
    call = nullptr;  // what it owned ends here, not after the caller went on
    std::unique_lock lock(shared->mutex);
    if (!shared->abandoned) {
      shared->error = error;
      shared->ended = true;
      shared->ended_changed.notify_all();
      return;
    }
    lock.unlock();
    if (!error && undo) undo();
    Discard(error);
  }).detach();
  while (true) {
    const bool ended = WithoutGil([&] {
      std::unique_lock lock(shared->mutex);
      return shared->ended_changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return shared->ended; });
    });
    if (ended) break;
    if (PyErr_CheckSignals() == 0) continue;
    py::error_already_set raised;  // by the signal's handler
    std::unique_lock lock(shared->mutex);
    shared->abandoned = true;
    if (!shared->ended) throw raised;
    lock.unlock();
    if (!shared->error && undo) undo();
    Discard(shared->error);
    throw raised;
  }
  Check(shared->error);
}

ByteView::ByteView(const py::bytes& bytes) {
  char* start = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &start, &length) != 0) throw py::error_already_set();
  data = start;
  size = static_cast<std::size_t>(length);
}

}  // namespace ronde::python
