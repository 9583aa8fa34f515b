// The CUDA backend's own kernels: what lies between the stored bytes and a minibatch, but for the codecs of nvCOMP.
//
// This file and those beside it are compiled as one, by NVRTC when a loader is opened, and by the tests for the host,
// with their own meaning of the primitives below; so they include nothing and use no other feature of CUDA. What each
// kernel must equal is written in gpuload/backends/native: chunks.py, frames.py and inflate.py (decoding), rows.py
// (taking rows).
//
// common.cu       primitives, blocks and threads, unaligned bytes
// chunks.cu       stored bytes -> decoded bytes: checksums, byte shuffle, LZF
// containers.cu   the same, of chunks that hold several streams: blosc's, and those of HDF5's lz4 filter
// pieces.cu       decoded bytes -> the resident's arrays
// rows.cu         the resident's rows -> a minibatch
//
// How kernels are organised
// -------------------------
// - A kernel works on items: chunks, pieces or rows. A block takes one item at a time and goes on in steps of the grid,
//   so any grid is right, and any block of up to MAX_THREADS threads. Where a grid has several blocks per item, an item
//   is cut into parts, one per block: a small minibatch or a few large pieces still fill the device.
// - The code of an item is a sequence of phases. A phase is what each thread does on its own; PHASE ends with a
//   barrier, EACH_THREAD does not and is for work that no other thread of the block waits for. What stands between
//   phases is done alike by all threads, and depends on arguments, on global memory that the kernel only reads, and on
//   shared memory only through `agreed`, which ends with a barrier. So no barrier can be forgotten, or stand where some
//   threads do not come by.
// - No thread keeps a variable from phase to phase: what must last lies in shared memory.
//
// Memory
// ------
// - Elements are aligned to their size, and `out` of gather_payloads to 16 bytes. Byte ranges may start anywhere: they
//   are read by aligned words of up to 16 bytes and shifted into place. So what is read may exceed a range, an array of
//   elements too, by the rest of its first and last 16 aligned bytes, never more; nothing is written outside a range.
// - Rows and runs are written by stores of 16 bytes but for their ends, whatever their alignment: a thread takes a
//   group of elements that is aligned in the output, and those at the ends, where a group is not whole, one by one.
//
// Errors
// ------
// Nothing is raised here. status[i], of chunk i, is set to the reason why the chunk is bad unless it already holds one.
// A column number outside the matrix is replaced by 0, so that kernels that follow stay within their rows whether or
// not the host has looked at the status yet.
//
// Block sizes: 256 threads or so, but 32 for decode_lzf, which follows a stream with all threads and so needs no more
// than a warp. Blocks: as many as items, or some 8 per multiprocessor where that is more. A cell's total, and with it
// the last bit of its transformed values, may depend on the number of threads (never of blocks) where values are not
// whole numbers.

#ifndef GPULOAD_HOST

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define KERNEL(name, parameters) extern "C" __global__ void __launch_bounds__(1024) name parameters
#define DEVICE __device__ __forceinline__
#define BLOCK int64_t(blockIdx.x)
#define N_BLOCKS int64_t(gridDim.x)
#define N_THREADS int(blockDim.x)
#define SHARED_ARRAY(type, name, n) __shared__ __align__(16) type name[n]
#define BARRIER() __syncthreads()
#define EACH_THREAD(t) for (int t = threadIdx.x, phase_ = 1; phase_; phase_ = 0)
#define PHASE(t) for (int t = threadIdx.x, phase_ = 1; phase_; phase_ = 0, __syncthreads())

template <class T>
DEVICE T load_aligned(const void* from) {
    return *static_cast<const T*>(from);
}

template <class T>
DEVICE void store_aligned(void* to, T value) {
    *static_cast<T*>(to) = value;
}

DEVICE void atomic_min(int32_t* at, int32_t value) { atomicMin(at, value); }
DEVICE void atomic_set_if_zero(int32_t* at, int32_t value) { atomicCAS(at, 0, value); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
DEVICE double double_of(uint64_t bits) { return __longlong_as_double(int64_t(bits)); }
DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
DEVICE uint64_t bits_of(double value) { return uint64_t(__double_as_longlong(value)); }

// Sum of the products of the bytes of two words.
DEVICE uint32_t dot_bytes(uint32_t a, uint32_t b) { return __dp4a(a, b, 0u); }

// CuPy has NVRTC flush to zero what float32 holds below 2**-126 (-ftz=true), in all that is written in C++. So whatever
// reads or makes a float32 by arithmetic is one of these.
DEVICE double widened(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}

DEVICE float narrowed(double value) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
    return narrow;
}

DEVICE void add_to(float& sum, float value) {
    asm("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(value));
}

// Bits of the float16 nearest to a value, ties to even.
DEVICE uint16_t half_bits(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Constants, those of the reasons as in native/inflate.py, native/chunks.py and native/frames.py.

constexpr int32_t BAD_HEADER = -1, BAD_DISTANCE = -4, TRUNCATED = -5, TOO_LONG = -6, TOO_SHORT = -7, BAD_CHECKSUM = -8;
constexpr int32_t BAD_FLETCHER = -102, BAD_COLUMN = -103, BAD_VALUE = -104;
constexpr int32_t BAD_BLOSC = -201, BAD_STREAM = -203, BAD_LZ4 = -205;

constexpr int MAX_THREADS = 1024;

// Integers up to here are all exact in float32.
constexpr int64_t MAX_EXACT = 1 << 24;

// Columns that densify makes at a time in shared memory: 32 kB, so that five blocks fit a multiprocessor of Hopper.
constexpr int TILE = 8192;

// Parts of at least this many elements are worth a block of their own in gather_dense.
constexpr int64_t MIN_PART = 4096;

// ---------------------------------------------------------------------------------------------------------------------
// Blocks and threads.

// How many blocks share each item.
DEVICE int64_t parts_of_each(int64_t n_items, int64_t most) {
    const int64_t n = n_items > 0 ? N_BLOCKS / n_items : 1;
    return n < 1 || most < 1 ? 1 : n < most ? n : most;
}

// Read a variable in shared memory outside a phase: all threads have read it before any goes on.
template <class T>
DEVICE T agreed(const T& shared) {
    const T value = shared;
    BARRIER();
    return value;
}

// Add up the values of all threads, always in the same order; partial[t] is that of thread t and is spoilt.
template <class T>
DEVICE T block_sum(T* partial) {
    for (int n = N_THREADS; n > 1;) {
        const int quarter = (n + 3) / 4;
        PHASE(t) {
            if (t < quarter) {
                T sum = partial[t];
                for (int k = t + quarter; k < n; k += quarter) sum += partial[k];
                partial[t] = sum;
            }
        }
        n = quarter;
    }
    return agreed(partial[0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Unaligned bytes. All of the bytes asked for must be within the range that the caller may read.

DEVICE uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Return the word that starts `shift` bits into `low` and goes on in `high`; shift < 64.
DEVICE uint64_t joined(uint64_t low, uint64_t high, uint32_t shift) { return low >> shift | high << 1 << (63 - shift); }

DEVICE uint32_t load4(const uint8_t* from) {
    const uint32_t skew = uint32_t(address(from) & 3);
    const uint32_t low = load_aligned<uint32_t>(from - skew);
    const uint32_t high = skew ? load_aligned<uint32_t>(from - skew + 4) : 0;
    return uint32_t((uint64_t(high) << 32 | low) >> 8 * skew);
}

DEVICE int64_t signed4(const uint8_t* from) { return int32_t(load4(from)); }

DEVICE int64_t big4(const uint8_t* from) {
    return int32_t(uint32_t(from[0]) << 24 | uint32_t(from[1]) << 16 | uint32_t(from[2]) << 8 | from[3]);
}

DEVICE uint64_t load8(const uint8_t* from) {
    const uint32_t skew = uint32_t(address(from) & 7);
    const uint64_t low = load_aligned<uint64_t>(from - skew);
    const uint64_t high = skew ? load_aligned<uint64_t>(from - skew + 8) : 0;
    return joined(low, high, 8 * skew);
}

DEVICE uint4 load16(const uint8_t* from) {
    const uint32_t skew = uint32_t(address(from) & 15), shift = 8 * (skew & 7);
    const uint4 a = load_aligned<uint4>(from - skew);
    const uint4 b = skew ? load_aligned<uint4>(from - skew + 16) : a;
    const uint64_t a_low = uint64_t(a.y) << 32 | a.x, a_high = uint64_t(a.w) << 32 | a.z;
    const uint64_t b_low = uint64_t(b.y) << 32 | b.x, b_high = uint64_t(b.w) << 32 | b.z;
    const bool is_late = skew >= 8;
    const uint64_t first = joined(is_late ? a_high : a_low, is_late ? b_low : a_high, shift);
    const uint64_t second = joined(is_late ? b_low : a_high, is_late ? b_high : b_low, shift);
    return {uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32)};
}

// Read N words of 4 bytes.
template <int N>
DEVICE void load_words(const uint8_t* from, uint32_t (&words)[N]) {
    static_assert(N == 1 || N == 2 || N % 4 == 0, "1, 2, 4 or 8 words");
    if constexpr (N == 1) {
        words[0] = load4(from);
    } else if constexpr (N == 2) {
        const uint64_t both = load8(from);
        words[0] = uint32_t(both);
        words[1] = uint32_t(both >> 32);
    } else {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            const uint4 four = load16(from + 4 * k);
            words[k] = four.x, words[k + 1] = four.y, words[k + 2] = four.z, words[k + 3] = four.w;
        }
    }
}

// Write N words of 4 bytes to any place.
template <int N>
DEVICE void store_words(uint8_t* to, const uint32_t (&words)[N]) {
    if (N % 4 == 0 && !(address(to) & 15)) {
#pragma unroll
        for (int k = 0; k + 4 <= N; k += 4) {
            store_aligned(to + 4 * k, uint4{words[k], words[k + 1], words[k + 2], words[k + 3]});
        }
    } else if (!(address(to) & 3)) {
#pragma unroll
        for (int k = 0; k < N; ++k) store_aligned(to + 4 * k, words[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4 * N; ++k) to[k] = uint8_t(words[k / 4] >> 8 * (k % 4));
    }
}

// Copy a byte range, by all threads of the block.
DEVICE void copy_bytes(const uint8_t* __restrict__ from, uint8_t* __restrict__ to, int64_t size) {
    EACH_THREAD(t) {
        for (int64_t k = t; k < size / 16; k += N_THREADS) {
            uint32_t words[4];
            load_words(from + 16 * k, words);
            store_words(to + 16 * k, words);
        }
        for (int64_t k = size / 16 * 16 + t; k < size; k += N_THREADS) to[k] = from[k];
    }
}
