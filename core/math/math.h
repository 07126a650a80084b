// Arithmetic over void* + DType: reduce, scale, convert and copy. All vector code of the tree lives in this folder.
//
// Terms. Source: one rank's elements. Combine: add, multiply, take the smaller or larger. Prescale: factor on every
// source before it is combined; postscale: factor on the combined value. Accumulator: the type a value is combined in,
// float32 for the 16-bit floats, else the type itself.
//
// Pointers are borrowed for the call and need no alignment. Nothing here allocates, waits, or writes MXCSR; what MXCSR
// says about denormals holds for sums, products and scales (an engine sets it on the threads it borrows). Conversions
// between float16 and float32, unscaled minimum and maximum, and copies keep denormals whatever it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "base/types.h"

namespace ronde::math {

// Does the reduction exist for the element type? Ok, or an Argument error that names both. bool has Sum and Max (or),
// Product and Min (and); complex has Sum, Average and Product; Adasum is for floats.
Result CheckReduction(Reduction reduction, DType dtype);

struct ReduceSpec {
  Reduction reduction;
  DType dtype;
  double prescale = 1;
  double postscale = 1;
  // Average divides by this, at least 1: the set's size, also when fewer sources contribute because ranks joined.
  std::int64_t divisor = 1;
};

// out[i] = postscale * (combine over s of prescale * sources[s][i]); Average divides by divisor before the postscale.
//
// Sources are combined in order 0..n-1, so callers that pass the same order get the same bits, on every instruction set
// (but for which of two NaNs survives).
// Floats: combined and scaled in the accumulator, factors cast to it, one rounding to the element type at the end.
// Min and Max propagate NaN and hold -0 < +0. Complex factors act on both components; products are the schoolbook ones.
// Integers: Sum and Product wrap. Average sums in 64 bits and divides rounding toward negative infinity. Scaled
// integers are combined in 64 bits; each factor multiplies in double and the product is truncated toward zero (and
// limited to 64 bits), so prescale * source is a whole number, whichever way ranks are grouped. A factor leaves a bool
// true unless it is 0.
//
// The reduction must be defined for the type (CheckReduction). `out` may be any of the sources (same start) but must
// not overlap one otherwise. The result is also written to out2 if that is not null. Without sources: the neutral
// element.
void Reduce(const ReduceSpec& spec, std::span<const void* const> sources, void* out, void* out2, std::size_t count);

// out[i] = sum over s of weights[s] * sources[s][i], for the float types; as Reduce with kSum but for the weights,
// which are cast to the accumulator. Adasum ends in it (adasum.h), and Reduce has no kAdasum.
void WeightedSum(DType dtype, std::span<const void* const> sources, std::span<const double> weights, void* out,
                 void* out2, std::size_t count);

// Writes the element that changes nothing when combined unscaled: Sum and Average 0, Product 1, Min the largest value
// (+inf for floats), Max the lowest. A scaled reduction leaves absent ranks out of its sources instead.
void FillNeutral(Reduction reduction, DType dtype, void* out, std::size_t count);

// Converts between the float types (float16, bfloat16, float32, float64), one rounding to nearest even; NaN stays NaN.
// `in` and `out` must not overlap.
void Convert(DType from, const void* in, DType to, void* out, std::size_t count);

// memcpy; to == from is allowed.
void Copy(void* to, const void* from, std::size_t bytes);
// Copies past the caches and fences: for bytes that this core does not read again soon.
void CopyStreaming(void* to, const void* from, std::size_t bytes);

// What the kernels in use were compiled for: "avx512", "avx2" or "portable".
const char* InstructionSet();

}  // namespace ronde::math
