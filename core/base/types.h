// The vocabulary of element types, operations and reductions. Each is one row of a table (*.def); everything else is
// derived from the rows.
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/shape.h"

namespace ronde {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

enum class Kind : std::uint8_t { Bool, Int, UInt, Float, Complex };

enum class DType : std::uint8_t {
#define RONDE_DTYPE(id, wire, ctype, name, kind) k##id = wire,
#include "base/dtypes.def"
#undef RONDE_DTYPE
};

struct DTypeInfo {
  DType id;
  std::string_view name;
  std::size_t size;  // bytes per element
  Kind kind;
};

inline constexpr DTypeInfo kDTypes[] = {
#define RONDE_DTYPE(id, wire, ctype, name, kind) {DType::k##id, name, sizeof(ctype), Kind::kind},
#include "base/dtypes.def"
#undef RONDE_DTYPE
};

enum class Op : std::uint8_t {
#define RONDE_OP(id, wire, name, reduces, rooted, splits, ragged, fusable, tensors) k##id = wire,
#include "base/ops.def"
#undef RONDE_OP
};

struct OpInfo {
  Op id;
  std::string_view name;
  bool reduces;
  bool rooted;
  bool splits;
  bool ragged;  // the first dimension may differ across ranks
  bool fusable;
  bool tensors;  // false: control operations
};

inline constexpr OpInfo kOps[] = {
#define RONDE_OP(id, wire, name, reduces, rooted, splits, ragged, fusable, tensors) \
  {Op::k##id, name, reduces, rooted, splits, ragged, fusable, tensors},
#include "base/ops.def"
#undef RONDE_OP
};

enum class Reduction : std::uint8_t {
#define RONDE_REDUCTION(id, wire, name, public_name) k##id = wire,
#include "base/reductions.def"
#undef RONDE_REDUCTION
};

struct ReductionInfo {
  Reduction id;
  std::string_view name;
  std::string_view public_name;
};

inline constexpr ReductionInfo kReductions[] = {
#define RONDE_REDUCTION(id, wire, name, public_name) {Reduction::k##id, name, public_name},
#include "base/reductions.def"
#undef RONDE_REDUCTION
};

namespace internal {
template <class Rows>
constexpr bool WireNumbersAreIndexes(const Rows& rows) {
  for (std::size_t i = 0; i < std::size(rows); ++i) {
    if (static_cast<std::size_t>(rows[i].id) != i) return false;
  }
  return true;
}
}  // namespace internal
static_assert(internal::WireNumbersAreIndexes(kDTypes) && internal::WireNumbersAreIndexes(kOps) &&
              internal::WireNumbersAreIndexes(kReductions));

constexpr const DTypeInfo& Info(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)]; }
constexpr const OpInfo& Info(Op op) { return kOps[static_cast<std::size_t>(op)]; }
constexpr const ReductionInfo& Info(Reduction reduction) { return kReductions[static_cast<std::size_t>(reduction)]; }

// Calls f with a value of the C++ type of dtype: the only switch over element types in the tree.
template <class F>
decltype(auto) Dispatch(DType dtype, F&& f) {
  switch (dtype) {
#define RONDE_DTYPE(id, wire, ctype, name, kind) \
  case DType::k##id: return f(ctype{});
#include "base/dtypes.def"
#undef RONDE_DTYPE
  }
  __builtin_unreachable();
}

// A table that a backend keeps beside this one ({DType, its own name for it}). Covers() refuses one that misses a row.
template <class V>
struct Row {
  DType key;
  V value;
};
template <class V, std::size_t N>
constexpr bool Covers(const Row<V> (&rows)[N]) {
  for (const auto& info : kDTypes) {
    bool hit = false;
    for (const auto& row : rows) hit |= row.key == info.id;
    if (!hit) return false;
  }
  return N == std::size(kDTypes);
}

inline std::int64_t NumElements(const Shape& shape) {
  std::int64_t n = 1;
  for (auto d : shape) n *= d;
  return n;
}
// Elements in one row (all dimensions but the first); 1 for a vector.
inline std::int64_t RowElements(const Shape& shape) {
  std::int64_t n = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) n *= shape[i];
  return n;
}
std::string ToString(const Shape& shape);  // "[2, 3]"

}  // namespace ronde
