// Shared by the parts of ronde._core. The module binds the C interface ronde/ronde.h and includes nothing else of the
// core, so it stays within what any other adapter may use.
//
// Each *_py.cc adds one part of the module through its Bind function.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ronde/ronde.h"

namespace ronde::python {

namespace py = pybind11;

// Numbers of errors.def that this module raises by itself.
inline constexpr std::int32_t kInternal = 1;
inline constexpr std::int32_t kArgument = 2;
inline constexpr std::int32_t kTimeout = 8;

// A failure on its way to Python: the one C++ exception of the module.
class Failure : public std::exception {
 public:
  Failure(std::int32_t code, std::string message) : code_(code), message_(std::move(message)) {}
  std::int32_t code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::int32_t code_;
  std::string message_;
};

// Sets the Python error for it: an instance of the class that errors.def names for the code. Needs the GIL.
void SetPythonError(const Failure& failure);

// The name of that class, as in "PeerLostError". Needs no GIL.
std::string ErrorClassName(std::int32_t code);

// Throws the error, if there is one, and frees it. Needs no GIL.
void Check(ronde_error* error);

// Frees the error, if there is one, where nobody is left to tell.
inline void Discard(ronde_error* error) {
  if (error) ronde_error_free(error);
}

// A text as the C interface takes it: NULL for none.
inline const char* OrNull(const std::optional<std::string>& text) { return text ? text->c_str() : nullptr; }

// Calls `work` without the GIL. It must not throw.
//
// Not pybind11's gil_scoped_release: at the interpreter's end, CPython before 3.14 ends a thread that asks for the GIL
// with pthread_exit(), whose unwinding must not meet a destructor. Such a thread (a daemon) stays asleep here, as it
// does in later versions.
template <typename Work>
auto WithoutGil(Work&& work) {
  PyThreadState* state = PyEval_SaveThread();
  auto result = work();
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
  return result;
}

// Runs a blocking call of the C interface so that signals still reach Python: the call runs on a thread of its own
// (signals blocked) while the caller waits without the GIL and looks for signals every 100 ms. When a signal's handler
// raises, the caller leaves at once and the call goes on alone up to its own time limit; therefore `call` owns all it
// touches. `undo` (may be empty) runs after a call that succeeded although nobody waits for it any more.
void RunInterruptibly(std::function<ronde_error*()> call, std::function<void()> undo = nullptr);

// Submissions whose Handle was dropped before they ended. Their memory still belongs to the engine, so what keeps it
// alive stays here until they ended. Guarded by the GIL. Never destroyed: at the interpreter's exit an engine thread
// may still write into that memory.
class Parked {
 public:
  void Add(std::shared_ptr<ronde_handle> handle, py::object keepalive);
  // Looks at two entries, going round: every submission looks at more than it can add, at a constant price.
  void Sweep();
  // Looks at all of them.
  void SweepAll();

 private:
  struct Entry {
    std::shared_ptr<ronde_handle> handle;
    py::object keepalive;
  };
  bool SweepOne(std::size_t index);  // whether the entry was let go

  std::vector<Entry> entries_;
  std::size_t next_ = 0;
};

// bytes as seen by the C interface; the object must outlive the view.
struct ByteView {
  explicit ByteView(const py::bytes& bytes);
  const char* data = nullptr;
  std::size_t size = 0;
};

void BindErrors(py::module_& module);
void BindTables(py::module_& module);
void BindHandle(py::module_& module, Parked* parked);
void BindEngine(py::module_& module, Parked* parked);
void BindStore(py::module_& module);
void BindDeferred(py::module_& module);

}  // namespace ronde::python
