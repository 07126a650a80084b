#include "math/math.h"

#include <algorithm>
#include <cassert>
#include <complex>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "math/kernels.h"

namespace ronde::math {
namespace {

const Kernels* Supported(const Kernels& kernels) {
#if defined(__x86_64__)
  if (&kernels == &kAvx512Kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("f16c")
               ? &kernels
               : nullptr;
  }
  if (&kernels == &kAvx2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &kernels : nullptr;
  }
#endif
  return &kernels;
}

// Best first.
constexpr const Kernels* kAllKernels[] = {
#if defined(__x86_64__)
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPortableKernels,
};

template <class T>
struct Limits {  // of the integers and the wide floats
  static T Zero() { return T(0); }
  static T One() { return T(1); }
  static T Lowest() {
    if constexpr (std::is_floating_point_v<T>) return -std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::lowest();
  }
  static T Largest() {
    if constexpr (std::is_floating_point_v<T>) return std::numeric_limits<T>::infinity();
    return std::numeric_limits<T>::max();
  }
};
template <class R>
struct Limits<std::complex<R>> {  // not ordered: CheckReduction refuses Min and Max
  static std::complex<R> Zero() { return 0; }
  static std::complex<R> One() { return 1; }
  static std::complex<R> Lowest() { return 0; }
  static std::complex<R> Largest() { return 0; }
};
template <>
struct Limits<Float16> {
  static Float16 Zero() { return {0}; }
  static Float16 One() { return {0x3c00}; }
  static Float16 Lowest() { return {0xfc00}; }
  static Float16 Largest() { return {0x7c00}; }
};
template <>
struct Limits<BFloat16> {
  static BFloat16 Zero() { return {0}; }
  static BFloat16 One() { return {0x3f80}; }
  static BFloat16 Lowest() { return {0xff80}; }
  static BFloat16 Largest() { return {0x7f80}; }
};

template <class T>
T Neutral(Reduction reduction) {
  switch (reduction) {
    case Reduction::kProduct: return Limits<T>::One();
    case Reduction::kMin: return Limits<T>::Largest();
    case Reduction::kMax: return Limits<T>::Lowest();
    case Reduction::kAverage:
    case Reduction::kSum:
    case Reduction::kAdasum: break;
  }
  return Limits<T>::Zero();
}

}  // namespace

const Kernels* KernelsFor(std::string_view name) {
  for (const Kernels* kernels : kAllKernels) {
    if (kernels->name == name) return Supported(*kernels);
  }
  return nullptr;
}

const Kernels& BestKernels() {
  static const Kernels* const best =
      *std::find_if(std::begin(kAllKernels), std::end(kAllKernels), [](const Kernels* k) { return Supported(*k); });
  return *best;
}

Result CheckReduction(Reduction reduction, DType dtype) {
  if (kPortableKernels.reduce[static_cast<std::size_t>(reduction)][static_cast<std::size_t>(dtype)] == nullptr) {
    return Result(Code::kArgument,
                  std::string(Info(reduction).name) + " is not defined for " + std::string(Info(dtype).name));
  }
  return Ok();
}

void ReduceWith(const Kernels& kernels, const ReduceSpec& spec, std::span<const void* const> sources, void* out,
                void* out2, std::size_t count) {
  if (count == 0) return;
  const std::size_t bytes = count * Info(spec.dtype).size;
  const ReduceArgs args{sources.data(),
                        sources.size(),
                        out,
                        out2,
                        count,
                        spec.prescale,
                        spec.postscale,
                        spec.reduction == Reduction::kAverage ? spec.divisor : 1};
  if (sources.empty()) {
    FillNeutral(spec.reduction, spec.dtype, out, count);
    if (out2 != nullptr) Copy(out2, out, bytes);
    return;
  }
  if (sources.size() == 1 && !args.Scaled()) {
    Copy(out, sources[0], bytes);
    if (out2 != nullptr) Copy(out2, sources[0], bytes);
    return;
  }
  auto kernel = kernels.reduce[static_cast<std::size_t>(spec.reduction)][static_cast<std::size_t>(spec.dtype)];
  assert(kernel != nullptr && args.divisor >= 1 && spec.reduction != Reduction::kAdasum);
  kernel(args);
}

void Reduce(const ReduceSpec& spec, std::span<const void* const> sources, void* out, void* out2, std::size_t count) {
  ReduceWith(BestKernels(), spec, sources, out, out2, count);
}

void WeightedSumWith(const Kernels& kernels, DType dtype, std::span<const void* const> sources,
                     std::span<const double> weights, void* out, void* out2, std::size_t count) {
  if (count == 0) return;
  if (sources.empty()) {
    FillNeutral(Reduction::kAdasum, dtype, out, count);
    if (out2 != nullptr) Copy(out2, out, count * Info(dtype).size);
    return;
  }
  assert(Info(dtype).kind == Kind::Float && weights.size() == sources.size());
  const ReduceArgs args{sources.data(), sources.size(), out, out2, count, 1, 1, 1, weights.data()};
  kernels.reduce[static_cast<std::size_t>(Reduction::kAdasum)][static_cast<std::size_t>(dtype)](args);
}

void WeightedSum(DType dtype, std::span<const void* const> sources, std::span<const double> weights, void* out,
                 void* out2, std::size_t count) {
  WeightedSumWith(BestKernels(), dtype, sources, weights, out, out2, count);
}

void FillNeutral(Reduction reduction, DType dtype, void* out, std::size_t count) {
  Dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const T value = Neutral<T>(reduction);
    char* to = static_cast<char*>(out);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  });
}

void Convert(DType from, const void* in, DType to, void* out, std::size_t count) {
  assert(Info(from).kind == Kind::Float && Info(to).kind == Kind::Float);
  if (from == to) return Copy(out, in, count * Info(from).size);
  BestKernels().convert(from, in, to, out, count);
}

void Copy(void* to, const void* from, std::size_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

void CopyStreaming(void* to, const void* from, std::size_t bytes) {
  if (to != from && bytes != 0) BestKernels().copy_streaming(to, from, bytes);
}

const char* InstructionSet() { return BestKernels().name; }

}  // namespace ronde::math
