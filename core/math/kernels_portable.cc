// Flags: -O3 -ffp-contract=off
#define RONDE_KERNELS kPortableKernels
#define RONDE_KERNELS_NAME "portable"
#include "math/kernels_impl.h"
