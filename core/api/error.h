// Results across the C interface.
#pragma once

#include <string>

#include "base/result.h"
#include "ronde/ronde.h"

struct ronde_error {
  ronde::Code code;
  std::string message;
};

namespace ronde {
// Null for success.
inline ronde_error* ToC(const Result& result) {
  return result.ok() ? nullptr : new ronde_error{result.code(), result.message()};
}
}  // namespace ronde
