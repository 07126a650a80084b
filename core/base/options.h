// The options of an engine: an object, filled from the table in options.def. FromEnvironment is the one place below the
// api that reads the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace ronde {

enum class OptionType { Bool, Int, Double, String };
enum class OptionScope { Job, Rank };

struct OptionInfo {
  std::string_view name;  // FUSION_THRESHOLD
  OptionType type;
  std::string_view default_text;
  OptionScope scope;
  std::string_view flag;
  double flag_scale;
  std::string_view section;
  std::string_view help;
};
std::span<const OptionInfo> OptionTable();

namespace internal {
template <OptionType>
struct OptionValue;
template <>
struct OptionValue<OptionType::Bool> {
  using Type = bool;
};
template <>
struct OptionValue<OptionType::Int> {
  using Type = std::int64_t;
};
template <>
struct OptionValue<OptionType::Double> {
  using Type = double;
};
template <>
struct OptionValue<OptionType::String> {
  using Type = std::string;
};
}  // namespace internal

struct Options {
#define RONDE_OPTION(member, type, NAME, default_value, scope, flag, scale, section, help) \
  internal::OptionValue<OptionType::type>::Type member = default_value;
#include "base/options.def"
#undef RONDE_OPTION

  // lookup("RONDE_X") -> value, or nothing. An error names the variable and what it may hold.
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;
  static Expected<Options> From(const Lookup& lookup);
  static Expected<Options> FromEnvironment();

  // The rows of scope Job as text, for rank 0 to hand to the others; and their adoption there.
  std::string EncodeJob() const;
  Result AdoptJob(std::string_view encoded);
};

}  // namespace ronde
