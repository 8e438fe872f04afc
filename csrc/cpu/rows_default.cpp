// The baseline row kernels, for any processor: SSE2 on x86-64.
#define GAC_ISA baseline
#define GAC_ISA_NAME "default"
#include "rows_impl.h"
