// The row kernels for AVX-512F: compiled with -mavx512f -mfma.
#define GAC_ISA avx512
#define GAC_ISA_NAME "avx512"
#include "rows_impl.h"
