#include "math/adasum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "math/kernels.h"

namespace ronde::math {
namespace {

constexpr std::size_t kBlock = 512;  // elements that are added up before the sum meets the running one
// Rows begin on different cache lines of a set-associative cache.
constexpr std::size_t kStride = kBlock + 8;
// Of a square: what is smaller than this beside the terms it was added up from is noise.
constexpr double kNoise = 0x1p-44;

// Vectors [begin, end) combined, with the weights that they have at present.
struct Node {
  std::size_t begin, end;
};

class Tree {
 public:
  Tree(const double* gram, double* weights) : gram_(gram), weights_(weights) {}

  Node Combine(Node a, Node b) {
    if (a.begin != a.end && b.begin != b.end) {
      double a_size = 0, b_size = 0, size = 0;
      const double aa = Dot(a, a, &a_size), bb = Dot(b, b, &b_size), ab = Dot(a, b, &size);
      if (!IsNoise(aa, a_size) && !IsNoise(bb, b_size)) {
        Scale(a, 1 - ab / (2 * aa));
        Scale(b, 1 - ab / (2 * bb));
      }
    }
    return {a.begin, b.end};
  }

 private:
  // *size: the sum of the terms' absolute values.
  double Dot(Node a, Node b, double* size) const {
    double sum = 0;
    for (std::size_t i = a.begin; i < a.end; ++i) {
      for (std::size_t j = b.begin; j < b.end; ++j) {
        const double term =
            weights_[i] * weights_[j] * gram_[std::max(i, j) * (std::max(i, j) + 1) / 2 + std::min(i, j)];
        sum += term;
        *size += std::abs(term);
      }
    }
    return sum;
  }
  // Zero too. Infinity and NaN are none: they go into the weights, and so into the result.
  static bool IsNoise(double square, double size) {
    return size <= std::numeric_limits<double>::max() && square <= kNoise * size;
  }
  void Scale(Node node, double factor) {
    for (std::size_t i = node.begin; i < node.end; ++i) weights_[i] *= factor;
  }

  const double* gram_;
  double* weights_;
};

}  // namespace

GramSum::GramSum(DType dtype, std::size_t vectors) : GramSum(dtype, vectors, BestKernels()) {}

GramSum::GramSum(DType dtype, std::size_t vectors, const Kernels& kernels)
    : dtype_(dtype),
      vectors_(vectors),
      kernels_(kernels),
      block_(new double[vectors * kStride]),
      products_(GramSize(vectors)),
      sums_(GramSize(vectors)),
      lost_(GramSize(vectors)) {}

void GramSum::Add(std::span<const void* const> vectors, std::size_t count) {
  const std::size_t element = Info(dtype_).size;
  for (std::size_t done = 0; done < count;) {
    const std::size_t now = std::min(count - done, kBlock - waiting_);
    for (std::size_t v = 0; v < vectors_; ++v) {
      const std::byte* from = static_cast<const std::byte*>(vectors[v]) + done * element;
      double* to = &block_[v * kStride + waiting_];
      if (dtype_ == DType::kFloat64) {
        Copy(to, from, now * element);
      } else {
        kernels_.convert(dtype_, from, DType::kFloat64, to, now);
      }
    }
    waiting_ += now;
    done += now;
    if (waiting_ == kBlock) AddBlock();
  }
}

void GramSum::AddBlock() {
  const std::size_t padded = (waiting_ + kDotLanes - 1) / kDotLanes * kDotLanes;
  for (std::size_t v = 0; v < vectors_; ++v) {
    std::fill(&block_[v * kStride + waiting_], &block_[v * kStride + padded], 0.0);
  }
  kernels_.dots(block_.get(), kStride, vectors_, padded, products_.data());
  // What an addition rounds off is kept (D. Knuth's two-sum): sums over any number of blocks stay as exact as one's.
  for (std::size_t p = 0; p < products_.size(); ++p) {
    const double sum = sums_[p] + products_[p], added = sum - sums_[p];
    lost_[p] += (sums_[p] - (sum - added)) + (products_[p] - added);
    sums_[p] = sum;
  }
  waiting_ = 0;
}

void GramSum::Finish(double* gram) {
  if (waiting_ > 0) AddBlock();
  for (std::size_t p = 0; p < sums_.size(); ++p) {
    gram[p] = std::isfinite(lost_[p]) ? sums_[p] + lost_[p] : sums_[p];
    sums_[p] = lost_[p] = 0;
  }
}

void AdasumWeights(const std::vector<bool>& present, const double* gram, double* weights) {
  std::vector<Node> level;
  std::size_t vectors = 0;
  for (bool has : present) {
    level.push_back({vectors, vectors + has});
    if (has) weights[vectors++] = 1;
  }
  Tree tree(gram, weights);
  while (level.size() > 1) {
    std::size_t nodes = 0;
    for (std::size_t i = 0; i < level.size(); i += 2, ++nodes) {
      level[nodes] = i + 1 < level.size() ? tree.Combine(level[i], level[i + 1]) : level[i];
    }
    level.resize(nodes);
  }
}

}  // namespace ronde::math
