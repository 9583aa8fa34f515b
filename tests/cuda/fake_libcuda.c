/* A CUDA driver without a GPU, for tests: device memory that the CPU cannot touch, and copies that are put off.

   The library answers the calls of the CUDA driver API that KvikIO makes, after the API's public documentation.
   - Device memory is a reserved range of addresses without access rights; the bytes lie elsewhere. Code that takes a
     device pointer for a host pointer ends with a segmentation fault.
   - A copy that is given to a stream is carried out no sooner than somebody waits for that stream, which the API
     allows. Code that reuses a buffer or hands over bytes before it has waited gets the wrong bytes.

   The functions named fake_* are for the test. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_ORDINAL = 9 };
enum { MEMORY_TYPE_DEVICE = 2 };
enum { MAX_BLOCKS = 64, DRIVER_VERSION = 13000 };

typedef int result_t;
typedef uint64_t pointer_t;

typedef struct { char *base, *bytes; size_t nbytes; } block_t;
typedef struct copy { struct copy *next; char *to; const char *from; size_t nbytes; } copy_t;
typedef struct stream { struct stream *next; copy_t *first, **last; } stream_t;
typedef struct { stream_t *stream; } event_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block_t blocks[MAX_BLOCKS];
static stream_t null_stream = {NULL, NULL, NULL};
static stream_t *streams = &null_stream;
static int64_t n_copies, n_pinned;
static int delay_us;
static char context_of_device;

static block_t *block_of(pointer_t address) {
    for (int i = 0; i < MAX_BLOCKS; i++) {
        pointer_t base = (pointer_t)blocks[i].base;
        if (base && address >= base && address < base + blocks[i].nbytes) return &blocks[i];
    }
    return NULL;
}

/* Where the bytes of an address lie; the address itself for host memory; NULL for a range that leaves its block. */
char *fake_bytes_of(pointer_t address, size_t nbytes) {
    block_t *block = block_of(address);
    if (!block) return (char *)address;
    size_t offset = address - (pointer_t)block->base;
    return nbytes <= block->nbytes - offset ? block->bytes + offset : NULL;
}

pointer_t fake_alloc(size_t nbytes) {
    pthread_mutex_lock(&lock);
    block_t *block = blocks;
    while (block < blocks + MAX_BLOCKS && block->base) block++;
    if (block == blocks + MAX_BLOCKS) abort();
    void *base = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) abort();
    block->bytes = malloc(nbytes);
    memset(block->bytes, 0xEE, nbytes);
    block->nbytes = nbytes;
    block->base = base;
    pthread_mutex_unlock(&lock);
    return (pointer_t)base;
}

void fake_free(pointer_t base) {
    pthread_mutex_lock(&lock);
    block_t *block = block_of(base);
    munmap(block->base, block->nbytes);
    free(block->bytes);
    memset(block, 0, sizeof *block);
    pthread_mutex_unlock(&lock);
}

void fake_download(pointer_t from, void *to, size_t nbytes) { memcpy(to, fake_bytes_of(from, nbytes), nbytes); }
int64_t fake_n_copies(void) { return __atomic_load_n(&n_copies, __ATOMIC_SEQ_CST); }
int64_t fake_n_pinned(void) { return __atomic_load_n(&n_pinned, __ATOMIC_SEQ_CST); }
void fake_set_delay_us(int us) { delay_us = us; }

/* Carry out what a stream was given. */
static void finish(stream_t *stream) {
    if (delay_us) usleep(delay_us);
    pthread_mutex_lock(&lock);
    copy_t *copy = stream->first;
    stream->first = NULL;
    stream->last = &stream->first;
    while (copy) {
        copy_t *next = copy->next;
        memcpy(copy->to, copy->from, copy->nbytes);
        __atomic_add_fetch(&n_copies, 1, __ATOMIC_SEQ_CST);
        free(copy);
        copy = next;
    }
    pthread_mutex_unlock(&lock);
}

static result_t put_off(pointer_t to, pointer_t from, size_t nbytes, stream_t *stream) {
    char *target = fake_bytes_of(to, nbytes), *source = fake_bytes_of(from, nbytes);
    if (!target || !source) return INVALID_VALUE;
    if (!stream) stream = &null_stream;
    copy_t *copy = malloc(sizeof *copy);
    *copy = (copy_t){NULL, target, source, nbytes};
    pthread_mutex_lock(&lock);
    if (!stream->last) stream->last = &stream->first;
    *stream->last = copy;
    stream->last = &copy->next;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* --- the driver API. Names with a version are what cuda.h makes of the plain ones. */

result_t cuInit(unsigned flags) { (void)flags; return SUCCESS; }
result_t cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return SUCCESS; }
result_t cuGetErrorName(result_t error, const char **name) { (void)error; *name = "FAKE_ERROR"; return SUCCESS; }
result_t cuGetErrorString(result_t error, const char **text) { (void)error; *text = "fake error"; return SUCCESS; }

result_t cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
result_t cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
result_t cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 0;
    return SUCCESS;
}
result_t cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &context_of_device;
    return SUCCESS;
}
result_t cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
result_t cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }

result_t cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int device) {
    (void)parameters, (void)flags;
    return cuDevicePrimaryCtxRetain(context, device);
}
result_t cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags;
    return cuDevicePrimaryCtxRetain(context, device);
}
result_t cuCtxDestroy_v2(void *context) { (void)context; return SUCCESS; }
result_t cuCtxPushCurrent_v2(void *context) { (void)context; return SUCCESS; }
result_t cuCtxPopCurrent_v2(void **context) { *context = &context_of_device; return SUCCESS; }
result_t cuCtxGetCurrent(void **context) { *context = &context_of_device; return SUCCESS; }
result_t cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }

result_t cuPointerGetAttribute(void *value, int attribute, pointer_t address) {
    block_t *block = block_of(address);
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(void **)value = block ? &context_of_device : NULL; break;
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = block ? MEMORY_TYPE_DEVICE : 0; break;
    case ATTRIBUTE_DEVICE_POINTER: *(pointer_t *)value = block ? address : 0; break;
    case ATTRIBUTE_ORDINAL: *(int *)value = block ? 0 : -2; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
result_t cuPointerGetAttributes(unsigned n, const int *attributes, void **values, pointer_t address) {
    for (unsigned i = 0; i < n; i++) {
        result_t result = cuPointerGetAttribute(values[i], attributes[i], address);
        if (result) return result;
    }
    return SUCCESS;
}
result_t cuMemGetAddressRange_v2(pointer_t *base, size_t *nbytes, pointer_t address) {
    block_t *block = block_of(address);
    if (!block) return NOT_FOUND;
    *base = (pointer_t)block->base;
    *nbytes = block->nbytes;
    return SUCCESS;
}

result_t cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    (void)flags;
    __atomic_add_fetch(&n_pinned, 1, __ATOMIC_SEQ_CST);
    return posix_memalign(memory, 256, nbytes) ? INVALID_VALUE : SUCCESS;
}
result_t cuMemFreeHost(void *memory) {
    __atomic_sub_fetch(&n_pinned, 1, __ATOMIC_SEQ_CST);
    free(memory);
    return SUCCESS;
}
result_t cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags) {
    (void)memory, (void)nbytes, (void)flags;
    return SUCCESS;
}
result_t cuMemHostUnregister(void *memory) { (void)memory; return SUCCESS; }

result_t cuMemcpyAsync(pointer_t to, pointer_t from, size_t nbytes, void *stream) {
    return put_off(to, from, nbytes, stream);
}
result_t cuMemcpyHtoDAsync_v2(pointer_t to, const void *from, size_t nbytes, void *stream) {
    return put_off(to, (pointer_t)from, nbytes, stream);
}
result_t cuMemcpyDtoHAsync_v2(void *to, pointer_t from, size_t nbytes, void *stream) {
    return put_off((pointer_t)to, from, nbytes, stream);
}
result_t cuMemcpyBatchAsync_v2(pointer_t *to, pointer_t *from, size_t *nbytes, size_t count, void *attributes,
                               size_t *indices, size_t n_attributes, void *stream) {
    (void)attributes, (void)indices, (void)n_attributes;
    for (size_t i = 0; i < count; i++) {
        result_t result = put_off(to[i], from[i], nbytes[i], stream);
        if (result) return result;
    }
    return SUCCESS;
}
/* As KvikIO for CUDA 12 calls it. */
result_t cuMemcpyBatchAsync(pointer_t *to, pointer_t *from, size_t *nbytes, size_t count, void *attributes,
                            size_t *indices, size_t n_attributes, size_t *failed, void *stream) {
    (void)failed;
    return cuMemcpyBatchAsync_v2(to, from, nbytes, count, attributes, indices, n_attributes, stream);
}

result_t cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    stream_t *created = calloc(1, sizeof *created);
    created->last = &created->first;
    pthread_mutex_lock(&lock);
    created->next = streams;
    streams = created;
    pthread_mutex_unlock(&lock);
    *stream = created;
    return SUCCESS;
}
result_t cuStreamSynchronize(void *stream) {
    if (stream) {
        finish(stream);
    } else { /* the null stream waits for the others */
        for (stream_t *each = streams; each; each = each->next) finish(each);
    }
    return SUCCESS;
}
result_t cuStreamDestroy_v2(void *stream) { return cuStreamSynchronize(stream); } /* kept: the list is never cut */

result_t cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof(event_t));
    return SUCCESS;
}
result_t cuEventRecord(void *event, void *stream) {
    ((event_t *)event)->stream = stream ? stream : &null_stream;
    return SUCCESS;
}
result_t cuEventSynchronize(void *event) {
    if (((event_t *)event)->stream) finish(((event_t *)event)->stream);
    return SUCCESS;
}
result_t cuEventQuery(void *event) { return cuEventSynchronize(event); }
result_t cuEventDestroy_v2(void *event) { free(event); return SUCCESS; }
result_t cuLaunchHostFunc(void *stream, void (*call)(void *), void *data) {
    cuStreamSynchronize(stream);
    call(data);
    return SUCCESS;
}
