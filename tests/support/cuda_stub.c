/* A CUDA runtime and driver of one device that runs nothing, for fake CUDA tensors without a GPU.

PyTorch's autograd engine, its streams and its choice of attention kernels ask the runtime for a
device, its properties and the state of its context. These functions answer for one idle device of
compute capability 9.0. Device memory is host memory and copies are host copies, so small constants
have their values. Kernels do nothing.

Compiled twice: preloaded before libcudart, and as libcuda.so.1. */

#include <stdlib.h>
#include <string.h>

/* Compiler attributes of a header that the wheels of the runtime leave out. */
#define __device_builtin__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDARTAPI

#include "driver_types.h"

enum { OK = 0, OUT_OF_MEMORY = 2, DRIVER_VERSION = 13000 };
static const size_t MEMORY_BYTES = (size_t)141 << 30;

/* --- devices --- */

int cudaGetDeviceCount(int *count) { *count = 1; return OK; }
int cudaGetDevice(int *device) { *device = 0; return OK; }
int cudaSetDevice(int device) { return OK; }
int cudaDeviceSynchronize(void) { return OK; }
int cudaDriverGetVersion(int *version) { *version = DRIVER_VERSION; return OK; }
int cudaRuntimeGetVersion(int *version) { *version = DRIVER_VERSION; return OK; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return OK; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return OK; }
int cudaGetLastError(void) { return OK; }
int cudaPeekAtLastError(void) { return OK; }

int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stub");
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->l2CacheSize = 50 << 20;
  properties->totalGlobalMem = MEMORY_BYTES;
  return OK;
}

/* --- streams and events --- */

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return OK; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  static size_t handles = 16;
  *stream = (void *)handles++;
  return OK;
}
int cudaStreamQuery(void *stream) { return OK; }
int cudaStreamSynchronize(void *stream) { return OK; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
int cudaStreamIsCapturing(void *stream, int *is_capturing) { *is_capturing = 0; return OK; }
int cudaStreamGetCaptureInfo(void *stream, int *status, void *id, void *graph, void *dependencies,
                             void *edges, void *count) {
  *status = 0;
  return OK;
}
int cudaThreadExchangeStreamCaptureMode(void *mode) { return OK; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)8; return OK; }
int cudaEventDestroy(void *event) { return OK; }
int cudaEventRecord(void *event, void *stream) { return OK; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return OK; }
int cudaEventQuery(void *event) { return OK; }
int cudaEventSynchronize(void *event) { return OK; }

/* --- memory and kernels --- */

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = *total_bytes = MEMORY_BYTES;
  return OK;
}
int cudaMalloc(void **memory, size_t num_bytes) {
  return posix_memalign(memory, 512, num_bytes) ? OUT_OF_MEMORY : OK;
}
int cudaFree(void *memory) { free(memory); return OK; }
int cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, int kind, void *stream) {
  memcpy(to, from, num_bytes);
  return OK;
}
int cudaMemsetAsync(void *memory, int value, size_t num_bytes, void *stream) {
  memset(memory, value, num_bytes);
  return OK;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory) {
  memset(attributes, 0, sizeof *attributes);
  return OK;
}
int cudaHostRegister(void *memory, size_t num_bytes, unsigned flags) { return OK; }
int cudaHostUnregister(void *memory) { return OK; }
int cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                     size_t shared_bytes, void *stream) {
  return OK;
}

/* --- driver --- */

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return OK;
}
