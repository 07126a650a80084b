// Errors as values. A Result is empty on success; else it holds a code, a message, the place that first named the
// error and, where one error led to another, its cause. Copies share the same immutable state: one failure of the
// engine reaches every pending operation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

namespace ronde {

enum class Code : std::uint8_t {
  kOk = 0,
#define RONDE_ERROR(id, number, python, base, retry) k##id = number,
#include "base/errors.def"
#undef RONDE_ERROR
};

std::string_view CodeName(Code code);

class [[nodiscard]] Result {
 public:
  Result() = default;  // success
  Result(Code code, std::string message, std::source_location place = std::source_location::current());

  bool ok() const { return state_ == nullptr; }
  explicit operator bool() const = delete;  // too easily read the wrong way round: say ok()

  Code code() const;
  // What to show a user: this message, then ": " and the cause's message for each cause.
  std::string message() const;
  // file:line where the error was first named, for logs.
  std::string place() const;

  // A new error that says what failed here, with this one as its cause and its code. Success stays success.
  Result Because(std::string message, std::source_location place = std::source_location::current()) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

inline Result Ok() { return {}; }

// A value or the error that prevented it.
template <class T>
class [[nodiscard]] Expected {
 public:
  Expected(T value) : value_(std::move(value)) {}       // NOLINT: implicit on purpose
  Expected(Result error) : error_(std::move(error)) {}  // NOLINT: implicit on purpose
  bool ok() const { return value_.has_value(); }
  const Result& error() const { return error_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T* operator->() { return &*value_; }

 private:
  std::optional<T> value_;
  Result error_;
};

}  // namespace ronde

// Returns from the calling function when EXPR, a Result, is an error.
#define RONDE_RETURN_IF_ERROR(expr)                                                        \
  do {                                                                                     \
    if (::ronde::Result ronde_result_ = (expr); !ronde_result_.ok()) return ronde_result_; \
  } while (false)
