// What the kernels should compute, from the definitions: 16-bit floats by ldexp and rounding in double, reductions one
// element at a time.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "base/types.h"
#include "math/math.h"

namespace ronde::math::test {

inline constexpr const char* kInstructionSets[] = {"portable", "avx2", "avx512"};

struct Format {  // of a binary float with an implicit leading bit
  int mantissa_bits;
  int min_exponent;
  int max_exponent;
};
inline constexpr Format kHalf{10, -14, 15};
inline constexpr Format kBrain{7, -126, 127};

inline double Decode(std::uint16_t bits, Format format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == format.max_exponent * 2 + 1) {
    const double infinity = std::numeric_limits<double>::infinity();
    return std::copysign(mantissa ? std::numeric_limits<double>::quiet_NaN() : infinity, sign);
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, format.min_exponent - format.mantissa_bits);
  return sign *
         std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - format.max_exponent - format.mantissa_bits);
}

inline std::uint16_t Encode(double value, Format format) {  // to nearest even, once
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (format.max_exponent * 2 + 1) << format.mantissa_bits;
  if (std::isnan(value)) return sign | infinity | 1 << (format.mantissa_bits - 1);
  if (value == 0) return sign;
  const int exponent =
      std::isinf(value) ? format.max_exponent + 1 : std::max(std::ilogb(std::fabs(value)), format.min_exponent);
  if (exponent > format.max_exponent) return sign | infinity;
  const int units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent)));
  // The leading bit counts one into the exponent field, a denormal has none, and a carry goes where it should.
  return sign | static_cast<std::uint16_t>(((exponent - format.min_exponent) << format.mantissa_bits) + units);
}

template <class T>
inline constexpr bool kIsComplex = std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;
template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
template <class T>
inline constexpr Format kFormat = std::is_same_v<T, Float16> ? kHalf : kBrain;

template <class T>
std::vector<T> Load(const void* data, std::size_t count) {
  std::vector<T> values(count);
  if (count != 0) std::memcpy(values.data(), data, count * sizeof(T));
  return values;
}

template <class F>
bool Before(F a, F b) {  // in the order -0 < +0
  return a < b || (a == b && std::signbit(a) && !std::signbit(b));
}

template <class F>
F CombineFloats(Reduction reduction, F a, F b) {
  switch (reduction) {
    case Reduction::kProduct: return a * b;
    case Reduction::kMin: return std::isnan(a) ? a : std::isnan(b) ? b : Before(b, a) ? b : a;
    case Reduction::kMax: return std::isnan(a) ? a : std::isnan(b) ? b : Before(a, b) ? b : a;
    default: return a + b;
  }
}

// One element, F its accumulator.
template <class F>
F ReduceFloats(const ReduceSpec& spec, const std::vector<F>& values) {
  F total{};
  for (std::size_t s = 0; s < values.size(); ++s) {
    F value = spec.prescale == 1 ? values[s] : values[s] * F(spec.prescale);
    total = s == 0 ? value : CombineFloats(spec.reduction, total, value);
  }
  if (spec.reduction == Reduction::kAverage && spec.divisor != 1) total = total / F(spec.divisor);
  return spec.postscale == 1 ? total : total * F(spec.postscale);
}

// Integers: in 128 bits, so that only the last step wraps; the data keep scaled values within 64 bits.
template <class T>
T ReduceIntegers(const ReduceSpec& spec, const std::vector<T>& values) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  unsigned __int128 total = 0;
  for (std::size_t s = 0; s < values.size(); ++s) {
    Wide value = spec.prescale == 1 ? Wide(values[s]) : Wide(std::trunc(double(values[s]) * spec.prescale));
    auto wide = static_cast<unsigned __int128>(static_cast<__int128>(value));
    if (s == 0) {
      total = wide;
    } else if (spec.reduction == Reduction::kProduct) {
      total *= wide;
    } else if (spec.reduction == Reduction::kMin) {
      total = std::min(Wide(total), value);
    } else if (spec.reduction == Reduction::kMax) {
      total = std::max(Wide(total), value);
    } else {
      total += wide;
    }
  }
  Wide result = Wide(total);
  if (spec.reduction == Reduction::kAverage) {
    const __int128 divisor = spec.divisor;
    __int128 rest = static_cast<__int128>(result) % divisor;
    if (rest < 0) rest += divisor;
    result = Wide((static_cast<__int128>(result) - rest) / divisor);
  }
  return T(spec.postscale == 1 ? result : Wide(std::trunc(double(result) * spec.postscale)));
}

template <class T>
T ReduceElement(const ReduceSpec& spec, const std::vector<T>& values) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool any = spec.reduction == Reduction::kSum || spec.reduction == Reduction::kMax;
    bool total = !any;
    for (bool value : values) total = any ? total || value : total && value;
    return total;
  } else if constexpr (std::is_integral_v<T>) {
    return ReduceIntegers<T>(spec, values);
  } else if constexpr (kIsHalf<T>) {
    if (values.size() == 1 && spec.prescale == 1 && spec.postscale == 1 && spec.divisor == 1) return values[0];
    std::vector<float> wide;
    for (T value : values) wide.push_back(static_cast<float>(Decode(value.bits, kFormat<T>)));
    return {Encode(ReduceFloats<float>(spec, wide), kFormat<T>)};
  } else if constexpr (kIsComplex<T>) {
    using R = typename T::value_type;
    if (spec.reduction == Reduction::kProduct) {
      const R pre = R(spec.prescale), post = R(spec.postscale);
      R re = values[0].real() * pre, im = values[0].imag() * pre;
      for (std::size_t s = 1; s < values.size(); ++s) {
        const R b_re = values[s].real() * pre, b_im = values[s].imag() * pre;
        const R next = re * b_re - im * b_im;
        im = re * b_im + im * b_re;
        re = next;
      }
      return {re * post, im * post};
    }
    std::vector<R> re, im;
    for (T value : values) {
      re.push_back(value.real());
      im.push_back(value.imag());
    }
    return {ReduceFloats<R>(spec, re), ReduceFloats<R>(spec, im)};
  } else {
    return ReduceFloats<T>(spec, values);
  }
}

// Equal bits, or both NaN.
template <class T>
bool Same(T a, T b) {
  if constexpr (kIsHalf<T>) {
    return a.bits == b.bits || (std::isnan(Decode(a.bits, kFormat<T>)) && std::isnan(Decode(b.bits, kFormat<T>)));
  } else if constexpr (kIsComplex<T>) {
    return Same(a.real(), b.real()) && Same(a.imag(), b.imag());
  } else if constexpr (std::is_floating_point_v<T>) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
  } else {
    return a == b;
  }
}

// As Same, and 0 equals -0.
template <class T>
bool Equal(T a, T b) {
  if constexpr (kIsComplex<T>)
    return Equal(a.real(), b.real()) && Equal(a.imag(), b.imag());
  else if constexpr (kIsHalf<T>)
    return Same(a, b) || ((a.bits | b.bits) & 0x7fff) == 0;
  else
    return a == b || Same(a, b);
}

template <class T>
double Shown(T value) {
  if constexpr (kIsHalf<T>)
    return Decode(value.bits, kFormat<T>);
  else if constexpr (kIsComplex<T>)
    return static_cast<double>(value.real());
  else
    return static_cast<double>(value);
}

// A value for tests: mostly random ones whose sums round, some extremes. Integers use all bits unless the reduction is
// scaled, when products must fit 64 bits.
template <class T>
T Value(std::mt19937_64& random, bool small) {
  if constexpr (std::is_same_v<T, bool>) {
    return random() % 2 == 0;
  } else if constexpr (std::is_integral_v<T>) {
    return small ? T(static_cast<std::int64_t>(random() % 100) - (std::is_signed_v<T> ? 50 : 0)) : T(random());
  } else if constexpr (kIsComplex<T>) {
    using R = typename T::value_type;
    const R re = Value<R>(random, small);
    return {re, Value<R>(random, small)};
  } else {
    const double kInfinity = std::numeric_limits<double>::infinity();
    const double extremes[] = {0.0, -0.0, kInfinity, -kInfinity, std::nan(""), 1e-6, 1e-40, -3e-310, 6e4, -1e38, 1e300};
    double value = (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5) * 8;
    if (!small && random() % 4 == 0) value = extremes[random() % std::size(extremes)];
    if constexpr (kIsHalf<T>)
      return {Encode(value, kFormat<T>)};
    else
      return static_cast<T>(value);
  }
}

}  // namespace ronde::math::test
