// Every kernel that is launched, for nvcc to report on.
#include "clip_kernels.cuh"

#define INSTANCES(T)                                                                                                  \
  template __global__ void andrea::k_grad_norm_partial<T>(const __grid_constant__ andrea::TensorTable, andrea::Sum*, \
                                                          int32_t*);                                                 \
  template __global__ void andrea::k_grad_scale<T>(const __grid_constant__ andrea::TensorTable, const double*);

INSTANCES(float)
INSTANCES(andrea::bfloat16)
INSTANCES(andrea::half)
