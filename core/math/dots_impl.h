// Dot products of every pair of several rows of doubles. Included by kernels_impl.h inside its anonymous namespace.
//
// Element i is added to lane i % kDotLanes, and the lanes are added up in halves, so the bits do not depend on the
// vectors' size. A row meets kTile others at a time, as many as leave the sums in registers.

template <int kTile>
RONDE_INLINE void DotsOfTile(const double* row, const double* others, std::size_t stride, std::size_t count,
                             double* products) {
  using V = Vec<double>;
  constexpr int kLanes = kVectorBytes / sizeof(double);
  constexpr int kVectors = kDotLanes / kLanes;
  V sums[kTile][kVectors] = {};
  for (std::size_t i = 0; i < count; i += kDotLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const V mine = Get<V>(row + i + v * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kTile; ++t) sums[t][v] += mine * Get<V>(others + t * stride + i + v * kLanes);
    }
  }
  for (int t = 0; t < kTile; ++t) {
    double lanes[kDotLanes];
    for (int v = 0; v < kVectors; ++v) Put(sums[t][v], lanes + v * kLanes);
    for (std::size_t half = kDotLanes / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    products[t] = lanes[0];
  }
}

inline void Dots(const double* rows, std::size_t stride, std::size_t vectors, std::size_t count, double* products) {
  constexpr int kTile = kVectorBytes == 64 ? 4 : 2;
  for (std::size_t i = 0; i < vectors; ++i) {
    const double* row = rows + i * stride;
    std::size_t j = 0;
    for (; j + kTile <= i + 1; j += kTile) {
      DotsOfTile<kTile>(row, rows + j * stride, stride, count, products + j);
    }
    for (; j <= i; ++j) DotsOfTile<1>(row, rows + j * stride, stride, count, products + j);
    products += i + 1;
  }
}
