// Conversions between the float types, and the streaming copy. Included by kernels_impl.h inside its anonymous
// namespace. A conversion goes through blocks of float32, which hold every 16-bit value exactly. From float64 to 16
// bits the way through float32 would round twice; rounding to odd there (S. Boldo, G. Melquiond, "When double rounding
// is odd", 2005) makes the second rounding come out as if it were the only one.

constexpr std::size_t kBlock = 512;  // elements

// Rounded toward zero, last bit set if inexact.
RONDE_INLINE float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const bool beyond = __builtin_fabs(back) > __builtin_fabs(value);
  const std::uint32_t bits = As<std::uint32_t>(nearest) - std::uint32_t(beyond);
  return As<float>(bits | std::uint32_t(back != value));
}

inline void HalvesToFloats(const char* in, float* out, std::size_t count) {
  std::size_t i = 0;
#if defined(__F16C__)
  constexpr std::size_t kLanes = kVectorBytes / 2;
  for (; i + kLanes <= count; i += kLanes) {
    Vec<float> parts[2];
    F16::Load(in + 2 * i, parts);  // with F16C the parts are in order
    Put(parts[0], out + i);
    Put(parts[1], out + i + kLanes / 2);
  }
#endif
  for (; i < count; ++i) out[i] = HalfToFloat<ScalarLane>(Get<std::uint16_t>(in, i));
}

inline void FloatsToHalves(const float* in, char* out, std::size_t count) {
  std::size_t i = 0;
#if defined(__F16C__)
  constexpr std::size_t kLanes = kVectorBytes / 2;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec<float> parts[2] = {Get<Vec<float>>(in + i), Get<Vec<float>>(in + i + kLanes / 2)};
    F16::Store(parts, out + 2 * i);
  }
#endif
  for (; i < count; ++i) Put(static_cast<std::uint16_t>(FloatToHalf<ScalarLane>(in[i])), out, i);
}

inline void ToFloats(DType from, bool to_odd, const char* in, float* out, std::size_t count) {
  if (from == DType::kFloat16) return HalvesToFloats(in, out, count);
  if (from == DType::kFloat32) {
    __builtin_memcpy(out, in, count * sizeof(float));
  } else if (from == DType::kBFloat16) {
    for (std::size_t i = 0; i < count; ++i) out[i] = As<float>(std::uint32_t(Get<std::uint16_t>(in, i)) << 16);
  } else if (to_odd) {
    for (std::size_t i = 0; i < count; ++i) out[i] = RoundToOdd(Get<double>(in, i));
  } else {
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(Get<double>(in, i));
  }
}

inline void FromFloats(DType to, const float* in, char* out, std::size_t count) {
  if (to == DType::kFloat16) return FloatsToHalves(in, out, count);
  if (to == DType::kFloat32) {
    __builtin_memcpy(out, in, count * sizeof(float));
  } else if (to == DType::kBFloat16) {
    for (std::size_t i = 0; i < count; ++i) {
      Put(static_cast<std::uint16_t>(RoundToBFloat<ScalarLane>(in[i]) >> 16), out, i);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) Put(static_cast<double>(in[i]), out, i);
  }
}

RONDE_INLINE std::size_t FloatSize(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

void ConvertFloats(DType from, const void* in, DType to, void* out, std::size_t count) {
  alignas(kVectorBytes) float block[kBlock];
  const char* source = static_cast<const char*>(in);
  char* target = static_cast<char*>(out);
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t length = count - at < kBlock ? count - at : kBlock;
    ToFloats(from, FloatSize(to) == 2, source + at * FloatSize(from), block, length);
    FromFloats(to, block, target + at * FloatSize(to), length);
  }
}

void CopyStreamingBytes(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  if (bytes >= 16 * kLine) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
    __builtin_memcpy(target, source, head);
    std::size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kLine; v += kVectorBytes) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + v), Get<__m512i>(source + at + v));
#elif defined(__AVX2__)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at + v), Get<__m256i>(source + at + v));
#else
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + at + v), Get<__m128i>(source + at + v));
#endif
      }
    }
    _mm_sfence();
    __builtin_memcpy(target + at, source + at, bytes - at);
    return;
  }
#endif
  __builtin_memcpy(to, from, bytes);
}
