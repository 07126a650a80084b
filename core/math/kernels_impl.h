// The kernels, written once and compiled once per instruction set: each kernels_*.cc defines RONDE_KERNELS and its
// name, includes this file and is compiled with its own flags. Everything is in an anonymous namespace, and nothing
// inline from elsewhere that computes is called unless it is always_inline: the linker might keep one set's copy for
// all.
//
// Terms. Vector: kVectorBytes of lanes, a GCC vector; operators act on all lanes. Element: how one element type is
// loaded into vectors of accumulators and stored back. Part: one of the vectors that a vector of narrower elements
// widens to. Step: some vectors of every source, taken through load, combine, scale and store in registers.
#if !defined(RONDE_KERNELS) || !defined(RONDE_KERNELS_NAME)
#error "included by kernels_*.cc only"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <complex>
#include <limits>
#include <type_traits>

#include "math/kernels.h"

#define RONDE_INLINE [[gnu::always_inline]] inline
#define RONDE_LAMBDA_INLINE __attribute__((always_inline))

namespace ronde::math {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <class T>
struct VecOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::Type;

template <class To, class From>
RONDE_INLINE To As(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
template <class T>
RONDE_INLINE T Get(const void* from, std::size_t index = 0) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(from) + index * sizeof(T), sizeof value);
  return value;
}
template <class T>
RONDE_INLINE void Put(T value, void* to, std::size_t index = 0) {
  __builtin_memcpy(static_cast<char*>(to) + index * sizeof(T), &value, sizeof value);
}

// clang-format off: the second builds on the first
#include "math/half_impl.h"
#include "math/elements_impl.h"
// clang-format on

// ---- The kernels. ----

template <class S>
struct Scales {
  S prescale, reciprocal, divisor, postscale;
  bool has_prescale, has_reciprocal, has_divisor, has_postscale;
  // Dividing by a power of two is multiplying by its reciprocal, bit for bit, and cheaper.
  explicit Scales(const ReduceArgs& args)
      : prescale(S(args.prescale)),
        reciprocal(S(1) / S(args.divisor)),
        divisor(S(args.divisor)),
        postscale(S(args.postscale)),
        has_prescale(args.prescale != 1),
        has_reciprocal(args.divisor != 1 && (args.divisor & (args.divisor - 1)) == 0),
        has_divisor(args.divisor != 1 && !has_reciprocal),
        has_postscale(args.postscale != 1) {}
};

// One step at a byte offset: kVectors vectors of elements, or with kPartial the first `bytes` bytes of one vector.
// All loads come before the first store, so that out may be one of the sources.
template <class E, class Op, int kVectors, bool kPartial>
RONDE_INLINE void Step(const ReduceArgs& args, const Scales<typename E::Lane>& scales, std::size_t at,
                       std::size_t bytes) {
  using V = typename E::V;
  constexpr int kLanesets = kVectors * E::kParts;
  auto load = [&](std::size_t s, V* parts) RONDE_LAMBDA_INLINE {
    const char* from = static_cast<const char*>(args.sources[s]) + at;
    if constexpr (kPartial) {
      alignas(kVectorBytes) char padded[kVectorBytes] = {};
      __builtin_memcpy(padded, from, bytes);
      E::Load(padded, parts);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) E::Load(from + v * kVectorBytes, parts + v * E::kParts);
    }
    if constexpr (std::is_same_v<Op, Weighted<E>>) {
      const auto weight = static_cast<typename E::Lane>(args.weights[s]);
#pragma GCC unroll 8
      for (int p = 0; p < kLanesets; ++p) parts[p] *= weight;
    } else if constexpr (E::kScales) {
      if (scales.has_prescale) {
#pragma GCC unroll 8
        for (int p = 0; p < kLanesets; ++p) parts[p] *= scales.prescale;
      }
    }
  };
  V total[kLanesets];
  load(0, total);
  for (std::size_t s = 1; s < args.sources_count; ++s) {
    V next[kLanesets];
    load(s, next);
#pragma GCC unroll 8
    for (int p = 0; p < kLanesets; ++p) total[p] = Op::Do(total[p], next[p]);
  }
  if constexpr (E::kScales) {
    if (scales.has_reciprocal) {
#pragma GCC unroll 8
      for (int p = 0; p < kLanesets; ++p) total[p] *= scales.reciprocal;
    }
    if (scales.has_divisor) {
#pragma GCC unroll 8
      for (int p = 0; p < kLanesets; ++p) total[p] /= scales.divisor;
    }
    if (scales.has_postscale) {
#pragma GCC unroll 8
      for (int p = 0; p < kLanesets; ++p) total[p] *= scales.postscale;
    }
  }
  auto store = [&](void* out) RONDE_LAMBDA_INLINE {
    char* to = static_cast<char*>(out) + at;
    if constexpr (kPartial) {
      alignas(kVectorBytes) char padded[kVectorBytes];
      E::Store(total, padded);
      __builtin_memcpy(to, padded, bytes);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) E::Store(total + v * E::kParts, to + v * kVectorBytes);
    }
  };
  store(args.out);
  if (args.out2 != nullptr) store(args.out2);
}

template <class E, template <class> class Op>
void VectorReduce(const ReduceArgs& arguments) {
  const ReduceArgs args = arguments;  // a copy: the compiler sees that no store changes it
  const Scales<typename E::Lane> scales(args);
  constexpr int kVectors = 4 / E::kParts;
  const std::size_t bytes = args.count * E::kSize;
  std::size_t at = 0;
  for (; at + kVectors * kVectorBytes <= bytes; at += kVectors * kVectorBytes) {
    Step<E, Op<E>, kVectors, false>(args, scales, at, 0);
  }
  for (; at + kVectorBytes <= bytes; at += kVectorBytes) Step<E, Op<E>, 1, false>(args, scales, at, 0);
  if (at < bytes) Step<E, Op<E>, 1, true>(args, scales, at, bytes - at);
}

template <class E, template <class> class Op>
void ScalarReduce(const ReduceArgs& args) {
  auto load = [&](std::size_t s, std::size_t i) RONDE_LAMBDA_INLINE {
    auto value = E::Load(args.sources[s], i);
    return args.prescale != 1 ? E::Scale(value, args.prescale) : value;
  };
  for (std::size_t i = 0; i < args.count; ++i) {
    auto total = load(0, i);
    for (std::size_t s = 1; s < args.sources_count; ++s) total = Op<E>::Do(total, load(s, i));
    if (args.divisor != 1) total = E::Divide(total, args.divisor);
    if (args.postscale != 1) total = E::Scale(total, args.postscale);
    E::Store(total, args.out, i);
    if (args.out2 != nullptr) E::Store(total, args.out2, i);
  }
}

// The unscaled reduction by one kernel, the scaled one by another.
template <Kernels::ReduceKernel kUnscaled, Kernels::ReduceKernel kScaled>
void Either(const ReduceArgs& args) {
  args.Scaled() ? kScaled(args) : kUnscaled(args);
}

// A complex sum is the sum of twice as many real numbers.
template <class E>
void ComponentSum(const ReduceArgs& args) {
  ReduceArgs twice = args;
  twice.count *= 2;
  VectorReduce<E, Sum>(twice);
}

#include "math/convert_impl.h"
#include "math/dots_impl.h"

// ---- The table. ----

struct Column {
  Kernels::ReduceKernel average, sum, product, min, max, adasum = nullptr;
};

template <class E, class OrderE>
constexpr Column FloatColumn() {
  if constexpr (std::is_same_v<E, OrderE>) {
    return {VectorReduce<E, Sum>, VectorReduce<E, Sum>, VectorReduce<E, Product>,
            VectorReduce<E, Min>, VectorReduce<E, Max>, VectorReduce<E, Weighted>};
  } else {
    return {VectorReduce<E, Sum>,
            VectorReduce<E, Sum>,
            VectorReduce<E, Product>,
            Either<VectorReduce<OrderE, Min>, VectorReduce<E, Min>>,
            Either<VectorReduce<OrderE, Max>, VectorReduce<E, Max>>,
            VectorReduce<E, Weighted>};
  }
}

template <class T>
constexpr Column ColumnFor() {
  if constexpr (std::is_same_v<T, bool>) {
    constexpr auto kOr = Either<VectorReduce<Truth, Or>, ScalarReduce<ScalarTruth, Or>>;
    constexpr auto kAnd = Either<VectorReduce<Truth, And>, ScalarReduce<ScalarTruth, And>>;
    return {nullptr, kOr, kAnd, kAnd, kOr};
  } else if constexpr (std::is_integral_v<T>) {
    using Bits = std::make_unsigned_t<T>;  // sums and products wrap alike
    return {ScalarReduce<Whole<T>, Sum>, Either<VectorReduce<Plain<Bits>, Sum>, ScalarReduce<Whole<T>, Sum>>,
            Either<VectorReduce<Plain<Bits>, Product>, ScalarReduce<Whole<T>, Product>>,
            Either<VectorReduce<Plain<T>, Min>, ScalarReduce<Whole<T>, Min>>,
            Either<VectorReduce<Plain<T>, Max>, ScalarReduce<Whole<T>, Max>>};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return FloatColumn<F16, F16Bits>();
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return FloatColumn<BF16, BF16Bits>();
  } else if constexpr (std::is_floating_point_v<T>) {
    using E = std::conditional_t<sizeof(T) == 4, F32, F64>;
    return FloatColumn<E, E>();
  } else {
    using R = typename T::value_type;
    constexpr auto kSum = ComponentSum<std::conditional_t<sizeof(R) == 4, F32, F64>>;
    return {kSum, kSum, ScalarReduce<Complex<R>, Product>, nullptr, nullptr};
  }
}

constexpr Kernels MakeKernels() {
  Kernels kernels{RONDE_KERNELS_NAME, {}, ConvertFloats, CopyStreamingBytes, Dots};
  auto set = [&](Reduction reduction, DType dtype, Kernels::ReduceKernel kernel) {
    kernels.reduce[static_cast<std::size_t>(reduction)][static_cast<std::size_t>(dtype)] = kernel;
  };
  auto add = [&](DType dtype, Column column) {
    set(Reduction::kAverage, dtype, column.average);
    set(Reduction::kSum, dtype, column.sum);
    set(Reduction::kProduct, dtype, column.product);
    set(Reduction::kMin, dtype, column.min);
    set(Reduction::kMax, dtype, column.max);
    set(Reduction::kAdasum, dtype, column.adasum);
  };
#define RONDE_DTYPE(id, wire, ctype, name, kind) add(DType::k##id, ColumnFor<ctype>());
#include "base/dtypes.def"
#undef RONDE_DTYPE
  return kernels;
}

}  // namespace

constinit const Kernels RONDE_KERNELS = MakeKernels();

}  // namespace ronde::math
