// Flags: -O3 -ffp-contract=off -mavx2 -mf16c
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile with -mavx2 -mf16c"
#endif
#define RONDE_KERNELS kAvx2Kernels
#define RONDE_KERNELS_NAME "avx2"
#include "math/kernels_impl.h"
