// The row kernels for AVX2, FMA and F16C: compiled with -mavx2 -mfma -mf16c.
#define GAC_ISA avx2
#define GAC_ISA_NAME "avx2"
#include "rows_impl.h"
