/* tests/standin/standin_runtime.cpp - settings, devices and errors. */
#include "standin_internal.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace standin {
namespace {
thread_local int device_here = 0;
thread_local cudaError_t last_error = cudaSuccess;

/* The number behind a colon, or `without`. */
uint64_t number_behind(const char *text, uint64_t without) {
    const char *colon = strchr(text, ':');
    return colon ? strtoull(colon + 1, nullptr, 10) : without;
}

long number_of(const char *name, long without) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, nullptr, 10) : without;
}

Settings read_settings() {
    Settings s;
    const char *text = getenv("STANDIN_SCHED");
    if (text && !strncmp(text, "rev", 3)) s.order = REVERSE;
    s.warps_run_ahead = text && !strncmp(text, "ahead", 5);
    if (text && !strncmp(text, "rand", 4)) {
        s.order = RANDOM;
        s.seed = number_behind(text, 0) * 2 + 1;
    }
    s.strict = number_of("STANDIN_STRICT", 0) != 0;
    s.guard = number_of("STANDIN_GUARD", 0) != 0;
    s.devices = (int)number_of("STANDIN_DEVICES", 1);
    s.error = (int)number_of("STANDIN_ERROR", 0);
    s.drift_ppm = (double)number_of("STANDIN_DRIFT", 0);
    s.times = getenv("STANDIN_TIMES");
    s.memory = (size_t)number_of("STANDIN_MEMORY", (long)s.memory);
    const unsigned cores = std::thread::hardware_concurrency();
    s.threads = (int)number_of("STANDIN_THREADS", cores < 1 ? 1 : cores > 4 ? 4 : (long)cores);
#ifdef STANDIN_TSAN
    s.threads = 1;
    s.copy_early = true; /* late, TSan would see the copy where nothing races with it */
#endif
    text = getenv("STANDIN_COPY");
    if (text) s.copy_early = *text == 'e';
    text = getenv("STANDIN_PAGEABLE");
    s.pageable_late = text && *text == 'l';
    text = getenv("STANDIN_STREAMS");
    if (text) {
        s.streams_sync = *text == 's';
        s.streams_last = strcmp(text, "last") == 0;
        s.stream_seed = number_behind(text, 0) * 2 + 1;
    }
    return s;
}
} // namespace

const Settings &settings() {
    static const Settings s = read_settings();
    return s;
}

void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "stand-in: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    fflush(nullptr);
    abort();
}

cudaError_t fail(cudaError_t error) {
    return last_error = error;
}

int current_device() {
    return device_here;
}
} // namespace standin

using namespace standin;
extern "C" {
/* Like the real one it leaves *count alone when it fails. */
cudaError_t cudaGetDeviceCount(int *count) {
    AT_START(0);
    if (settings().error) return fail((cudaError_t)settings().error);
    *count = settings().devices;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    MAY_FAIL(cudaErrorUnknown);
    if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
    device_here = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = device_here;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *address, int size, int device) {
    AT_START(0);
    MAY_FAIL(cudaErrorInvalidDevice);
    if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
    snprintf(address, static_cast<size_t>(size), "0000:%02X:00.0", 0x3b + device);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    AT_START(0);
    MAY_FAIL(cudaErrorUnknown);
    if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof(*properties));
    snprintf(properties->name, sizeof(properties->name), "CPU stand-in");
    const long capability = number_of("STANDIN_CAPABILITY", 89);
    properties->major = (int)capability / 10;
    properties->minor = (int)capability % 10;
    properties->multiProcessorCount = 4;
    properties->totalGlobalMem = settings().memory;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    MAY_FAIL(cudaErrorUnknown);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
        return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorInvalidResourceHandle:
        return "cudaErrorInvalidResourceHandle";
    default:
        return "another error of CUDA";
    }
}
const char *cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    AT_START(0);
    MAY_FAIL(cudaErrorInvalidValue);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    return set_shared_limit(kernel, value);
}
/* To ask for them loads the kernel. */
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    AT_START(0);
    MAY_FAIL(cudaErrorInvalidDeviceFunction);
    memset(attributes, 0, sizeof(*attributes));
    not_for_the_first_time("a kernel's load", kernel, current_device());
    return cudaSuccess;
}
}
