/* tests/standin/standin_probes.h - launches a kernel of standin_probes.cu by its name. */
#ifndef TESTS_STANDIN_STANDIN_PROBES_H
#define TESTS_STANDIN_STANDIN_PROBES_H
#include <cuda_runtime_api.h>
#ifdef __cplusplus
extern "C"
#endif
    cudaError_t
    sw_probe_launch(const char *name, cudaStream_t stream, int *out, int count);

#endif
