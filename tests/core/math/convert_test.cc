// Conversions between the float types, copies, and what MXCSR does not change.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <numeric>

#include "math/kernels.h"
#include "reference.h"

namespace ronde::math::test {
namespace {

class ConvertTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = KernelsFor(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this processor or build has no " << GetParam();
  }
  template <class To, class From>
  std::vector<To> Convert(DType from, const std::vector<From>& in, DType to) {
    std::vector<To> out(in.size());
    kernels_->convert(from, in.data(), to, out.data(), in.size());
    return out;
  }
  const Kernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(All, ConvertTest, ::testing::ValuesIn(kInstructionSets),
                         [](const auto& info) { return std::string(info.param); });

struct Narrow {
  DType dtype;
  Format format;
};
constexpr Narrow kNarrow[] = {{DType::kFloat16, kHalf}, {DType::kBFloat16, kBrain}};

std::vector<std::uint16_t> AllBits() {
  std::vector<std::uint16_t> all(65536);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Equal bits, or both NaN with the same sign.
bool SameBits(std::uint16_t a, std::uint16_t b, Format format) {
  return a == b || (std::isnan(Decode(a, format)) && std::isnan(Decode(b, format)) && (a ^ b) < 0x8000);
}

TEST_P(ConvertTest, EverySixteenBitValueWidensExactly) {
  const auto all = AllBits();
  for (auto [dtype, format] : kNarrow) {
    const auto floats = Convert<float>(dtype, all, DType::kFloat32);
    const auto doubles = Convert<double>(dtype, all, DType::kFloat64);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double expected = Decode(all[i], format);
      ASSERT_TRUE(Same<float>(floats[i], static_cast<float>(expected))) << i;
      ASSERT_TRUE(Same<double>(doubles[i], expected)) << i;
      ASSERT_EQ(std::signbit(floats[i]), i >= 0x8000) << i;
    }
    const auto from_floats = Convert<std::uint16_t>(DType::kFloat32, floats, dtype);
    const auto from_doubles = Convert<std::uint16_t>(DType::kFloat64, doubles, dtype);
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_TRUE(SameBits(from_floats[i], all[i], format)) << i;
      ASSERT_TRUE(SameBits(from_doubles[i], all[i], format)) << i;
    }
  }
}

TEST_P(ConvertTest, BetweenTheSixteenBitTypes) {
  const auto all = AllBits();
  const auto brains = Convert<std::uint16_t>(DType::kFloat16, all, DType::kBFloat16);
  const auto halves = Convert<std::uint16_t>(DType::kBFloat16, all, DType::kFloat16);
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_TRUE(SameBits(brains[i], Encode(Decode(all[i], kHalf), kBrain), kBrain)) << i;
    ASSERT_TRUE(SameBits(halves[i], Encode(Decode(all[i], kBrain), kHalf), kHalf)) << i;
  }
}

// Every 16-bit value, the midpoint to the next one, and the closest neighbours of both on either side.
template <class F>
std::vector<F> Edges(Format format) {
  std::vector<F> edges;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const F value = static_cast<F>(Decode(static_cast<std::uint16_t>(bits), format));
    if (!std::isfinite(value)) continue;
    const double next = Decode(static_cast<std::uint16_t>(bits + 1), format);
    // The largest value's next one would be a power of two.
    const double after = std::isfinite(next) ? next : std::copysign(std::ldexp(1.0, format.max_exponent + 1), value);
    const F middle = static_cast<F>((value + after) / 2);
    for (F center : {value, middle}) {
      edges.push_back(center);
      edges.push_back(std::nextafter(center, std::numeric_limits<F>::infinity()));
      edges.push_back(std::nextafter(center, -std::numeric_limits<F>::infinity()));
    }
  }
  for (double extreme :
       {1e30, -1e30, 1e-30, -1e-30, 1e300, -1e300, 1e-300, 5e-324, 65519.999, 65520.0, 3.4e38, 3.5e38}) {
    edges.push_back(static_cast<F>(extreme));
  }
  return edges;
}

TEST_P(ConvertTest, NarrowsWithOneRoundingToNearestEven) {
  for (auto [dtype, format] : kNarrow) {
    const auto floats = Edges<float>(format);
    const auto from_floats = Convert<std::uint16_t>(DType::kFloat32, floats, dtype);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(from_floats[i], Encode(floats[i], format)) << std::hexfloat << floats[i];
    }
    const auto doubles = Edges<double>(format);
    const auto from_doubles = Convert<std::uint16_t>(DType::kFloat64, doubles, dtype);
    for (std::size_t i = 0; i < doubles.size(); ++i) {
      ASSERT_EQ(from_doubles[i], Encode(doubles[i], format)) << std::hexfloat << doubles[i];
    }
  }
}

TEST_P(ConvertTest, NanStaysNanWhereverItsBitsAre) {
  std::vector<float> floats;
  for (std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u, 0x7f80ffffu}) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    for (int i = 0; i < 11; ++i) floats.push_back(value);
  }
  for (auto [dtype, format] : kNarrow) {
    for (std::uint16_t bits : Convert<std::uint16_t>(DType::kFloat32, floats, dtype)) {
      ASSERT_TRUE(std::isnan(Decode(bits, format)));
    }
  }
}

TEST_P(ConvertTest, BetweenFloat32AndFloat64) {
  std::mt19937_64 random(3);
  std::vector<double> doubles;
  for (int i = 0; i < 1500; ++i) doubles.push_back(Value<double>(random, false));
  const auto floats = Convert<float>(DType::kFloat64, doubles, DType::kFloat32);
  const auto back = Convert<double>(DType::kFloat32, floats, DType::kFloat64);
  for (std::size_t i = 0; i < doubles.size(); ++i) {
    ASSERT_TRUE(Same<float>(floats[i], static_cast<float>(doubles[i]))) << doubles[i];
    ASSERT_TRUE(Same<double>(back[i], static_cast<double>(floats[i]))) << doubles[i];
  }
}

TEST_P(ConvertTest, EveryCountAndNothingBeyond) {
  for (std::size_t count = 0; count <= 67; ++count) {
    std::vector<float> in(count);
    for (std::size_t i = 0; i < count; ++i) in[i] = static_cast<float>(i) + 0.25f;
    for (auto [dtype, format] : kNarrow) {
      std::vector<std::uint16_t> out(count + 1, 0x1234);
      kernels_->convert(DType::kFloat32, in.data(), dtype, out.data(), count);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], Encode(in[i], format)) << i << " of " << count;
      ASSERT_EQ(out[count], 0x1234);
      std::vector<double> wide(count + 1, -7);
      kernels_->convert(dtype, out.data(), DType::kFloat64, wide.data(), count);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(wide[i], Decode(out[i], format)) << i << " of " << count;
      ASSERT_EQ(wide[count], -7);
    }
  }
}

TEST_P(ConvertTest, StreamingCopiesEveryByteAtAnyAlignment) {
  for (std::size_t bytes : {0, 1, 63, 1023, 1024, 1025, 1087, 1088, 5000}) {
    for (std::size_t skip : {0, 1, 17, 63}) {
      std::vector<unsigned char> from(bytes + skip + 1), to(bytes + 2 * skip + 1, 0xee);
      for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 256);
      kernels_->copy_streaming(to.data() + skip, from.data() + skip / 2, bytes);
      for (std::size_t i = 0; i < to.size(); ++i) {
        const bool inside = i >= skip && i < skip + bytes;
        ASSERT_EQ(to[i], inside ? from[i - skip + skip / 2] : 0xee) << "byte " << i << " of " << bytes;
      }
    }
  }
}

#if defined(__x86_64__)
constexpr unsigned kFlushAndZero = 0x8040;  // flush denormal results, take denormal operands for zero
constexpr unsigned kStatus = 0x003f;        // sticky exception bits

class Mxcsr {
 public:
  explicit Mxcsr(unsigned extra) : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | extra); }
  ~Mxcsr() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

TEST_P(ConvertTest, DenormalsOutliveFlushingThreads) {
  const auto all = AllBits();
  std::vector<float> floats(all.size());
  std::vector<std::uint16_t> back(all.size()), smallest(all.size());
  const float tiny[] = {1e-40f, -1e-40f, 2e-45f}, tinier[] = {1e-41f, -1e-41f, 1e-45f};
  float min[3], max[3];
  {
    Mxcsr flush(kFlushAndZero);
    const unsigned before = _mm_getcsr() & ~kStatus;
    kernels_->convert(DType::kFloat16, all.data(), DType::kFloat32, floats.data(), all.size());
    kernels_->convert(DType::kFloat32, floats.data(), DType::kFloat16, back.data(), all.size());
    const void* narrow[] = {all.data(), all.data()};
    ReduceWith(*kernels_, {Reduction::kMin, DType::kFloat16}, narrow, smallest.data(), nullptr, all.size());
    const void* wide[] = {tiny, tinier};
    ReduceWith(*kernels_, {Reduction::kMin, DType::kFloat32}, wide, min, nullptr, 3);
    ReduceWith(*kernels_, {Reduction::kMax, DType::kFloat32}, wide, max, nullptr, 3);
    const unsigned after = _mm_getcsr() & ~kStatus;
    EXPECT_EQ(before, after);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_TRUE(Same<float>(floats[i], static_cast<float>(Decode(all[i], kHalf)))) << i;
    ASSERT_TRUE(SameBits(back[i], all[i], kHalf)) << i;
    ASSERT_EQ(smallest[i], all[i]) << i;
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(min[i], std::min(tiny[i], tinier[i]));
    EXPECT_EQ(max[i], std::max(tiny[i], tinier[i]));
  }
}
#endif

TEST(ConvertApiTest, SameTypeCopies) {
  const std::vector<float> in = {1, -0.0f, 1e-40f};
  std::vector<float> out(3);
  Convert(DType::kFloat32, in.data(), DType::kFloat32, out.data(), 3);
  EXPECT_EQ(std::memcmp(in.data(), out.data(), 12), 0);
  std::vector<std::uint16_t> halves(3);
  Convert(DType::kFloat32, in.data(), DType::kFloat16, halves.data(), 3);
  EXPECT_EQ(halves, (std::vector<std::uint16_t>{0x3c00, 0x8000, 0}));
  Copy(out.data(), out.data(), 12);
  CopyStreaming(out.data(), in.data(), 12);
  EXPECT_EQ(std::memcmp(in.data(), out.data(), 12), 0);
}

}  // namespace
}  // namespace ronde::math::test
