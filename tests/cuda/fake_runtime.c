/* The CUDA runtime and driver that CuPy calls, over host memory: for tests of what the package asks of CuPy itself.

   Work is done at once, in the calling thread; the order of streams is the matter of fake_device.py. Strict is this one
   about what CUDA refuses and host memory would not show: launches and events of another device than the current one,
   streams, events and memory that are no more. Memory is full of rubbish when it is new and when it is freed.

   CuPy has the runtime linked into itself; fake_patch puts a jump to the functions here at the start of those there. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 101, INVALID_HANDLE = 400, FAILED = 719 };
enum { REGISTERED = 712, CAPTURING = 900, GLOBAL = 0, HOST_MAPPED = 2 };
enum { NOT_SUPPORTED = 801, N_DEVICES = 2, VERSION = 13000 };
enum { MAX_THREADS = 1, MULTIPROCESSORS = 16, MAJOR = 75 }; /* device attributes */
enum { STREAM = 0x5713, EVENT = 0xE7E7, MODULE = 0x30D0, GONE = 0xDEAD };

typedef int result_t;
typedef struct { int kind, device; char name[128]; } handle_t;
typedef struct block { struct block *next; uint64_t base; size_t nbytes; int device; } block_t;

static __thread int current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block_t *blocks, *registered;
static int n_launches[N_DEVICES], n_host_blocks;
static int is_capturing; /* whether a thread captures a graph, in the default mode: global */
static __thread int capture_mode;
static int (*launch_kernel)(const char *, int64_t, int, int, void **);

static handle_t *new_handle(int kind, const char *name) {
    handle_t *handle = malloc(sizeof *handle);
    handle->kind = kind;
    handle->device = current;
    snprintf(handle->name, sizeof handle->name, "%s", name);
    return handle;
}
static int is(void *handle, int kind) { return handle && ((handle_t *)handle)->kind == kind; }
static int is_default(void *stream) { return (uintptr_t)stream <= 2; }
static int is_stream(void *stream) { return is_default(stream) || is(stream, STREAM); }
static int is_here(void *stream) { return is_default(stream) || ((handle_t *)stream)->device == current; }

int fake_n_launches(int device) { return __atomic_load_n(&n_launches[device], __ATOMIC_SEQ_CST); }
int fake_n_host_blocks(void) { return __atomic_load_n(&n_host_blocks, __ATOMIC_SEQ_CST); }
void fake_set_launch(void *function) { launch_kernel = function; }
result_t fake_unsupported(void) { return NOT_SUPPORTED; }

void fake_set_capturing(int whether) { __atomic_store_n(&is_capturing, whether, __ATOMIC_SEQ_CST); }

/* Whether a graph that is being captured forbids this thread to allocate, or to ask about events. */
static int is_refused(void) { return __atomic_load_n(&is_capturing, __ATOMIC_SEQ_CST) && capture_mode == GLOBAL; }

/* The device that an address belongs to; -1: none. */
int fake_device_of(uint64_t address) {
    int device = -1;
    pthread_mutex_lock(&lock);
    for (block_t *block = blocks; block; block = block->next) {
        if (address - block->base < block->nbytes) device = block->device;
    }
    pthread_mutex_unlock(&lock);
    return device;
}

/* Let the function at an address begin with a jump to another one. x86-64: mov rax, to; jmp rax. */
void fake_patch(uint64_t at, uint64_t to) {
    unsigned char code[12] = {0x48, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xE0};
    memcpy(code + 2, &to, 8);
    void *page = (void *)(at & ~4095ull);
    mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
    memcpy((void *)at, code, sizeof code);
    mprotect(page, 8192, PROT_READ | PROT_EXEC);
}

/* --- the runtime */

result_t cudaGetDeviceCount(int *n) { *n = N_DEVICES; return SUCCESS; }
result_t cudaGetDevice(int *device) { *device = current; return SUCCESS; }
result_t cudaSetDevice(int device) {
    if (device < 0 || device >= N_DEVICES) return NO_DEVICE;
    current = device;
    return SUCCESS;
}
result_t cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == MULTIPROCESSORS ? 4 : attribute == MAJOR ? 9 : attribute == MAX_THREADS ? 1024 : 0;
    return SUCCESS;
}
result_t cudaDeviceSynchronize(void) { return SUCCESS; }
result_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return SUCCESS;
}
result_t cudaDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
result_t cudaRuntimeGetVersion(int *version) { *version = VERSION; return SUCCESS; }
result_t cudaGetLastError(void) { return SUCCESS; }
result_t cudaPeekAtLastError(void) { return SUCCESS; }
const char *cudaGetErrorName(result_t error) {
    static __thread char name[32];
    snprintf(name, sizeof name, "cudaError%d", error);
    return name;
}
const char *cudaGetErrorString(result_t error) { return error == NO_MEMORY ? "out of memory" : "refused by the fake"; }

result_t cudaMalloc(void **memory, size_t nbytes) {
    if (is_refused()) return CAPTURING;
    if (posix_memalign(memory, 512, nbytes ? nbytes : 1)) return NO_MEMORY;
    memset(*memory, 0xCD, nbytes);
    block_t *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (block_t){blocks, (uint64_t)*memory, nbytes, current};
    blocks = block;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
static block_t *take_out(block_t **at, void *memory) {
    pthread_mutex_lock(&lock);
    while (*at && (*at)->base != (uint64_t)memory) at = &(*at)->next;
    block_t *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}
result_t cudaFree(void *memory) {
    if (!memory) return SUCCESS;
    block_t *found = take_out(&blocks, memory);
    if (!found) return INVALID_VALUE;
    memset(memory, 0xDD, found->nbytes);
    free(memory);
    free(found);
    return SUCCESS;
}
result_t cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = 1ull << 36; return SUCCESS; }
result_t cudaHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    (void)flags;
    if (is_refused()) return CAPTURING;
    if (posix_memalign(memory, 4096, nbytes)) return NO_MEMORY;
    memset(*memory, 0xAB, nbytes);
    __atomic_add_fetch(&n_host_blocks, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
result_t cudaFreeHost(void *memory) {
    if (memory) __atomic_sub_fetch(&n_host_blocks, 1, __ATOMIC_SEQ_CST);
    free(memory);
    return SUCCESS;
}
/* Memory of others, page-locked by the page: two ranges must not share one. */
result_t cudaHostRegister(void *memory, size_t nbytes, unsigned flags) {
    if (is_refused()) return CAPTURING;
    if (!(flags & HOST_MAPPED)) return INVALID_VALUE;
    block_t *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    for (block_t *one = registered; one; one = one->next) {
        uint64_t end = (uint64_t)memory + nbytes, its_end = one->base + one->nbytes;
        if ((uint64_t)memory / 4096 <= (its_end - 1) / 4096 && one->base / 4096 <= (end - 1) / 4096) {
            pthread_mutex_unlock(&lock);
            free(block);
            return REGISTERED;
        }
    }
    *block = (block_t){registered, (uint64_t)memory, nbytes, current};
    registered = block;
    pthread_mutex_unlock(&lock);
    __atomic_add_fetch(&n_host_blocks, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
result_t cudaHostUnregister(void *memory) {
    if (is_refused()) return CAPTURING;
    block_t *found = take_out(&registered, memory);
    if (!found) return INVALID_VALUE;
    free(found);
    __atomic_sub_fetch(&n_host_blocks, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
result_t cudaPointerGetAttributes(void *attributes, const void *pointer) {
    int device = fake_device_of((uint64_t)pointer), *found = attributes;
    const void **pointers = attributes;
    memset(attributes, 0, 32);
    found[0] = device < 0 ? 0 : 2, found[1] = device < 0 ? 0 : device;
    pthread_mutex_lock(&lock);
    for (block_t *one = registered; one; one = one->next) {
        if ((uint64_t)pointer - one->base < one->nbytes) found[0] = 1, pointers[1] = pointers[2] = pointer;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
result_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    (void)kind;
    if (!is_stream(stream)) return INVALID_HANDLE;
    memmove(to, from, nbytes);
    return SUCCESS;
}
result_t cudaMemcpy(void *to, const void *from, size_t nbytes, int kind) {
    return cudaMemcpyAsync(to, from, nbytes, kind, NULL);
}
result_t cudaMemsetAsync(void *memory, int value, size_t nbytes, void *stream) {
    if (!is_stream(stream)) return INVALID_HANDLE;
    memset(memory, value, nbytes);
    return SUCCESS;
}

result_t cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    (void)flags;
    *stream = new_handle(STREAM, "");
    return SUCCESS;
}
result_t cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}
result_t cudaStreamDestroy(void *stream) { ((handle_t *)stream)->kind = GONE; return SUCCESS; } /* not freed: asked */
result_t cudaStreamSynchronize(void *stream) { return is_stream(stream) ? SUCCESS : INVALID_HANDLE; }
result_t cudaStreamQuery(void *stream) { return cudaStreamSynchronize(stream); }
result_t cudaStreamIsCapturing(void *stream, int *is_capturing) {
    *is_capturing = 0;
    return cudaStreamSynchronize(stream);
}
result_t cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    return is_stream(stream) && is(event, EVENT) ? SUCCESS : INVALID_HANDLE;
}
result_t cudaEventCreateWithFlags(void **event, unsigned flags) {
    (void)flags;
    *event = new_handle(EVENT, "");
    return SUCCESS;
}
result_t cudaEventRecord(void *event, void *stream) {
    if (!is_stream(stream) || !is(event, EVENT)) return INVALID_HANDLE;
    int device = is_default(stream) ? current : ((handle_t *)stream)->device;
    return ((handle_t *)event)->device == device ? SUCCESS : INVALID_HANDLE;
}
result_t cudaEventSynchronize(void *event) {
    if (is_refused()) return CAPTURING;
    return is(event, EVENT) ? SUCCESS : INVALID_HANDLE;
}
result_t cudaEventQuery(void *event) { return cudaEventSynchronize(event); }
result_t cudaEventDestroy(void *event) { ((handle_t *)event)->kind = GONE; return SUCCESS; }

/* --- the driver */

result_t cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode, *mode = before;
    return SUCCESS;
}

result_t cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t nbytes, void *stream) {
    if (fake_device_of(to) != current || !is_here(stream)) return INVALID_VALUE;
    return cudaMemcpyAsync((void *)to, from, nbytes, 1, stream);
}
result_t cuEventRecord(void *event, void *stream) { return cudaEventRecord(event, stream); }
result_t cuEventSynchronize(void *event) { return cudaEventSynchronize(event); }

result_t cuGetErrorName(result_t error, const char **name) { *name = cudaGetErrorName(error); return SUCCESS; }
result_t cuGetErrorString(result_t error, const char **text) { *text = cudaGetErrorString(error); return SUCCESS; }
result_t cuModuleLoadData(void **module, const void *image) {
    (void)image;
    *module = new_handle(MODULE, "");
    return SUCCESS;
}
result_t cuModuleUnload(void *module) { (void)module; return SUCCESS; }
result_t cuModuleGetFunction(void **function, void *module, const char *name) {
    handle_t *found = new_handle(MODULE, name);
    found->device = ((handle_t *)module)->device;
    *function = found;
    return SUCCESS;
}
result_t cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                        void **extra) {
    handle_t *kernel = function;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared || extra) return INVALID_VALUE;
    if (!grid_x || grid_x > 0x7FFFFFFF || !block_x || block_x > 1024) return INVALID_VALUE;
    if (!is_stream(stream) || !is_here(stream) || kernel->device != current) return INVALID_HANDLE;
    __atomic_add_fetch(&n_launches[current], 1, __ATOMIC_SEQ_CST);
    return launch_kernel(kernel->name, grid_x, (int)block_x, 0, arguments) ? FAILED : SUCCESS;
}
