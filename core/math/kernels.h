// Internal to math: one table of kernels per instruction set, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "base/types.h"
#include "math/math.h"

namespace ronde::math {

struct ReduceArgs {
  const void* const* sources;
  std::size_t sources_count;  // at least 1
  void* out;
  void* out2;  // or null
  std::size_t count;
  double prescale;
  double postscale;
  std::int64_t divisor;             // 1 unless the reduction is Average
  const double* weights = nullptr;  // by source; Adasum only, in place of the prescale

  [[gnu::always_inline]] bool Scaled() const { return prescale != 1 || postscale != 1 || divisor != 1; }
};

constexpr std::size_t kDotLanes = 16;  // sums side by side in a dot product, on every instruction set

struct Kernels {
  using ReduceKernel = void (*)(const ReduceArgs&);

  const char* name;
  ReduceKernel reduce[std::size(kReductions)][std::size(kDTypes)];                      // null where not defined
  void (*convert)(DType from, const void* in, DType to, void* out, std::size_t count);  // float types, from != to
  void (*copy_streaming)(void* to, const void* from, std::size_t bytes);
  // products: a Gram matrix (see adasum.h) of `vectors` rows of `count` numbers, a multiple of kDotLanes; rows begin
  // `stride` numbers apart.
  void (*dots)(const double* rows, std::size_t stride, std::size_t vectors, std::size_t count, double* products);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The kernels of that name, or null where they were not built or this processor cannot run them. For tests.
const Kernels* KernelsFor(std::string_view name);
// The best that this processor runs.
const Kernels& BestKernels();

// Reduce and WeightedSum with the kernels given. For tests.
void ReduceWith(const Kernels& kernels, const ReduceSpec& spec, std::span<const void* const> sources, void* out,
                void* out2, std::size_t count);
void WeightedSumWith(const Kernels& kernels, DType dtype, std::span<const void* const> sources,
                     std::span<const double> weights, void* out, void* out2, std::size_t count);

}  // namespace ronde::math
