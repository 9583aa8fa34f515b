// The CUDA backend's own kernels: everything between stored bytes and a minibatch that nvCOMP does not do.
//
// This file and its neighbours are compiled as one unit: by NVRTC when a loader is opened, and by the tests for the
// host, with other definitions of the primitives below. So they include nothing and use no other CUDA feature. The
// reference for each kernel is in gpuload/backends/native: chunks.py, checksums.py, frames.py and inflate.py (decoding),
// counts.py (downsampling), rows.py (taking rows).
//
// common.cu       primitives, blocks and threads, unaligned bytes
// chunks.cu       stored bytes -> decoded bytes: checksums, byte shuffle, LZF
// containers.cu   the same for chunks that hold several streams: blosc, and HDF5's lz4 filter
// pieces.cu       decoded bytes -> the resident's arrays
// counts.cu       the resident's counts -> fewer of them
// rows.cu         the resident's rows -> a minibatch
//
// How kernels are organised
// -------------------------
// - A kernel works on items: chunks, pieces or rows. A block takes one item at a time, in a grid-stride loop, so any
//   grid is valid, and any block of up to MAX_THREADS threads. If there are several blocks per item, each item is split
//   into parts, one per block, so that a small minibatch or a few large pieces still fill the device.
// - The code for an item is a sequence of phases. A phase is the work of each thread by itself; PHASE ends with a
//   barrier, EACH_THREAD does not and is for work that no other thread of the block waits for. Code between phases runs
//   identically in all threads. It depends only on arguments, on global memory that the kernel does not write, and on
//   shared memory through `agreed`, which ends with a barrier. So no barrier can be forgotten, or be reached by only
//   some of the threads.
// - No thread keeps a variable across phases: state that must last is in shared memory.
//
// Memory
// ------
// - Elements are aligned to their size, and `out` of gather_payloads to 16 bytes. Byte ranges may start anywhere: they
//   are read in aligned words of up to 16 bytes and shifted into place. So a read of a range, or of an array of
//   elements, may touch the rest of its first and last aligned 16 bytes, never more; no write leaves its range.
// - Rows and runs are written in 16-byte stores except at their ends, whatever their alignment: each thread takes a
//   group of elements that is aligned in the output; incomplete groups at the ends are written element by element.
//
// Errors
// ------
// Nothing is raised here. status[i] is set to the reason why chunk i is bad, unless it is already set.
// A column number outside the matrix is replaced by 0, so that later kernels stay within their rows whether or not the
// host has looked at the status yet.
//
// Block sizes: 256 threads, which is also the maximum that the kernels are compiled for (more would leave 64 registers
// per thread, too few for some); but 32 for decode_lzf, in which all threads follow one stream, so a warp is enough.
// Blocks: one per item, or some 8 per multiprocessor if that is more. If values are not whole numbers, a cell's total,
// and hence the last bit of its transformed values, may depend on the number of threads (never on that of blocks).

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

#define KERNEL(name, parameters) extern "C" __global__ void __launch_bounds__(256) name parameters
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

// Store 16 bytes of an output that the kernel does not read. For sm_80 and sm_90, compilers split `*to = value` into
// four stores, each of which a warp would scatter over four times the addresses.
DEVICE void store_out(void* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w));
}

// Store 16 bytes of zeros that other threads overwrite, after a barrier.
DEVICE void store_zeros(void* to) {
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(__cvta_generic_to_global(to)), "r"(0) : "memory");
}

DEVICE void atomic_min(int32_t* at, int32_t value) { atomicMin(at, value); }
DEVICE void atomic_set_if_zero(int32_t* at, int32_t value) { atomicCAS(at, 0, value); }
DEVICE int32_t count_ones(uint64_t bits) { return __popcll(bits); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
DEVICE double double_of(uint64_t bits) { return __longlong_as_double(int64_t(bits)); }
DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
DEVICE uint64_t bits_of(double value) { return uint64_t(__double_as_longlong(value)); }

// Dot product of the bytes of two words. NVRTC before 12.3 declares __dp4a but does not define it.
DEVICE uint32_t dot_bytes(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(0));
    return sum;
}

// CuPy makes NVRTC flush float32 denormals (below 2**-126) to zero (-ftz=true) in all C++ code. So all arithmetic that
// reads or produces a float32 goes through these functions.
DEVICE double widened(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}

DEVICE double widened(double value) { return value; }

DEVICE float narrowed(double value) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
    return narrow;
}

DEVICE void add_to(float& sum, float value) {
    asm("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(value));
}

// Not `+`, which the compiler would fuse with a product.
DEVICE void add_to(double& sum, double value) { sum = __dadd_rn(sum, value); }

// Bits of the nearest float16, ties to even.
DEVICE uint16_t half_bits(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Constants; reason codes are as in native/inflate.py, native/chunks.py and native/frames.py.

constexpr int32_t BAD_HEADER = -1, BAD_DISTANCE = -4, TRUNCATED = -5, TOO_LONG = -6, TOO_SHORT = -7, BAD_CHECKSUM = -8;
constexpr int32_t BAD_FLETCHER = -102, BAD_COLUMN = -103, BAD_VALUE = -104;
constexpr int32_t BAD_BLOSC = -201, BAD_STREAM = -203, BAD_LZ4 = -205;

constexpr int MAX_THREADS = 1024;

// Type of the resident's values: float; or double in a build for minibatches of float64 (-DWIDE).
#ifdef WIDE
typedef double Value;
DEVICE Value as_value(double value) { return value; }
DEVICE Value as_value(float value) { return widened(value); }
#else
typedef float Value;
DEVICE Value as_value(double value) { return narrowed(value); }
DEVICE Value as_value(float value) { return value; }
#endif

// It represents every integer up to this exactly.
constexpr int64_t MAX_EXACT = int64_t(1) << (sizeof(Value) == 8 ? 53 : 24);

// Columns that densify writes at a time: 32 kB of float32, so that the tiles of 8 blocks on each of 132 multiprocessors
// fit in the 50 MB of a Hopper GPU's L2 cache. Not those of float64: whether fewer columns are faster for them, though
// indices are then compared more often, was not measured.
constexpr int TILE = 8192;

// Columns that it sums at a time, where a row has a column more than once.
constexpr int SUM_TILE = 2048;

// Minimum number of elements that is worth a block of its own in gather_dense.
constexpr int64_t MIN_PART = 4096;

// ---------------------------------------------------------------------------------------------------------------------
// Blocks and threads.

// Number of blocks that share each item.
DEVICE int64_t parts_of_each(int64_t n_items, int64_t most) {
    const int64_t n = n_items > 0 ? N_BLOCKS / n_items : 1;
    return n < 1 || most < 1 ? 1 : n < most ? n : most;
}

// Read a shared variable outside a phase; the barrier lets all threads read it before any continues.
template <class T>
DEVICE T agreed(const T& shared) {
    const T value = shared;
    BARRIER();
    return value;
}

// Sum the values of all threads in a fixed order; partial[t] is thread t's value and is overwritten.
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
// Unaligned bytes. All requested bytes must be within a range that the caller may read.

DEVICE uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Return the word that starts `shift` bits into `low` and continues in `high`; shift < 64.
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

// Read N 4-byte words.
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

// Write N 4-byte words to any address.
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

// Copy a byte range with all threads of the block.
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
