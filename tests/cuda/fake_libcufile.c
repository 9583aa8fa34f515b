/* cuFile without a GPU, for tests: it reads into the fake driver's device memory and notes what it was asked for.

   The calls and structures are those of the public cuFile API reference that KvikIO uses for reading. Whether there is
   a kernel driver (nvidia-fs) and whether cuFile may bounce are set by the environment: FAKE_NVFS_MAJOR (0 for none),
   FAKE_ALLOW_COMPAT (0 or 1). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

extern char *fake_bytes_of(uint64_t address, size_t nbytes);

enum { MAX_READS = 4096, VERSION = 1150, ALLOW_COMPAT_MODE = 1 };

typedef struct { int error, cuda_error; } status_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *operations; } descriptor_t;
typedef struct {
    struct {
        unsigned major_version, minor_version;
        size_t poll_thresh_size, max_direct_io_size;
        unsigned status_flags, control_flags;
    } nvfs;
    unsigned features, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
    unsigned max_batch_io_size, max_batch_io_timeout_msecs;
} properties_t;

static const status_t success = {0, 0};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t reads[MAX_READS][3];
static int n_reads, n_handles;

/* Reads so far: (file offset, bytes, device address) each. */
int fake_cufile_reads(int64_t (*out)[3], int max) {
    pthread_mutex_lock(&lock);
    int n = n_reads < max ? n_reads : max;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 3; k++) out[i][k] = reads[i][k];
    pthread_mutex_unlock(&lock);
    return n;
}
int fake_cufile_n_handles(void) { return n_handles; }

status_t cuFileHandleRegister(void **handle, descriptor_t *descriptor) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor->handle.fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC); /* without O_DIRECT, which asks for aligned host memory */
    if (fd < 0) return (status_t){5000 + errno, 0};
    n_handles++;
    *handle = (void *)(intptr_t)fd;
    return success;
}
void cuFileHandleDeregister(void *handle) {
    n_handles--;
    close((int)(intptr_t)handle);
}
ssize_t cuFileRead(void *handle, void *base, size_t nbytes, off_t file_offset, off_t offset) {
    char *to = fake_bytes_of((uint64_t)base + offset, nbytes);
    if (!to || to == (char *)base + offset) return -5022; /* not device memory */
    pthread_mutex_lock(&lock);
    if (n_reads < MAX_READS) {
        reads[n_reads][0] = file_offset;
        reads[n_reads][1] = (int64_t)nbytes;
        reads[n_reads++][2] = (int64_t)base + offset;
    }
    pthread_mutex_unlock(&lock);
    return pread((int)(intptr_t)handle, to, nbytes, file_offset);
}
status_t cuFileDriverGetProperties(properties_t *properties) {
    const char *major = getenv("FAKE_NVFS_MAJOR"), *compat = getenv("FAKE_ALLOW_COMPAT");
    *properties = (properties_t){0};
    properties->nvfs.major_version = major ? atoi(major) : 0;
    properties->nvfs.control_flags = compat && atoi(compat) ? 1u << ALLOW_COMPAT_MODE : 0;
    return success;
}
status_t cuFileGetVersion(int *version) { *version = VERSION; return success; }
status_t cuFileDriverOpen(void) { return success; }
status_t cuFileDriverClose_v2(void) { return success; }
status_t cuFileDriverClose(void) { return success; }
status_t cuFileBufRegister(const void *base, size_t nbytes, int flags) {
    (void)base, (void)nbytes, (void)flags;
    return success;
}
status_t cuFileBufDeregister(const void *base) { (void)base; return success; }
status_t cuFileDriverSetPollMode(bool on, size_t nbytes) { (void)on, (void)nbytes; return success; }
status_t cuFileDriverSetMaxCacheSize(size_t nbytes) { (void)nbytes; return success; }
status_t cuFileDriverSetMaxPinnedMemSize(size_t nbytes) { (void)nbytes; return success; }

/* Looked up when KvikIO starts, and not to be called by a reader. */
#define NOT_FOR_READING(name) \
    ssize_t name(void) { abort(); }
NOT_FOR_READING(cuFileWrite)
NOT_FOR_READING(cuFileReadAsync)
NOT_FOR_READING(cuFileWriteAsync)
NOT_FOR_READING(cuFileStreamRegister)
NOT_FOR_READING(cuFileStreamDeregister)
NOT_FOR_READING(cuFileBatchIOSetUp)
NOT_FOR_READING(cuFileBatchIOSubmit)
NOT_FOR_READING(cuFileBatchIOGetStatus)
NOT_FOR_READING(cuFileBatchIOCancel)
NOT_FOR_READING(cuFileBatchIODestroy)
