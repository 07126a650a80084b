// The elements and what combines them; kernels_impl.h has the terms and includes this in its anonymous namespace.

// ---- Elements for vectors. kInfinity: the bits of +inf where lanes are floats, else 0. ----

template <class T, std::uint64_t kInfinityBits = 0>
struct Plain {  // accumulates in T itself
  using Lane = T;
  using V = Vec<T>;
  static constexpr int kParts = 1;
  static constexpr std::size_t kSize = sizeof(T);
  static constexpr std::uint64_t kInfinity = kInfinityBits;
  static constexpr bool kScales = std::is_floating_point_v<T>;
  RONDE_INLINE static void Load(const char* from, V* parts) { parts[0] = Get<V>(from); }
  RONDE_INLINE static void Store(const V* parts, char* to) { Put(parts[0], to); }
};
using F32 = Plain<float, 0x7f800000>;
using F64 = Plain<double, 0x7ff0000000000000>;
using F16Bits = Plain<std::int16_t, 0x7c00>;  // for Min and Max, which need no wider type
using BF16Bits = Plain<std::int16_t, 0x7f80>;

struct Truth : Plain<std::uint8_t> {  // bool: any byte but 0 counts as true
  RONDE_INLINE static void Load(const char* from, V* parts) { parts[0] = As<V>(Get<V>(from) != 0) & std::uint8_t{1}; }
};

struct Widened {  // two parts of float32
  using Lane = float;
  using V = Vec<float>;
  using U = Vec<std::uint32_t>;
  static constexpr int kParts = 2;
  static constexpr std::size_t kSize = 2;
  static constexpr std::uint64_t kInfinity = F32::kInfinity;
  static constexpr bool kScales = true;
};

struct BF16 : Widened {  // parts: even elements, odd elements; cheaper than in order
  RONDE_INLINE static void Load(const char* from, V* parts) {
    const U pairs = Get<U>(from);
    parts[0] = As<V>(pairs << 16);
    parts[1] = As<V>(pairs & 0xffff0000u);
  }
  RONDE_INLINE static void Store(const V* parts, char* to) {
    Put((RoundToBFloat<VectorLane>(parts[0]) >> 16) | (RoundToBFloat<VectorLane>(parts[1]) & 0xffff0000u), to);
  }
};

struct F16 : Widened {
#if defined(__AVX512F__)
  // All lanes by mask: g++ 12 takes the unmasked forms for reads of uninitialized memory.
  static constexpr __mmask16 kAll = 0xffff;
  RONDE_INLINE static void Load(const char* from, V* parts) {
    parts[0] = As<V>(_mm512_maskz_cvtph_ps(kAll, Get<__m256i>(from)));
    parts[1] = As<V>(_mm512_maskz_cvtph_ps(kAll, Get<__m256i>(from + 32)));
  }
  RONDE_INLINE static void Store(const V* parts, char* to) {
    Put(_mm512_maskz_cvtps_ph(kAll, As<__m512>(parts[0]), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), to);
    Put(_mm512_maskz_cvtps_ph(kAll, As<__m512>(parts[1]), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), to + 32);
  }
#elif defined(__F16C__)
  RONDE_INLINE static void Load(const char* from, V* parts) {
    parts[0] = As<V>(_mm256_cvtph_ps(Get<__m128i>(from)));
    parts[1] = As<V>(_mm256_cvtph_ps(Get<__m128i>(from + 16)));
  }
  RONDE_INLINE static void Store(const V* parts, char* to) {
    Put(_mm256_cvtps_ph(As<__m256>(parts[0]), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), to);
    Put(_mm256_cvtps_ph(As<__m256>(parts[1]), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), to + 16);
  }
#else
  RONDE_INLINE static void Load(const char* from, V* parts) {
    const U pairs = Get<U>(from);
    parts[0] = HalfToFloat<VectorLane>(pairs & 0xffffu);
    parts[1] = HalfToFloat<VectorLane>(pairs >> 16);
  }
  RONDE_INLINE static void Store(const V* parts, char* to) {
    Put(FloatToHalf<VectorLane>(parts[0]) | (FloatToHalf<VectorLane>(parts[1]) << 16), to);
  }
#endif
};

// ---- Elements for scalars: scaled integers and bools, integer averages, complex products. ----

template <class T>
struct Whole {
  using Lane = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  static constexpr std::uint64_t kInfinity = 0;
  static constexpr bool kSigned = std::is_signed_v<T>;

  RONDE_INLINE static Lane Load(const void* from, std::size_t i) { return Lane(Get<T>(from, i)); }
  RONDE_INLINE static void Store(Lane value, void* to, std::size_t i) { Put(T(value), to, i); }
  RONDE_INLINE static Lane Scale(Lane value, double factor) {
    const double limit = kSigned ? 0x1p63 : 0x1p64;  // the first value too large
    const double lowest = kSigned ? -0x1p63 : 0.0;
    const double scaled = double(value) * factor;
    if (scaled != scaled) return 0;
    if (scaled >= limit) return std::numeric_limits<Lane>::max();
    return scaled <= lowest ? std::numeric_limits<Lane>::min() : Lane(scaled);
  }
  RONDE_INLINE static Lane Divide(Lane value, std::int64_t divisor) {  // toward negative infinity; divisor >= 1
    const Lane quotient = value / Lane(divisor);
    return kSigned && value % Lane(divisor) < 0 ? quotient - 1 : quotient;
  }
};

struct ScalarTruth {
  using Lane = bool;
  static constexpr std::uint64_t kInfinity = 0;
  RONDE_INLINE static Lane Load(const void* from, std::size_t i) { return Get<std::uint8_t>(from, i) != 0; }
  RONDE_INLINE static void Store(Lane value, void* to, std::size_t i) { Put(std::uint8_t(value), to, i); }
  RONDE_INLINE static Lane Scale(Lane value, double factor) { return value && factor != 0; }
  RONDE_INLINE static Lane Divide(Lane value, std::int64_t) { return value; }
};

template <class R>
struct Complex {
  struct Lane {
    R re, im;
    RONDE_INLINE friend Lane operator*(Lane a, Lane b) {
      return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
  };
  RONDE_INLINE static Lane Load(const void* from, std::size_t i) { return Get<Lane>(from, i); }
  RONDE_INLINE static void Store(Lane value, void* to, std::size_t i) { Put(value, to, i); }
  RONDE_INLINE static Lane Scale(Lane value, double factor) { return {value.re * R(factor), value.im * R(factor)}; }
  RONDE_INLINE static Lane Divide(Lane value, std::int64_t) { return value; }  // an average goes by components
};

// ---- Combining. E is the element; values are vectors or scalars of its lanes. ----

// The first of two floats in the order -inf < ... < -0 < +0 < ... < inf or its reverse, by their bits as signed
// integers; a NaN comes before all, and the first NaN wins.
template <class E, bool kLess, class V>
RONDE_INLINE V PickFloat(V a_value, V b_value) {
  using S = std::conditional_t<sizeof(typename E::Lane) == 2, std::int16_t,
                               std::conditional_t<sizeof(typename E::Lane) == 4, std::int32_t, std::int64_t>>;
  using I = Vec<S>;
  constexpr S kSize = std::numeric_limits<S>::max();  // all bits but the sign
  constexpr S kInf = S(E::kInfinity);
  constexpr int kSign = sizeof(S) * 8 - 1;
  const I a = As<I>(a_value), b = As<I>(b_value);
  const I a_key = a ^ ((a >> kSign) & kSize), b_key = b ^ ((b >> kSign) & kSize);
  const I b_first = kLess ? b_key < a_key : b_key > a_key;
  const I a_nan = (a & kSize) > kInf, b_nan = (b & kSize) > kInf;
  return As<V>(((b_first | b_nan) & ~a_nan) ? b : a);
}

template <class E>
struct Sum {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    if constexpr (std::is_integral_v<V>)
      return V(std::uint64_t(a) + std::uint64_t(b));  // wraps
    else
      return a + b;
  }
};
template <class E>
struct Weighted : Sum<E> {};  // every source has a factor of its own
template <class E>
struct Product {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    if constexpr (std::is_integral_v<V>)
      return V(std::uint64_t(a) * std::uint64_t(b));
    else
      return a * b;
  }
};
template <class E>
struct Min {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    if constexpr (E::kInfinity != 0)
      return PickFloat<E, true>(a, b);
    else
      return b < a ? b : a;
  }
};
template <class E>
struct Max {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    if constexpr (E::kInfinity != 0)
      return PickFloat<E, false>(a, b);
    else
      return b > a ? b : a;
  }
};
template <class E>
struct Or {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    return a | b;
  }
};
template <class E>
struct And {
  template <class V>
  RONDE_INLINE static V Do(V a, V b) {
    return a & b;
  }
};
