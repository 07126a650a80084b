// Flags: -O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mprefer-vector-width=512
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c"
#endif
#define RONDE_KERNELS kAvx512Kernels
#define RONDE_KERNELS_NAME "avx512"
#include "math/kernels_impl.h"
