// Adasum from its definition, with the vectors themselves: no Gram matrix, no weights.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace ronde::math::test {

using Vector = std::vector<long double>;

inline Vector AdasumOfTwo(const Vector& a, const Vector& b) {
  long double aa = 0, bb = 0, ab = 0;
  for (std::size_t i = 0; i < a.size(); ++i) aa += a[i] * a[i], bb += b[i] * b[i], ab += a[i] * b[i];
  Vector out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    out[i] = aa == 0 || bb == 0 ? a[i] + b[i] : (1 - ab / (2 * aa)) * a[i] + (1 - ab / (2 * bb)) * b[i];
  }
  return out;
}

// Neighbours are combined, an odd last one waits for the next level.
inline Vector AdasumOf(std::vector<Vector> vectors) {
  while (vectors.size() > 1) {
    std::vector<Vector> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2) next.push_back(AdasumOfTwo(vectors[i], vectors[i + 1]));
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  return vectors.front();
}

}  // namespace ronde::math::test
