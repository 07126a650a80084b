#include "base/options.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <sstream>
#include <type_traits>

namespace ronde {
namespace {

std::string Format(bool value) { return value ? "1" : "0"; }
std::string Format(std::int64_t value) { return std::to_string(value); }
std::string Format(double value) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(17);
  text << value;
  return text.str();
}
std::string Format(const std::string& value) { return value; }

const char* Parse(const std::string& text, bool* value) {
  if (text == "1" || text == "true" || text == "True" || text == "yes" || text == "on") {
    *value = true;
  } else if (text.empty() || text == "0" || text == "false" || text == "False" || text == "no" || text == "off") {
    *value = false;
  } else {
    return "0 or 1";
  }
  return nullptr;
}
template <class T>
const char* ParseNumber(const std::string& text, T* value, const char* expected) {
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end && !text.empty() ? nullptr : expected;
}
const char* Parse(const std::string& text, std::int64_t* value) { return ParseNumber(text, value, "a whole number"); }
const char* Parse(const std::string& text, double* value) {
  const char* problem = ParseNumber(text, value, "a number");
  return problem == nullptr && !std::isfinite(*value) ? "a number" : problem;
}
const char* Parse(const std::string& text, std::string* value) {
  *value = text;
  return nullptr;
}

}  // namespace

std::span<const OptionInfo> OptionTable() {
  static constexpr OptionInfo kTable[] = {
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help) \
  {#NAME, OptionType::type, #default_value, OptionScope::scope, flag, scale, section, help},
#include "base/options.def"
#undef RONDE_OPTION
  };
  return kTable;
}

Expected<Options> Options::From(const Lookup& lookup) {
  Options options;
  auto read = [&](const char* name, auto* member) -> Result {
    const auto default_value = *member;
    for (const char* prefix : {"RONDE_", "HOROVOD_"}) {
      std::string variable = std::string(prefix) + name;
      auto text = lookup(variable);
      if (!text) continue;
      if (const char* expected = Parse(*text, member)) {
        return Result(Code::kArgument, variable + " is '" + *text + "'; it must be " + expected);
      }
      using Value = std::remove_pointer_t<decltype(member)>;
      if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
        // A default below zero says "unset", so the option has such values.
        if (default_value >= 0 && *member < 0) {
          return Result(Code::kArgument, variable + " is '" + *text + "'; it must not be negative");
        }
      }
      return Ok();
    }
    return Ok();
  };
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help) \
  RONDE_RETURN_IF_ERROR(read(#NAME, &options.member));
#include "base/options.def"
#undef RONDE_OPTION
  if (options.shared_bytes < -1) {
    return Result(Code::kArgument, "RONDE_SHARED_BYTES is " + std::to_string(options.shared_bytes) +
                                       "; it must be -1 (as much as the host has) or not negative");
  }
  if (options.chunk_bytes < 1024 || options.ring_bytes < 8 * options.chunk_bytes) {
    return Result(Code::kArgument, "RONDE_CHUNK_BYTES must be at least 1024 and RONDE_RING_BYTES at least 8 chunks");
  }
  return options;
}

Expected<Options> Options::FromEnvironment() {
  return From([](const std::string& variable) -> std::optional<std::string> {
    const char* value = std::getenv(variable.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

std::string Options::EncodeJob() const {
  std::string text;
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help) \
  if (OptionScope::scope == OptionScope::Job) text += std::string(#NAME) + "=" + Format(member) + "\n";
#include "base/options.def"
#undef RONDE_OPTION
  return text;
}

Result Options::AdoptJob(std::string_view encoded) {
  while (!encoded.empty()) {
    auto line = encoded.substr(0, encoded.find('\n'));
    encoded.remove_prefix(std::min(encoded.size(), line.size() + 1));
    auto equals = line.find('=');
    if (equals == std::string_view::npos) return Result(Code::kInternal, "rank 0 sent a malformed option line");
    auto name = line.substr(0, equals);
    std::string value(line.substr(equals + 1));
    bool known = false;
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help)           \
  if (name == #NAME) {                                                                               \
    known = true;                                                                                    \
    if (Parse(value, &member)) return Result(Code::kInternal, "rank 0 sent a bad value for " #NAME); \
  }
#include "base/options.def"
#undef RONDE_OPTION
    if (!known) return Result(Code::kInternal, "rank 0 sent an unknown option " + std::string(name));
  }
  return Ok();
}

}  // namespace ronde
