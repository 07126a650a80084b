// Reads arguments by CPython's own calls, for functions that training calls once per tensor and step: that costs a
// fraction of what generated argument casters do. They throw py::error_already_set or Failure.
#pragma once

#include <cstring>
#include <limits>
#include <string>

#include "bindings.h"

namespace ronde::python {

[[noreturn]] inline void Raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw py::error_already_set();
}

template <class Int>
Int ToInt(PyObject* object, const char* what) {
  long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw py::error_already_set();
    PyErr_Clear();
  } else if (value >= static_cast<long long>(std::numeric_limits<Int>::min()) &&
             value <= static_cast<long long>(std::numeric_limits<Int>::max())) {
    return static_cast<Int>(value);
  }
  throw Failure(kArgument, std::string(what) + ": the number " + py::str(py::handle(object)).cast<std::string>() +
                               " is out of range");
}

inline void* ToAddress(PyObject* object) {
  unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(value));
}

inline double ToDouble(PyObject* object) {
  double value = PyFloat_AsDouble(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// The text lives as long as the str.
inline const char* ToText(PyObject* object) {
  if (!PyUnicode_Check(object)) Raise(PyExc_TypeError, "name: not a string");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) throw py::error_already_set();
  if (std::strlen(text) != static_cast<std::size_t>(size)) throw Failure(kArgument, "name: contains a null character");
  return text;
}

// The result of a function that Python calls directly; what it throws becomes the Python error.
template <typename Work>
PyObject* Guarded(Work&& work) {
  try {
    return work().release().ptr();
  } catch (const Failure& failure) {
    SetPythonError(failure);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace ronde::python
