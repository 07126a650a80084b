#include "math/adasum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "math/adasum_reference.h"
#include "math/kernels.h"
#include "math/math.h"
#include "math/reference.h"

namespace ronde::math::test {
namespace {

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

// Vectors of an element type and what they hold.
struct Data {
  Data(DType dtype, std::size_t vectors, std::size_t count, unsigned seed) : dtype(dtype) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> uniform(-2, 3);
    for (std::size_t v = 0; v < vectors; ++v) {
      std::vector<double> exact(count);
      for (double& x : exact) x = uniform(random);
      bytes.emplace_back(count * Info(dtype).size);
      Convert(DType::kFloat64, exact.data(), dtype, bytes.back().data(), count);
      Convert(dtype, bytes.back().data(), DType::kFloat64, exact.data(), count);
      values.emplace_back(exact.begin(), exact.end());
    }
  }
  std::vector<const void*> At(std::size_t element) const {
    std::vector<const void*> sources;
    for (const auto& b : bytes) sources.push_back(b.data() + element * Info(dtype).size);
    return sources;
  }

  DType dtype;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<Vector> values;
};

class AdasumKernels : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = KernelsFor(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this processor has no " << GetParam();
  }
  const Kernels* kernels_ = nullptr;
};

TEST_P(AdasumKernels, GramMatricesAreRightAndTheSameBitsForEveryCutAndInstructionSet) {
  std::mt19937 random(7);
  for (DType dtype : kFloats) {
    for (std::size_t vectors : {1u, 2u, 3u, 5u, 8u, 11u}) {
      for (std::size_t count : {0u, 1u, 15u, 16u, 511u, 512u, 513u, 3000u}) {
        const Data data(dtype, vectors, count, static_cast<unsigned>(count * 16 + vectors));
        GramSum whole(dtype, vectors, *kernels_), cut(dtype, vectors, *kernels_), best(dtype, vectors);
        std::vector<double> gram(GramSize(vectors)), other(gram.size());
        whole.Add(data.At(0), count);
        whole.Finish(gram.data());
        for (std::size_t i = 0; i < vectors; ++i) {
          for (std::size_t j = 0; j <= i; ++j) {
            long double expected = 0, size = 0;
            for (std::size_t k = 0; k < count; ++k) {
              expected += data.values[i][k] * data.values[j][k];
              size += std::abs(data.values[i][k] * data.values[j][k]);
            }
            ASSERT_NEAR(gram[i * (i + 1) / 2 + j], static_cast<double>(expected), static_cast<double>(size) * 1e-14)
                << Info(dtype).name << " " << vectors << " vectors of " << count << ": " << i << ", " << j;
          }
        }
        for (int run = 0; run < 2; ++run) {  // a second one: Finish starts anew
          for (std::size_t at = 0; at < count;) {
            const std::size_t piece = std::min<std::size_t>(count - at, 1 + random() % 700);
            cut.Add(data.At(at), piece);
            at += piece;
          }
          cut.Finish(other.data());
          ASSERT_EQ(std::memcmp(gram.data(), other.data(), gram.size() * sizeof(double)), 0);
        }
        best.Add(data.At(0), count);
        best.Finish(other.data());
        ASSERT_EQ(std::memcmp(gram.data(), other.data(), gram.size() * sizeof(double)), 0);
      }
    }
  }
}

TEST_P(AdasumKernels, WeightedSumsAreRightForEveryTypeAndSize) {
  const double weights[] = {0.75, -1.5, 0.3, 2, 0.01};
  for (DType dtype : kFloats) {
    const double error = dtype == DType::kFloat64    ? 1e-15
                         : dtype == DType::kFloat32  ? 1e-6
                         : dtype == DType::kBFloat16 ? 0x1p-8
                                                     : 0x1p-11;
    for (std::size_t vectors : {1u, 2u, 3u, 5u}) {
      for (std::size_t count : {1u, 7u, 16u, 33u, 64u, 500u}) {
        const Data data(dtype, vectors, count, static_cast<unsigned>(count * 8 + vectors));
        std::vector<std::byte> out(count * Info(dtype).size), second(out.size());
        WeightedSumWith(*kernels_, dtype, data.At(0), {weights, vectors}, out.data(), second.data(), count);
        ASSERT_EQ(out, second);
        std::vector<double> results(count);
        Convert(dtype, out.data(), DType::kFloat64, results.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          long double expected = 0, size = 0;
          for (std::size_t v = 0; v < vectors; ++v) {
            expected += weights[v] * data.values[v][i];
            size += std::abs(weights[v] * data.values[v][i]);
          }
          ASSERT_NEAR(results[i], static_cast<double>(expected), static_cast<double>(size) * error * 2)
              << Info(dtype).name << " " << vectors << " sources of " << count << ": " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AdasumKernels, ::testing::ValuesIn(kInstructionSets),
                         [](const auto& info) { return std::string(info.param); });

// The weighted sum that the weights give, in long double.
Vector ByWeights(const std::vector<bool>& present, const std::vector<Vector>& vectors) {
  std::vector<double> gram(GramSize(vectors.size())), weights(vectors.size());
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      long double sum = 0;
      for (std::size_t k = 0; k < vectors[i].size(); ++k) sum += vectors[i][k] * vectors[j][k];
      gram[i * (i + 1) / 2 + j] = static_cast<double>(sum);
    }
  }
  AdasumWeights(present, gram.data(), weights.data());
  Vector out(vectors.front().size());
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    for (std::size_t k = 0; k < out.size(); ++k) out[k] += weights[i] * vectors[i][k];
  }
  return out;
}

void ExpectNear(const Vector& got, const Vector& expected, double error) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(got[i]), static_cast<double>(expected[i]), error) << i;
  }
}

TEST(AdasumWeights, GiveTheTreesResultForAnyNumberOfVectorsAndWhoeverIsAbsent) {
  for (std::size_t members = 1; members <= 9; ++members) {
    for (unsigned absent = 0; absent < 1u << members; absent += 1 + absent % 3) {
      const Data data(DType::kFloat64, members, 6, static_cast<unsigned>(members) * 1000 + absent);
      std::vector<bool> present(members);
      std::vector<Vector> some, with_zeros = data.values;
      for (std::size_t m = 0; m < members; ++m) {
        present[m] = (absent >> m & 1) == 0;
        present[m] ? some.push_back(data.values[m]) : with_zeros[m].assign(6, 0);
      }
      if (!some.empty()) ExpectNear(ByWeights(present, some), AdasumOf(with_zeros), 1e-11);
    }
  }
}

TEST(AdasumWeights, OfOrthogonalVectorsAreOnesOfEqualOnesTheMeanAndZerosAreNeutral) {
  const double orthogonal[] = {2, 0, 3, 0, 0, 5}, equal[] = {7, 7, 7, 7, 7, 7}, zeros[] = {0, 0, 4, 0, 2, 4};
  double weights[3];
  AdasumWeights({true, true, true}, orthogonal, weights);
  for (double w : weights) EXPECT_EQ(w, 1);
  AdasumWeights({true, true, true}, equal, weights);
  EXPECT_EQ(weights[0], 0.25);
  EXPECT_EQ(weights[1], 0.25);
  EXPECT_EQ(weights[2], 0.5);
  AdasumWeights({true, true, true}, zeros, weights);  // 1.2: products 2; norms 4
  EXPECT_EQ(weights[1], 0.75);
  EXPECT_EQ(weights[2], 0.75);
}

// What is left of vectors that cancel out has no direction of its own.
TEST(AdasumWeights, ACombinationThatIsRoundingNoiseCountsAsZero) {
  // g1 = -g0 up to the last bits; g2 lies in their direction.
  const double gram[] = {1, -1 + 0x1p-52, 1, 3, -3 + 0x1p-50, 9};
  double weights[3];
  AdasumWeights({true, true, true}, gram, weights);
  EXPECT_NEAR(weights[0], 1.5, 1e-12);
  EXPECT_NEAR(weights[1], 1.5, 1e-12);
  EXPECT_EQ(weights[2], 1);
}

TEST(AdasumWeights, InfinityAndNanDoNotPassForZero) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (double bad : {infinity, nan}) {
    const double gram[] = {bad, bad, 2};
    double weights[2];
    AdasumWeights({true, true}, gram, weights);
    EXPECT_TRUE(std::isnan(weights[0])) << bad;
  }
}

}  // namespace
}  // namespace ronde::math::test
