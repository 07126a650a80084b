// Every reduction on every element type, on every instruction set this machine has, against reference.h.
#include <gtest/gtest.h>

#include <memory>

#include "math/kernels.h"
#include "reference.h"

namespace ronde::math::test {
namespace {

class ReduceTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = KernelsFor(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this processor or build has no " << GetParam();
  }
  const Kernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(All, ReduceTest, ::testing::ValuesIn(kInstructionSets),
                         [](const auto& info) { return std::string(info.param); });

// Exactly as large as its contents, so that an address sanitizer sees a read or write beyond them.
template <class T>
struct Array {
  explicit Array(std::size_t n) : count(n), data(new T[n]()) {}
  std::size_t count;
  std::unique_ptr<T[]> data;
};

constexpr int kNewMemory = -1;

// Reduces random data; out is new memory or the source of that number. Compares out and out2.
template <class T>
void Check(const Kernels& kernels, const ReduceSpec& spec, std::size_t sources_count, std::size_t count, int alias,
           std::size_t skip, std::uint64_t seed) {
  const bool small = std::is_integral_v<T> && (spec.prescale != 1 || spec.postscale != 1);
  std::mt19937_64 random(seed);
  std::vector<Array<T>> arrays;
  std::vector<const void*> sources;
  for (std::size_t s = 0; s < sources_count; ++s) {
    arrays.emplace_back(skip + count);
    for (std::size_t i = 0; i < count; ++i) arrays[s].data[skip + i] = Value<T>(random, small);
    sources.push_back(arrays[s].data.get() + skip);
  }
  std::vector<T> expected(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<T> column;
    for (const auto& array : arrays) column.push_back(array.data[skip + i]);
    expected[i] = ReduceElement<T>(spec, column);
  }
  Array<T> fresh(skip + count), second(count);
  T* out = (alias == kNewMemory ? fresh : arrays[alias]).data.get() + skip;
  ReduceWith(kernels, spec, sources, out, second.data.get(), count);
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_TRUE(Same<T>(out[i], expected[i]))
        << kernels.name << " " << Info(spec.reduction).name << " " << Info(spec.dtype).name << ": element " << i
        << " of " << count << ", " << sources_count << " sources, alias " << alias << ", prescale " << spec.prescale
        << ", postscale " << spec.postscale << ", divisor " << spec.divisor << ": " << Shown<T>(out[i]) << ", expected "
        << Shown<T>(expected[i]);
    ASSERT_TRUE(Same<T>(second.data[i], expected[i])) << "out2, element " << i;
  }
  if (alias == kNewMemory) {  // the sources are as they were
    std::mt19937_64 again(seed);
    for (const auto& array : arrays) {
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_TRUE(Same<T>(array.data[skip + i], Value<T>(again, small))) << "a source was written";
      }
    }
  }
}

void CheckAll(const Kernels& kernels, ReduceSpec spec, std::size_t sources, std::size_t count, int alias,
              std::size_t skip, std::uint64_t seed) {
  Dispatch(spec.dtype,
           [&](auto element) { Check<decltype(element)>(kernels, spec, sources, count, alias, skip, seed); });
}

template <class F>
void ForEachDefined(F&& f) {
  for (const auto& reduction : kReductions) {
    if (reduction.id == Reduction::kAdasum) continue;  // not of Reduce: adasum_test.cc
    for (const auto& dtype : kDTypes) {
      if (CheckReduction(reduction.id, dtype.id).ok()) f(reduction.id, dtype.id);
    }
  }
}

TEST_P(ReduceTest, EveryCountAcrossVectorSizes) {
  std::uint64_t seed = 1;
  ForEachDefined([&](Reduction reduction, DType dtype) {
    for (std::size_t sources : {1, 2, 3, 7}) {
      for (std::size_t count = 0; count <= 67; ++count) {
        CheckAll(*kernels_, {reduction, dtype}, sources, count, kNewMemory, count % 3, ++seed);
      }
      for (std::size_t count : {127, 128, 129, 255, 256, 257, 511, 512, 513, 1000}) {
        CheckAll(*kernels_, {reduction, dtype}, sources, count, kNewMemory, 0, ++seed);
      }
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(ReduceTest, OutMayBeAnySource) {
  std::uint64_t seed = 1000000;
  ForEachDefined([&](Reduction reduction, DType dtype) {
    for (int sources : {1, 2, 5}) {
      for (int alias = 0; alias < sources; ++alias) {
        for (std::size_t count : {3, 64, 299}) {
          CheckAll(*kernels_, {reduction, dtype}, sources, count, alias, 1, ++seed);
          CheckAll(*kernels_, {reduction, dtype, 1.5, 0.75, 3}, sources, count, alias, 1, ++seed);
        }
      }
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(ReduceTest, ScalesAndDivisors) {
  std::uint64_t seed = 2000000;
  ForEachDefined([&](Reduction reduction, DType dtype) {
    for (double prescale : {1.0, 0.3, 2.0}) {
      for (double postscale : {1.0, 0.7, 3.0}) {
        for (std::int64_t divisor : {1, 2, 3, 5, 8}) {
          if (reduction != Reduction::kAverage && divisor != 1) continue;
          for (std::size_t count : {1, 67, 300}) {
            CheckAll(*kernels_, {reduction, dtype, prescale, postscale, divisor}, 3, count, kNewMemory, 0, ++seed);
            CheckAll(*kernels_, {reduction, dtype, prescale, postscale, divisor}, 1, count, kNewMemory, 0, ++seed);
          }
        }
      }
    }
    if (HasFatalFailure()) return;
  });
}

TEST_P(ReduceTest, SixteenBitMinAndMaxOfEveryPairing) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Format format = dtype == DType::kFloat16 ? kHalf : kBrain;
    std::vector<std::uint16_t> all(65536), other(65536), out(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const void* sources[] = {all.data(), other.data()};
    for (std::uint16_t against :
         {0x0000, 0x8000, 0x0001, 0x8001, 0x3c01, 0xbc01, 0x7c00, 0xfc00, 0x7f80, 0xff80, 0xffff}) {
      std::fill(other.begin(), other.end(), against);
      for (Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
        ReduceWith(*kernels_, {reduction, dtype}, sources, out.data(), nullptr, all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
          const double a = Decode(all[i], format), b = Decode(against, format);
          const std::uint16_t expected = std::isnan(a)   ? all[i]
                                         : std::isnan(b) ? against
                                                         : Encode(CombineFloats(reduction, a, b), format);
          ASSERT_EQ(out[i], expected) << i << " and " << against;
        }
      }
    }
  }
}

TEST_P(ReduceTest, HalvesAreSummedInFloat32) {
  const std::uint16_t big[] = {Encode(40000, kHalf)};
  const void* sources[] = {big, big};
  std::uint16_t out[1];
  ReduceWith(*kernels_, {Reduction::kAverage, DType::kFloat16, 1, 1, 2}, sources, out, nullptr, 1);
  EXPECT_EQ(out[0], big[0]);
  ReduceWith(*kernels_, {Reduction::kSum, DType::kFloat16}, sources, out, nullptr, 1);
  EXPECT_EQ(out[0], 0x7c00);  // 80000 is beyond float16
  ReduceWith(*kernels_, {Reduction::kSum, DType::kFloat16, 1, 0.5}, sources, out, nullptr, 1);
  EXPECT_EQ(out[0], big[0]);
}

TEST_P(ReduceTest, AverageDividesByTheSetNotTheSources) {
  const float one[] = {6};
  const void* sources[] = {one, one};
  float out[1];
  ReduceWith(*kernels_, {Reduction::kAverage, DType::kFloat32, 1, 1, 3}, sources, out, nullptr, 1);
  EXPECT_EQ(out[0], 4);
}

TEST_P(ReduceTest, IntegerAverageRoundsDownAndDoesNotOverflow) {
  const std::int8_t a[] = {-128, 127, -1, 1}, b[] = {-128, 127, -2, 2};
  const void* sources[] = {a, b};
  std::int8_t out[4];
  ReduceWith(*kernels_, {Reduction::kAverage, DType::kInt8, 1, 1, 2}, sources, out, nullptr, 4);
  EXPECT_EQ(std::vector<int>(out, out + 4), (std::vector<int>{-128, 127, -2, 1}));
}

TEST_P(ReduceTest, IntegerScalesTruncateAndStayInRange) {
  using Limits = std::numeric_limits<std::int64_t>;
  const std::int64_t a[] = {-3, 3, Limits::max(), Limits::lowest()};
  const void* sources[] = {a};
  std::int64_t out[4];
  ReduceWith(*kernels_, {Reduction::kSum, DType::kInt64, 0.5, 1e30}, sources, out, nullptr, 4);
  EXPECT_EQ(out[0], Limits::lowest());
  EXPECT_EQ(out[1], Limits::max());
  ReduceWith(*kernels_, {Reduction::kSum, DType::kInt64, 0.5}, sources, out, nullptr, 4);
  EXPECT_EQ(out[0], -1);
  EXPECT_EQ(out[1], 1);
  ReduceWith(*kernels_, {Reduction::kSum, DType::kInt64, std::nan("")}, sources, out, nullptr, 4);
  EXPECT_EQ(out[2], 0);
}

TEST_P(ReduceTest, BoolFactorsKeepTruthUnlessZero) {
  const bool a[] = {true, false, true};
  const void* sources[] = {a, a};
  bool out[3];
  ReduceWith(*kernels_, {Reduction::kProduct, DType::kBool, 0.5}, sources, out, nullptr, 3);
  EXPECT_EQ(std::vector<bool>(out, out + 3), (std::vector<bool>{true, false, true}));
  ReduceWith(*kernels_, {Reduction::kSum, DType::kBool, 1, 0}, sources, out, nullptr, 3);
  EXPECT_EQ(std::vector<bool>(out, out + 3), (std::vector<bool>{false, false, false}));
}

TEST_P(ReduceTest, NeutralElementChangesNothing) {
  ForEachDefined([&](Reduction reduction, DType dtype) {
    Dispatch(dtype, [&](auto element) {
      using T = decltype(element);
      constexpr std::size_t kCount = 50;
      Array<T> values(kCount), neutral(kCount), out(kCount);
      std::mt19937_64 random(7);
      const bool complex_product = kIsComplex<T> && reduction == Reduction::kProduct;  // 0 * inf is NaN there
      for (std::size_t i = 0; i < kCount; ++i) values.data[i] = Value<T>(random, complex_product);
      FillNeutral(reduction, dtype, neutral.data.get(), kCount);
      const void* sources[] = {neutral.data.get(), values.data.get()};
      ReduceWith(*kernels_, {reduction, dtype}, sources, out.data.get(), nullptr, kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_TRUE(Equal<T>(out.data[i], values.data[i]))  // 0 + -0 is 0
            << Info(reduction).name << " " << Info(dtype).name << " " << Shown<T>(values.data[i]);
      }
      ReduceWith(*kernels_, {reduction, dtype}, {}, out.data.get(), values.data.get(), kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_TRUE(Same<T>(out.data[i], neutral.data[i]) && Same<T>(values.data[i], neutral.data[i]));
      }
    });
  });
}

TEST(CheckReductionTest, SaysWhatIsNotDefined) {
  for (const auto& dtype : kDTypes) {
    EXPECT_EQ(CheckReduction(Reduction::kAverage, dtype.id).ok(), dtype.kind != Kind::Bool);
    EXPECT_TRUE(CheckReduction(Reduction::kSum, dtype.id).ok());
    EXPECT_TRUE(CheckReduction(Reduction::kProduct, dtype.id).ok());
    EXPECT_EQ(CheckReduction(Reduction::kMin, dtype.id).ok(), dtype.kind != Kind::Complex);
    EXPECT_EQ(CheckReduction(Reduction::kMax, dtype.id).ok(), dtype.kind != Kind::Complex);
    EXPECT_EQ(CheckReduction(Reduction::kAdasum, dtype.id).ok(), dtype.kind == Kind::Float);
  }
  const Result result = CheckReduction(Reduction::kMin, DType::kComplex64);
  EXPECT_EQ(result.code(), Code::kArgument);
  EXPECT_EQ(result.message(), "min is not defined for complex64");
  EXPECT_EQ(CheckReduction(Reduction::kAdasum, DType::kInt32).message(), "adasum is not defined for int32");
}

TEST(KernelsTest, TheBestIsUsed) {
  EXPECT_EQ(KernelsFor(InstructionSet()), &BestKernels());
  EXPECT_NE(KernelsFor("portable"), nullptr);
  EXPECT_EQ(KernelsFor("mmx"), nullptr);
}

}  // namespace
}  // namespace ronde::math::test
