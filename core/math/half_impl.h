// The 16-bit floats in bits, for scalars and for GCC vectors alike. Included by kernels_impl.h inside its anonymous
// namespace (each instruction set has its own copy).
//
// float16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; bfloat16: the upper half of a float32. Method for float16:
// F. Giesen, "Half to float done quic" (2012): denormals are made by adding a float whose last bit is worth the
// denormal's last bit, so no operand or result is a float32 denormal and MXCSR does not matter.

// What a lane of 32 bits is seen as.
struct ScalarLane {
  using U = std::uint32_t;
  using I = std::int32_t;
  using F = float;
};
struct VectorLane {
  using U = Vec<std::uint32_t>;
  using I = Vec<std::int32_t>;
  using F = Vec<float>;
};

template <class L>
RONDE_INLINE typename L::F HalfToFloat(typename L::U half) {  // the upper 16 bits of each lane are 0
  using U = typename L::U;
  using I = typename L::I;
  using F = typename L::F;
  const U shifted = (half & 0x7fffu) << 13;
  const U denormal = As<U>(As<F>(shifted + (113u << 23)) - 0x1p-14f);
  const U special = shifted + (224u << 23);
  U bits = shifted + (112u << 23);
  bits = As<I>(shifted) < (0x0400 << 13) ? denormal : bits;
  bits = As<I>(shifted) >= (0x7c00 << 13) ? special : bits;
  bits = As<I>(shifted) > (0x7c00 << 13) ? (special | 0x00400000u) : bits;  // a NaN comes out quiet
  return As<F>(bits | ((half & 0x8000u) << 16));
}

template <class L>
RONDE_INLINE typename L::U FloatToHalf(typename L::F value) {  // in the lower 16 bits of each lane
  using U = typename L::U;
  using I = typename L::I;
  using F = typename L::F;
  const U bits = As<U>(value);
  const U size = bits & 0x7fffffffu;
  const U infinity = (size & 0u) | 0x7c00u;
  const U denormal = As<U>(As<F>(size) + 0.5f) - (126u << 23);
  const U quiet = ((size >> 13) & 0x3ffu) | 0x7e00u;
  U half = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  half = As<I>(size) < (113 << 23) ? denormal : half;
  half = As<I>(size) >= (143 << 23) ? infinity : half;
  half = As<I>(size) > (255 << 23) ? quiet : half;
  return half | ((bits >> 16) & 0x8000u);
}

// The float32 whose upper half is the nearest bfloat16; its lower half is rubbish.
template <class L>
RONDE_INLINE typename L::U RoundToBFloat(typename L::F value) {
  using U = typename L::U;
  const U bits = As<U>(value);
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? (bits | 0x00400000u) : rounded;
}
