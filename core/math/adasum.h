// The arithmetic of Adasum (S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020).
//
// Terms. Adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b: the sum of vectors that are orthogonal, the mean
// of equal ones. A vector of zeros changes nothing. Tree: neighbours (0, 1), (2, 3), ... are combined level by level;
// an odd last one moves up as it is, so any number of vectors will do.
//
// Whatever the tree, its result is a weighted sum of the vectors it began with, and every dot product on the way
// follows from the Gram matrix, the products g_i.g_j of those vectors. So one pass over the data gives the matrix, the
// tree is walked with weights alone, and a second pass adds up. The published recursion has a pass for each level.
//
// Gram matrices are stored as the rows of their lower halves: g_i.g_j with j <= i is number i (i + 1) / 2 + j.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/types.h"

namespace ronde::math {

struct Kernels;

constexpr std::size_t GramSize(std::size_t vectors) { return vectors * (vectors + 1) / 2; }

// The Gram matrix of vectors that come in pieces. Products and sums are in double, in an order that depends on an
// element's place alone: the bits are the same however the vectors are cut into pieces, on every instruction set.
class GramSum {
 public:
  // Allocates 4 KiB for each vector.
  GramSum(DType dtype, std::size_t vectors);
  GramSum(DType dtype, std::size_t vectors, const Kernels& kernels);  // for tests
  // The next `count` elements of each vector.
  void Add(std::span<const void* const> vectors, std::size_t count);
  // Writes GramSize(vectors) numbers; the next vectors begin.
  void Finish(double* gram);

 private:
  void AddBlock();

  DType dtype_;
  std::size_t vectors_;
  const Kernels& kernels_;
  std::unique_ptr<double[]> block_;  // the elements that wait, a row for each vector
  std::size_t waiting_ = 0;          // elements of a row
  std::vector<double> products_, sums_, lost_;
};

// The weights of Adasum's result. present[m]: member m has a vector; who has none counts as a vector of zeros. `gram`
// and `weights` are by vector. A combination that is smaller than 2.4e-7 times what it was made of counts as zero: its
// direction is rounding noise in float32.
void AdasumWeights(const std::vector<bool>& present, const double* gram, double* weights);

}  // namespace ronde::math
