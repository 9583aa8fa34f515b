// The CUDA backend's own kernels: what lies between the stored bytes and a minibatch, but for the codecs of nvCOMP.
//
// NVRTC compiles this file when a loader is opened, and the tests compile it for the host, with their own meaning of
// the primitives below; so it includes nothing and uses no other feature of CUDA. What each kernel must equal is
// written in gpuload/backends/native: chunks.py, frames.py and inflate.py (decoding), rows.py (taking rows).
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

// Bits of the float16 nearest to a value, ties to even.
DEVICE uint16_t half_bits(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Constants, those of the reasons as in native/inflate.py, native/chunks.py and native/frames.py.

constexpr int32_t BAD_DISTANCE = -4, TRUNCATED = -5, TOO_LONG = -6, TOO_SHORT = -7, BAD_CHECKSUM = -8;
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

// ---------------------------------------------------------------------------------------------------------------------
// Stored bytes -> decoded bytes.

// Copy n byte ranges of `stored` to places of `out` that are multiples of 16.
KERNEL(gather_payloads, (const uint8_t* __restrict__ stored, const int64_t* src, const int64_t* nbytes,
                         const int64_t* dest, int64_t n, uint8_t* __restrict__ out)) {
    const int64_t n_parts = parts_of_each(n, 64);
    for (int64_t b = BLOCK; b < n * n_parts; b += N_BLOCKS) {
        const int64_t i = b / n_parts, part = b % n_parts;
        const int64_t size = nbytes[i], n_vectors = size / 16;
        const int64_t first = n_vectors * part / n_parts, last = n_vectors * (part + 1) / n_parts;
        const uint8_t* from = stored + src[i];
        uint8_t* to = out + dest[i];
        EACH_THREAD(t) {
#pragma unroll 4
            for (int64_t k = first + t; k < last; k += N_THREADS) store_aligned(to + 16 * k, load16(from + 16 * k));
            if (part == n_parts - 1) {
                for (int64_t k = 16 * n_vectors + t; k < size; k += N_THREADS) to[k] = from[k];
            }
        }
    }
}

// Compare the adler32 (RFC 1950) of decoded chunks with the 4 bytes, big-endian, at stored[trailer[i]]; none: below 0.
KERNEL(check_adler32, (const uint8_t* __restrict__ decoded, const int64_t* start, const int64_t* nbytes,
                       const uint8_t* __restrict__ stored, const int64_t* trailer, int64_t n, int32_t* status)) {
    constexpr uint64_t BASE = 65521;
    SHARED_ARRAY(uint64_t, partial, MAX_THREADS);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        if (trailer[i] < 0) continue;
        const uint8_t* from = decoded + start[i];
        const int64_t size = nbytes[i], n_vectors = size / 16;
        PHASE(t) {
            // Every byte counts once in the low half, and in the high half as often as there are bytes from it on.
            uint64_t low = 0, high = 0;
            uint32_t turn = 0;
#pragma unroll 4
            for (int64_t k = t; k < n_vectors; k += N_THREADS) {
                const uint4 v = load16(from + 16 * k);
                const uint32_t sum = dot_bytes(v.x, 0x01010101) + dot_bytes(v.y, 0x01010101) +
                                     dot_bytes(v.z, 0x01010101) + dot_bytes(v.w, 0x01010101);
                const uint32_t weighted = dot_bytes(v.x, 0x0D0E0F10) + dot_bytes(v.y, 0x090A0B0C) +
                                          dot_bytes(v.z, 0x05060708) + dot_bytes(v.w, 0x01020304);
                low += sum;
                high += uint64_t(size - 16 * k - 16) * sum + weighted;
                if (!(++turn & 255)) high %= BASE;  // below 2**63 until then for chunks of up to 2**40 bytes
            }
            for (int64_t k = 16 * n_vectors + t; k < size; k += N_THREADS) {
                low += from[k];
                high += uint64_t(size - k) * from[k];
            }
            partial[t] = high % BASE << 32 | low % BASE;
        }
        const uint64_t sums = block_sum(partial);
        EACH_THREAD(t) {
            if (t == 0) {
                const uint64_t a = (1 + (sums & 0xFFFFFFFF)) % BASE, b = (uint64_t(size) + (sums >> 32)) % BASE;
                const uint8_t* last = stored + trailer[i];
                const uint32_t found =
                    uint32_t(last[0]) << 24 | uint32_t(last[1]) << 16 | uint32_t(last[2]) << 8 | uint32_t(last[3]);
                if (found != uint32_t(b << 16 | a)) atomic_set_if_zero(status + i, BAD_CHECKSUM);
            }
        }
    }
}

// Bring a sum to 16 bits as end-around carries do: 0 only if it is 0, else 1 to 65,535.
DEVICE uint64_t folded(uint64_t sum) { return sum ? (sum - 1) % 65535 + 1 : 0; }

// Exchange the bytes of both halves.
DEVICE uint32_t with_halves_swapped(uint32_t word) {
    return (word & 0x00FF00FF) << 8 | (word >> 8 & 0x00FF00FF);
}

// Compare HDF5's fletcher32 of stored bytes with the 4 bytes after them, in either byte order that HDF5 accepts; nbytes
// below 0, of a chunk that has no room for a checksum, is a mismatch.
KERNEL(check_fletcher32, (const uint8_t* __restrict__ stored, const int64_t* start, const int64_t* nbytes, int64_t n,
                          int32_t* status)) {
    SHARED_ARRAY(uint64_t, partial, MAX_THREADS);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        const uint8_t* from = stored + start[i];
        const int64_t size = nbytes[i], n_vectors = size / 16, n_words = (size + 1) / 2;
        PHASE(t) {
            // Words of 16 bits count as bytes do in adler32.
            uint64_t low = 0, high = 0;
            uint32_t turn = 0;
#pragma unroll 4
            for (int64_t k = t; k < n_vectors; k += N_THREADS) {
                const uint4 v = load16(from + 16 * k);
                const uint32_t x = with_halves_swapped(v.x), y = with_halves_swapped(v.y);
                const uint32_t z = with_halves_swapped(v.z), w = with_halves_swapped(v.w);
                const uint32_t even = (x & 0xFFFF) + (y & 0xFFFF) + (z & 0xFFFF) + (w & 0xFFFF);
                const uint32_t odd = (x >> 16) + (y >> 16) + (z >> 16) + (w >> 16);
                const uint32_t pairs = 3 * ((x & 0xFFFF) + (x >> 16)) + 2 * ((y & 0xFFFF) + (y >> 16)) +
                                       (z & 0xFFFF) + (z >> 16);
                low += even + odd;
                high += uint64_t(n_words - 8 * k - 8) * (even + odd) + 2 * pairs + 2 * even + odd;
                if (!(++turn & 255)) high = folded(high);
            }
            for (int64_t k = 16 * n_vectors + t; k < size; k += N_THREADS) {
                const uint64_t part = uint64_t(from[k]) << (k % 2 ? 0 : 8);
                low += part;
                high += uint64_t(n_words - k / 2) * part;
            }
            partial[t] = folded(high) << 32 | folded(low);
        }
        const uint64_t sums = block_sum(partial);
        EACH_THREAD(t) {
            if (t == 0) {
                const uint32_t wanted = uint32_t(folded(sums >> 32) << 16 | folded(sums & 0xFFFFFFFF));
                uint32_t found = 0;
                for (int k = 0; k < 4 && size >= 0; ++k) found |= uint32_t(from[size + k]) << 8 * k;
                if (size < 0 || (found != wanted && found != with_halves_swapped(wanted))) {
                    atomic_set_if_zero(status + i, BAD_FLETCHER);
                }
            }
        }
    }
}

// Transpose 4 x 4 bytes: words[k] holds byte k of elements 0 to 3, then element k.
DEVICE void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    const uint32_t ab02 = (a & 0x00FF00FF) | (b & 0x00FF00FF) << 8, ab13 = (a >> 8 & 0x00FF00FF) | (b & 0xFF00FF00);
    const uint32_t cd02 = (c & 0x00FF00FF) | (d & 0x00FF00FF) << 8, cd13 = (c >> 8 & 0x00FF00FF) | (d & 0xFF00FF00);
    a = (ab02 & 0xFFFF) | cd02 << 16;
    b = (ab13 & 0xFFFF) | cd13 << 16;
    c = ab02 >> 16 | (cd02 & 0xFFFF0000);
    d = ab13 >> 16 | (cd13 & 0xFFFF0000);
}

// Where the bytes of shuffled elements lie: plane p holds byte p of all of them. The planes follow one another, or each
// has an address of its own.
struct Planes {
    const uint8_t* first;
    int64_t nbytes;
    const int64_t* addresses;

    DEVICE const uint8_t* operator[](int64_t p) const {
        return addresses ? reinterpret_cast<const uint8_t*>(addresses[p]) : first + p * nbytes;
    }
};

// Put together elements first to last of a shuffled range, in groups of four; what is no whole group is left over.
template <int ITEMSIZE>
DEVICE void unshuffle_groups(const Planes& planes, uint8_t* __restrict__ to, int64_t first, int64_t last) {
    EACH_THREAD(t) {
        const uint8_t* from[ITEMSIZE];
#pragma unroll
        for (int p = 0; p < ITEMSIZE; ++p) from[p] = planes[p];
#pragma unroll 2
        for (int64_t k = first + 4 * t; k + 4 <= last; k += 4 * N_THREADS) {
            uint32_t words[ITEMSIZE];
#pragma unroll
            for (int p = 0; p < ITEMSIZE; ++p) words[p] = load4(from[p] + k);
            if constexpr (ITEMSIZE == 2) {
                uint32_t none = 0, nothing = 0;
                transpose_bytes(words[0], words[1], none, nothing);
                words[0] = (words[0] & 0xFFFF) | words[1] << 16;
                words[1] = (none & 0xFFFF) | nothing << 16;
            } else if constexpr (ITEMSIZE == 4) {
                transpose_bytes(words[0], words[1], words[2], words[3]);
            } else {
                transpose_bytes(words[0], words[1], words[2], words[3]);
                transpose_bytes(words[4], words[5], words[6], words[7]);
                const uint32_t low1 = words[1], low2 = words[2], low3 = words[3], high0 = words[4], high1 = words[5];
                const uint32_t high2 = words[6];
                words[1] = high0, words[2] = low1, words[3] = high1, words[4] = low2, words[5] = high2, words[6] = low3;
            }
            store_words(to + k * ITEMSIZE, words);
        }
    }
}

// Do one part's share of undoing a byte shuffle; `rest` are the bytes beyond the last whole element, which stay as they
// are.
DEVICE void unshuffle_part(const Planes& planes, const uint8_t* rest, uint8_t* __restrict__ to, int64_t size,
                           int32_t itemsize, int64_t part, int64_t n_parts) {
    const int64_t n_items = size / itemsize, n_groups = n_items / 4;
    const int64_t first = 4 * (n_groups * part / n_parts), last = 4 * (n_groups * (part + 1) / n_parts);
    int64_t done = 4 * n_groups;
    if (itemsize == 2) {
        unshuffle_groups<2>(planes, to, first, last);
    } else if (itemsize == 4) {
        unshuffle_groups<4>(planes, to, first, last);
    } else if (itemsize == 8) {
        unshuffle_groups<8>(planes, to, first, last);
    } else {
        done = 0;
    }
    if (part == n_parts - 1) {
        EACH_THREAD(t) {
            for (int64_t k = done * itemsize + t; k < size; k += N_THREADS) {
                to[k] = k < n_items * itemsize ? planes[k % itemsize][k / itemsize] : rest[k - n_items * itemsize];
            }
        }
    }
}

// Undo HDF5's byte shuffle of n chunks; bytes beyond the last whole element stay where they are.
KERNEL(unshuffle, (const uint8_t* __restrict__ in, uint8_t* __restrict__ out, const int64_t* start,
                   const int64_t* nbytes, int32_t itemsize, int64_t n)) {
    const int64_t n_parts = parts_of_each(n, 64);
    for (int64_t b = BLOCK; b < n * n_parts; b += N_BLOCKS) {
        const int64_t i = b / n_parts, part = b % n_parts, size = nbytes[i], n_items = size / itemsize;
        const uint8_t* from = in + start[i];
        const Planes planes{from, n_items, nullptr};
        unshuffle_part(planes, from + n_items * itemsize, out + start[i], size, itemsize, part, n_parts);
    }
}

// Write bytes first to last of a chunk from the window of the last bytes decoded; `first` is a multiple of 16.
template <int WINDOW>
DEVICE void flush_window(const uint8_t* window, uint8_t* to, int64_t first, int64_t last) {
    PHASE(t) {
        const int64_t whole = address(to) & 15 ? first : last & -16;
        for (int64_t k = first + 16 * t; k < whole; k += 16 * N_THREADS) {
            store_aligned(to + k, load_aligned<uint4>(window + (k & (WINDOW - 1))));
        }
        for (int64_t k = whole + t; k < last; k += N_THREADS) to[k] = window[k & (WINDOW - 1)];
    }
}

// Decode one LZF stream; returns 0 or the reason why it is bad.
//
// A byte c below 32: c + 1 bytes follow as they are. Else a match, of c >> 5 bytes and two more; 7 there: plus the next
// byte; at a distance of 1 + 13 bits, the low 5 of c and the next byte. All threads follow the stream and share the
// copying.
template <int WINDOW>
DEVICE int32_t decode_lzf_stream(const uint8_t* in, int64_t in_nbytes, uint8_t* out, int64_t out_nbytes,
                                 uint8_t* window) {
    constexpr int64_t MASK = WINDOW - 1, FLUSHED = WINDOW / 4;
    int64_t at = 0, made = 0, flushed = 0;
    while (at < in_nbytes) {
        const int32_t code = in[at++];
        if (code < 32) {
            const int32_t length = code + 1;
            if (in_nbytes - at < length) return TRUNCATED;
            if (out_nbytes - made < length) return TOO_LONG;
            PHASE(t) {
                for (int32_t k = t; k < length; k += N_THREADS) window[(made + k) & MASK] = in[at + k];
            }
            at += length;
            made += length;
        } else {
            int32_t length = (code >> 5) + 2;
            if (in_nbytes - at < (length == 9 ? 2 : 1)) return TRUNCATED;
            if (length == 9) length += in[at++];
            const int32_t distance = ((code & 31) << 8 | in[at++]) + 1;
            if (distance > made) return BAD_DISTANCE;
            if (out_nbytes - made < length) return TOO_LONG;
            PHASE(t) {
                for (int32_t k = t; k < length; k += N_THREADS) {
                    const int32_t within = k < distance ? k : k % distance;
                    window[(made + k) & MASK] = window[(made - distance + within) & MASK];
                }
            }
            made += length;
        }
        if (made - flushed >= FLUSHED) {
            flush_window<WINDOW>(window, out, flushed, flushed + FLUSHED);
            flushed += FLUSHED;
        }
    }
    flush_window<WINDOW>(window, out, flushed, made);
    return made == out_nbytes ? 0 : TOO_SHORT;
}

// Decode n chunks of LZF as HDF5's filter 32000 writes it. Any bytes may come; what a bad chunk becomes is undefined.
KERNEL(decode_lzf, (const uint8_t* __restrict__ in, const int64_t* in_start, const int64_t* in_nbytes,
                    uint8_t* __restrict__ out, const int64_t* out_start, const int64_t* out_nbytes, int64_t n,
                    int32_t* status)) {
    // Twice the longest distance: room for the window, a match, and what waits to be written.
    constexpr int WINDOW = 16384;
    SHARED_ARRAY(uint8_t, window, WINDOW);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        const int32_t reason =
            decode_lzf_stream<WINDOW>(in + in_start[i], in_nbytes[i], out + out_start[i], out_nbytes[i], window);
        EACH_THREAD(t) {
            if (t == 0 && reason) atomic_set_if_zero(status + i, reason);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Containers of blosc (c-blosc 1, README_CHUNK_FORMAT.rst): a header of 16 bytes, a table with the place of each block,
// and the blocks. A block is one stream, or n_splits equal ones where it is whole; before each stands its stored size,
// which is the decoded size where the stream is stored as it is. A container may also hold its bytes as they are.

// How all chunks of an array are cut, as a header says: chunks of `nbytes` in blocks of `block_nbytes`.
struct Cut {
    int64_t nbytes, block_nbytes, n_splits;

    DEVICE int64_t n_whole() const { return nbytes / block_nbytes; }
    DEVICE int64_t rest() const { return nbytes % block_nbytes; }
    DEVICE int64_t n_blocks() const { return n_whole() + (rest() ? 1 : 0); }
    DEVICE int64_t n_streams() const { return n_whole() * n_splits + (rest() ? 1 : 0); }

    // Streams of block b, and their decoded bytes.
    DEVICE int64_t streams_in(int64_t b) const { return b < n_whole() ? n_splits : 1; }
    DEVICE int64_t stream_nbytes(int64_t b) const { return b < n_whole() ? block_nbytes / n_splits : rest(); }

    // Each stream has a slot, large enough for what it decodes to and for what snappy, which may make it longer, makes
    // of that, and a multiple of 16; a chunk's slots follow one another.
    DEVICE int64_t slot(int64_t b, int64_t k) const { return (b * n_splits + k) * slots_of(block_nbytes / n_splits); }
    DEVICE int64_t chunk_slots() const { return slot(n_whole(), 0) + slots_of(rest()); }
    DEVICE static int64_t most_stored(int64_t size) { return 32 + size + size / 6; }
    DEVICE static int64_t slots_of(int64_t size) { return size ? (most_stored(size) + 15) / 16 * 16 : 0; }
};

// What is known of each stream: rows of a table with a column for each.
enum Row { SOURCE, STORED, SLOT, IN, IN_NBYTES, OUT, ROOM, WANTED, FROM, TRAILER };

DEVICE int64_t signed4(const uint8_t* from) { return int32_t(load4(from)); }

// Whether a chunk's header says what the array's first one says, but for how large the container is and whether the
// bytes lie in it as they are.
DEVICE bool is_alike(const uint8_t* chunk, const uint8_t* head) {
    const uint32_t words = load4(chunk) ^ load4(head), copied = 0x00020000;
    return !(words & ~copied) && load4(chunk + 4) == load4(head + 4) && load4(chunk + 8) == load4(head + 8);
}

// Find the streams of n containers whose headers all say the same as `head`: a thread follows those of a block.
//
// The table tells, of each stream: the first stored byte and how many are to be moved to which slot of `compressed`;
// what the codec is given (address and size) and where its output goes (address and room, in `decoded`) and how much
// that must be; from where (address) the decoded bytes are to be taken; and where its adler32 is, or -1. A stream that
// is stored as it is, or cannot be found, is not moved: the codec gets the filler in its place, a good stream that
// decodes to one byte, and the bytes are taken from where they are stored. A bad container is named in `status`.
KERNEL(walk_blosc, (const uint8_t* __restrict__ stored, const int64_t* place, const int64_t* stored_nbytes,
                    const uint8_t* head, const uint8_t* filler, int64_t filler_nbytes, int64_t nbytes,
                    int64_t block_nbytes, int64_t n_splits, int32_t is_zlib, int64_t n, const uint8_t* decoded,
                    uint8_t* __restrict__ compressed, int64_t* __restrict__ table, int32_t* __restrict__ is_copied,
                    int32_t* status)) {
    constexpr int64_t HEAD = 16, ZLIB_HEAD = 2, ZLIB_TAIL = 4;
    const Cut cut{nbytes, block_nbytes, n_splits};
    const int64_t n_blocks = cut.n_blocks(), n_columns = n * cut.n_streams();
    for (int64_t group = BLOCK; group * N_THREADS < n * n_blocks; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t item = group * N_THREADS + t, c = item / n_blocks, b = item % n_blocks;
            if (item < n * n_blocks) {
                const uint8_t* chunk = stored + place[c];
                const int64_t n_stored = stored_nbytes[c], room = cut.stream_nbytes(b);
                int64_t at = -1, end = 0;
                bool is_plain = false;
                if (n_stored >= HEAD && is_alike(chunk, head)) {
                    is_plain = chunk[2] & 2;
                    end = signed4(chunk + 12);
                    if (end <= n_stored && is_plain) {
                        at = end == HEAD + nbytes ? HEAD + b * block_nbytes : -1;
                    } else if (end <= n_stored && HEAD + 4 * n_blocks <= end) {
                        at = signed4(chunk + HEAD + 4 * b);
                    }
                }
                if (b == 0) is_copied[c] = is_plain;
                for (int64_t k = 0; k < cut.streams_in(b); ++k) {
                    int64_t size = -1, skipped = 0, trailer = -1;
                    if (is_plain && at >= 0) {
                        size = room;
                    } else if (at >= 0 && at + 4 <= end) {
                        size = signed4(chunk + at);
                        at += 4;
                        if (size <= 0 || size > Cut::most_stored(room) || at + size > end) size = -1;
                        if (is_zlib && size > 0 && size != room) {
                            const int32_t method = chunk[at], flags = chunk[at + 1];
                            const bool is_head = size > ZLIB_HEAD + ZLIB_TAIL && (method & 15) == 8 && method < 0x80 &&
                                                 (256 * method + flags) % 31 == 0 && !(flags & 0x20);
                            if (is_head) {
                                skipped = ZLIB_HEAD, trailer = place[c] + at + size - ZLIB_TAIL;
                            } else {
                                size = -1;
                            }
                        }
                    }
                    const bool is_coded = size > 0 && size != room;
                    const int64_t n_moved = is_coded ? size - (skipped ? ZLIB_HEAD + ZLIB_TAIL : 0) : 0;
                    const int64_t slot = c * cut.chunk_slots() + cut.slot(b, k);
                    int64_t* column = table + c * cut.n_streams() + b * n_splits + k;
                    column[SOURCE * n_columns] = place[c] + (is_coded ? at + skipped : 0);
                    column[STORED * n_columns] = n_moved;
                    column[SLOT * n_columns] = slot;
                    column[IN * n_columns] = int64_t(address(compressed + slot));
                    column[IN_NBYTES * n_columns] = is_coded ? n_moved : filler_nbytes;
                    column[OUT * n_columns] = int64_t(address(decoded + slot));
                    column[ROOM * n_columns] = room;
                    column[WANTED * n_columns] = is_coded ? room : 1;
                    column[FROM * n_columns] = int64_t(address(size == room ? chunk + at : decoded + slot));
                    column[TRAILER * n_columns] = trailer;
                    if (!is_coded) {
                        for (int64_t j = 0; j < filler_nbytes; ++j) compressed[slot + j] = filler[j];
                    }
                    if (size < 0) {
                        atomic_set_if_zero(status + c, BAD_BLOSC);
                        at = -1;
                    } else {
                        at += size;
                    }
                }
            }
        }
    }
}

// Name in `status` the chunks, of n_streams streams each, of which a stream has a code or has not become what it must.
KERNEL(check_streams, (const int32_t* code, const int64_t* produced, const int64_t* wanted, int64_t n_streams,
                       int64_t n, int32_t* status)) {
    for (int64_t group = BLOCK; group * N_THREADS < n * n_streams; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t i = group * N_THREADS + t;
            if (i < n * n_streams && (code[i] || produced[i] != wanted[i])) {
                atomic_set_if_zero(status + i / n_streams, BAD_STREAM);
            }
        }
    }
}

// Put together n containers from their decoded streams, which lie at the addresses `from`; itemsize 1: not shuffled.
KERNEL(join_blosc, (const int64_t* __restrict__ from, const int32_t* is_copied, int64_t nbytes, int64_t block_nbytes,
                    int64_t n_splits, int32_t itemsize, int64_t n, const int64_t* start,
                    uint8_t* __restrict__ out)) {
    const Cut cut{nbytes, block_nbytes, n_splits};
    const int64_t n_blocks = cut.n_blocks(), n_parts = parts_of_each(n * n_blocks, 64);
    for (int64_t part_of = BLOCK; part_of < n * n_blocks * n_parts; part_of += N_BLOCKS) {
        const int64_t part = part_of % n_parts, c = part_of / n_parts / n_blocks, b = part_of / n_parts % n_blocks;
        const int64_t n_streams = cut.streams_in(b), room = cut.stream_nbytes(b), size = n_streams * room;
        const int64_t* each = from + c * cut.n_streams() + b * n_splits;
        const uint8_t* first = reinterpret_cast<const uint8_t*>(each[0]);
        uint8_t* to = out + start[c] + b * block_nbytes;
        if (itemsize > 1 && !is_copied[c]) {
            const int64_t n_items = size / itemsize;
            const Planes planes{first, n_items, n_streams > 1 ? each : nullptr};
            unshuffle_part(planes, first + n_items * itemsize, to, size, itemsize, part, n_parts);
        } else {
            for (int64_t k = part; k < n_streams; k += n_parts) {
                copy_bytes(reinterpret_cast<const uint8_t*>(each[k]), to + k * room, room);
            }
        }
    }
}

// Compare the little-endian word before each of n payloads with the size that it must decode to.
KERNEL(check_sizes, (const uint8_t* __restrict__ stored, const int64_t* at, int64_t nbytes, int64_t n,
                     int32_t* status)) {
    for (int64_t group = BLOCK; group * N_THREADS < n; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t i = group * N_THREADS + t;
            if (i < n && signed4(stored + at[i]) != nbytes) atomic_set_if_zero(status + i, BAD_LZ4);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoded bytes -> the resident's arrays.

enum Kind { SIGNED, UNSIGNED, FLOAT };

// A stored type: its size in bytes, what it is, and whether its first byte is the highest.
template <int NBYTES, Kind KIND, bool IS_BIG>
struct Stored {
    static constexpr int nbytes = NBYTES;
    static constexpr Kind kind = KIND;
    static constexpr bool is_big = IS_BIG;
};

struct Checks {
    bool is_bad = false, is_rounded = false;
};

DEVICE uint32_t with_bytes_reversed(uint32_t word) {
    const uint32_t swapped = with_halves_swapped(word);
    return swapped << 16 | swapped >> 16;
}

// Return an element from its bytes in the order of storage, the first lowest.
template <class S>
DEVICE uint64_t in_native_order(uint64_t bits) {
    if constexpr (!S::is_big || S::nbytes == 1) {
        return bits;
    } else if constexpr (S::nbytes == 2) {
        return with_halves_swapped(uint32_t(bits));
    } else if constexpr (S::nbytes == 4) {
        return with_bytes_reversed(uint32_t(bits));
    } else {
        return uint64_t(with_bytes_reversed(uint32_t(bits))) << 32 | with_bytes_reversed(uint32_t(bits >> 32));
    }
}

// Return element e of words that hold four.
template <class S, int N>
DEVICE uint64_t element(const uint32_t (&words)[N], int e) {
    if constexpr (S::nbytes == 8) {
        return in_native_order<S>(uint64_t(words[2 * e + 1]) << 32 | words[2 * e]);
    } else if constexpr (S::nbytes == 4) {
        return in_native_order<S>(words[e]);
    } else if constexpr (S::nbytes == 2) {
        return in_native_order<S>(words[e / 2] >> 16 * (e % 2) & 0xFFFF);
    } else {
        return words[0] >> 8 * e & 0xFF;
    }
}

// Return the element that starts at any byte.
template <class S>
DEVICE uint64_t element_at(const uint8_t* from) {
    uint64_t bits = 0;
#pragma unroll
    for (int k = 0; k < S::nbytes; ++k) bits |= uint64_t(from[k]) << 8 * k;
    return in_native_order<S>(bits);
}

template <int NBYTES>
DEVICE int64_t sign_extended(uint64_t bits) {
    return int64_t(bits << (64 - 8 * NBYTES)) >> (64 - 8 * NBYTES);
}

DEVICE float value_of_half(uint32_t bits) {
    uint32_t magnitude = bits_of(float_of((bits & 0x7FFF) << 13) * 0x1p112f);
    if ((bits & 0x7C00) == 0x7C00) magnitude |= 0x7F800000;
    return float_of(magnitude | (bits & 0x8000) << 16);
}

DEVICE bool is_finite(float value) { return (bits_of(value) & 0x7F800000) != 0x7F800000; }
DEVICE bool is_finite(double value) {
    return (bits_of(value) & 0x7FF0000000000000) != 0x7FF0000000000000;
}

template <class S>
DEVICE void convert(uint64_t bits, int64_t, float& to, Checks& checks) {
    if constexpr (S::kind == FLOAT) {
        if constexpr (S::nbytes == 2) {
            to = value_of_half(uint32_t(bits));
        } else if constexpr (S::nbytes == 4) {
            to = float_of(uint32_t(bits));
        } else {
            const double value = double_of(bits);
            to = float(value);
            checks.is_bad |= is_finite(value) && !is_finite(to);
        }
    } else if constexpr (S::kind == SIGNED) {
        const int64_t value = sign_extended<S::nbytes>(bits);
        to = S::nbytes < 8 ? float(int32_t(value)) : float(value);
        checks.is_rounded |= S::nbytes >= 4 && (value > MAX_EXACT || value < -MAX_EXACT);
    } else {
        to = S::nbytes < 8 ? float(uint32_t(bits)) : float(bits);
        checks.is_rounded |= S::nbytes >= 4 && bits > uint64_t(MAX_EXACT);
    }
}

template <class S>
DEVICE void convert(uint64_t bits, int64_t limit, int32_t& to, Checks& checks) {
    int64_t column = int64_t(bits);
    if constexpr (S::kind == FLOAT) {
        double value;
        if constexpr (S::nbytes == 2) {
            value = value_of_half(uint32_t(bits));
        } else if constexpr (S::nbytes == 4) {
            value = float_of(uint32_t(bits));
        } else {
            value = double_of(bits);
        }
        column = value > -1.0 && value < 9e18 ? int64_t(value) : -1;
    } else if constexpr (S::kind == SIGNED) {
        column = sign_extended<S::nbytes>(bits);
    }
    const bool is_bad = uint64_t(column) >= uint64_t(limit);
    to = is_bad ? 0 : int32_t(column);
    checks.is_bad |= is_bad;
}

DEVICE void convert_fill(double value, int64_t, float& to, Checks&) { to = float(value); }

DEVICE void convert_fill(double value, int64_t limit, int32_t& to, Checks& checks) {
    checks.is_bad = !(value >= 0 && value < double(limit));
    to = checks.is_bad ? 0 : int32_t(value);
}

DEVICE uint32_t word_of(float value) { return bits_of(value); }
DEVICE uint32_t word_of(int32_t value) { return uint32_t(value); }
DEVICE int32_t reason_of(float) { return BAD_VALUE; }
DEVICE int32_t reason_of(int32_t) { return BAD_COLUMN; }

// Do one thread's share, the lane-th of n_lanes, of copying n elements.
template <class S, class Out>
DEVICE void copy_run(const uint8_t* __restrict__ from, Out* __restrict__ to, int64_t n, int64_t limit, int lane,
                     int n_lanes, Checks& checks) {
    const int64_t gap = int64_t(-(address(to) / 4) & 3), head = gap < n ? gap : n, n_groups = (n - head) / 4;
#pragma unroll(S::nbytes < 8 ? 2 : 1)
    for (int64_t k = lane; k < n_groups; k += n_lanes) {
        const int64_t at = head + 4 * k;
        uint32_t words[S::nbytes];
        load_words(from + at * S::nbytes, words);
        Out values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) convert<S>(element<S>(words, e), limit, values[e], checks);
        store_aligned(to + at, uint4{word_of(values[0]), word_of(values[1]), word_of(values[2]), word_of(values[3])});
    }
#pragma unroll 1
    for (int64_t k = lane; k < n - 4 * n_groups; k += n_lanes) {
        const int64_t at = k < head ? k : 4 * n_groups + k;
        convert<S>(element_at<S>(from + at * S::nbytes), limit, to[at], checks);
    }
}

// Copy pieces of decoded chunks, or their fill value, into a resident's array of float or int32_t.
//
// A run that is alone in its piece is shared by all threads, and by the blocks that share the piece; of several runs,
// each is copied by 32 threads.
template <class S, class Out>
DEVICE void copy_pieces(const uint8_t* __restrict__ decoded, const int64_t* piece_base, const int64_t* piece_src,
                        const int64_t* piece_dest, const int64_t* piece_width, const int64_t* piece_rows,
                        const int32_t* piece_chunk, int64_t src_stride, int64_t dest_stride, int64_t limit,
                        double fill_value, int64_t n_pieces, Out* __restrict__ out, int32_t* status,
                        int32_t* is_rounded) {
    const int64_t n_parts = parts_of_each(n_pieces, 64);
    for (int64_t b = BLOCK; b < n_pieces * n_parts; b += N_BLOCKS) {
        const int64_t p = b / n_parts, part = b % n_parts, rows = piece_rows[p], width = piece_width[p];
        const bool is_one_run = rows == 1;
        const int64_t n = is_one_run ? width : rows, first = n * part / n_parts, last = n * (part + 1) / n_parts;
        const int n_lanes = is_one_run || N_THREADS % 32 ? N_THREADS : 32;
        EACH_THREAD(t) {
            const int lane = t % n_lanes;
            Checks checks;
            Out fill = 0;
            if (piece_base[p] < 0) convert_fill(fill_value, limit, fill, checks);
            for (int64_t r = is_one_run ? 0 : first + t / n_lanes; r < (is_one_run ? 1 : last);
                 r += N_THREADS / n_lanes) {
                const int64_t skipped = is_one_run ? first : 0, length = is_one_run ? last - first : width;
                Out* to = out + piece_dest[p] + r * dest_stride + skipped;
                if (piece_base[p] < 0) {
                    for (int64_t k = lane; k < length; k += n_lanes) to[k] = fill;
                } else {
                    const int64_t at = piece_src[p] + r * src_stride + skipped;
                    copy_run<S>(decoded + piece_base[p] + at * S::nbytes, to, length, limit, lane, n_lanes, checks);
                }
            }
            if (checks.is_bad) atomic_set_if_zero(status + piece_chunk[p], reason_of(Out()));
            if (checks.is_rounded) atomic_set_if_zero(is_rounded, 1);
        }
    }
}

// copy_pieces_<src>_<out>: piece p is piece_rows[p] runs of piece_width[p] elements. The first goes from piece_src[p]
// elements after byte piece_base[p] of `decoded` (below 0: it is the fill value) to out[piece_dest[p]], each further
// one from and to src_stride and dest_stride elements on. Column numbers (out i4) must be below `limit`.
#define COPY_PIECES(src, out_name, stored_type, out_type)                                                              \
    KERNEL(copy_pieces_##src##_##out_name,                                                                             \
           (const uint8_t* decoded, const int64_t* piece_base, const int64_t* piece_src, const int64_t* piece_dest,    \
            const int64_t* piece_width, const int64_t* piece_rows, const int32_t* piece_chunk, int64_t src_stride,     \
            int64_t dest_stride, int64_t limit, double fill_value, int64_t n_pieces, out_type* out, int32_t* status,   \
            int32_t* is_rounded)) {                                                                                    \
        copy_pieces<stored_type, out_type>(decoded, piece_base, piece_src, piece_dest, piece_width, piece_rows,        \
                                           piece_chunk, src_stride, dest_stride, limit, fill_value, n_pieces, out,     \
                                           status, is_rounded);                                                        \
    }
#define COPY_PIECES_OF(src, nbytes, kind, is_big)                                                                      \
    typedef Stored<nbytes, kind, is_big> stored_##src;                                                                 \
    COPY_PIECES(src, f4, stored_##src, float)                                                                          \
    COPY_PIECES(src, i4, stored_##src, int32_t)
#define COPY_PIECES_OF_BOTH(src, nbytes, kind)                                                                         \
    COPY_PIECES_OF(src, nbytes, kind, false)                                                                           \
    COPY_PIECES_OF(be_##src, nbytes, kind, true)

COPY_PIECES_OF(bool, 1, UNSIGNED, false)
COPY_PIECES_OF(i1, 1, SIGNED, false)
COPY_PIECES_OF(u1, 1, UNSIGNED, false)
COPY_PIECES_OF_BOTH(i2, 2, SIGNED)
COPY_PIECES_OF_BOTH(u2, 2, UNSIGNED)
COPY_PIECES_OF_BOTH(i4, 4, SIGNED)
COPY_PIECES_OF_BOTH(u4, 4, UNSIGNED)
COPY_PIECES_OF_BOTH(i8, 8, SIGNED)
COPY_PIECES_OF_BOTH(u8, 8, UNSIGNED)
COPY_PIECES_OF_BOTH(f2, 2, FLOAT)
COPY_PIECES_OF_BOTH(f4, 4, FLOAT)
COPY_PIECES_OF_BOTH(f8, 8, FLOAT)

// ---------------------------------------------------------------------------------------------------------------------
// The resident's rows -> a minibatch.

// What a minibatch is made of. `narrow` rounds to nearest, ties to even, and tells when it makes a number infinite.

struct Single {
    typedef float Element;
    static DEVICE float narrow(float value, bool&) { return value; }
    static DEVICE uint32_t word(const float* values, int k, bool&) { return bits_of(values[k]); }
};

struct Half {
    typedef uint16_t Element;
    static DEVICE uint16_t narrow(float value, bool& is_bad) {
        const uint16_t bits = half_bits(value);
        is_bad |= (bits & 0x7FFF) == 0x7C00 && is_finite(value);
        return bits;
    }
    static DEVICE uint32_t word(const float* values, int k, bool& is_bad) {
        return uint32_t(narrow(values[2 * k + 1], is_bad)) << 16 | narrow(values[2 * k], is_bad);
    }
};

struct Brain {
    typedef uint16_t Element;
    static DEVICE uint16_t narrow(float value, bool& is_bad) {
        const uint32_t wide = bits_of(value), magnitude = wide & 0x7FFFFFFF;
        if (magnitude > 0x7F800000) return uint16_t(wide >> 16 | 0x40);  // not a number
        const uint32_t bits = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
        is_bad |= (bits & 0x7FFF) == 0x7F80 && magnitude < 0x7F800000;
        return uint16_t(bits);
    }
    static DEVICE uint32_t word(const float* values, int k, bool& is_bad) {
        return uint32_t(narrow(values[2 * k + 1], is_bad)) << 16 | narrow(values[2 * k], is_bad);
    }
};

// Elements of a store of 16 bytes.
template <class Form>
constexpr int PER_STORE = 16 / int(sizeof(typename Form::Element));

// Return how many elements after a multiple of 16 bytes a pointer stands.
template <class Form>
DEVICE int skew_of(const typename Form::Element* to) {
    return int(address(to) / sizeof(*to) % PER_STORE<Form>);
}

// Store PER_STORE values at a multiple of 16 bytes.
template <class Form>
DEVICE void store_group(typename Form::Element* to, const float* values, bool& is_bad) {
    store_aligned(to, uint4{Form::word(values, 0, is_bad), Form::word(values, 1, is_bad), Form::word(values, 2, is_bad),
                            Form::word(values, 3, is_bad)});
}

// Read PER_STORE values at any multiple of 4 bytes.
template <class Form>
DEVICE void load_group(const float* from, float (&values)[PER_STORE<Form>]) {
#pragma unroll
    for (int k = 0; k < PER_STORE<Form>; k += 4) {
        const uint4 four = load16(reinterpret_cast<const uint8_t*>(from + k));
        values[k] = float_of(four.x), values[k + 1] = float_of(four.y);
        values[k + 2] = float_of(four.z), values[k + 3] = float_of(four.w);
    }
}

// Return what scales values to add up to `target_sum`; 1 where that is 0 or they add up to 0. partial: see block_sum.
DEVICE double row_scale(const float* data, int64_t n, double target_sum, double* partial) {
    if (target_sum == 0.0) return 1.0;
    PHASE(t) {
        double sum = 0.0;
#pragma unroll 4
        for (int64_t k = t; k < n; k += N_THREADS) sum += double(data[k]);
        partial[t] = sum;
    }
    const double total = block_sum(partial);
    return total != 0.0 ? target_sum / total : 1.0;
}

// The arithmetic on a cell's values.
struct Arithmetic {
    double scale;
    bool is_any, is_log1p;

    DEVICE Arithmetic(double scale_, double target_sum, int32_t log1p_)
        : scale(scale_), is_any(log1p_ || target_sum != 0.0), is_log1p(log1p_) {}

    DEVICE float of(float value) const {
        if (!is_any) return value;
        const double scaled = double(value) * scale;
        if (scaled == 0.0) return float(scaled);
        return is_log1p ? float(log1p(scaled)) : float(scaled);
    }
};

// Return the map of a resident row's columns: that of its file, which begins at map_start[row], or the only one, or none.
DEVICE const int32_t* map_of(int32_t row, const int64_t* map_start, const int32_t* columns) {
    return columns && map_start ? columns + map_start[row] : columns;
}

// Return where a stored column goes, or below 0.
DEVICE int64_t place_of(const int32_t* columns, int32_t column) { return columns ? columns[column] : column; }

// Write CSR rows into a dense array, zeros included.
//
// A row is made in shared memory, a tile of columns after the other, and each tile is stored once. Where the columns of
// a row rise, none repeated, its values are put into the tile in any order (`columns` sends no two to one place); else
// each place belongs to one thread, which adds up what is stored for it in the order of storage.
template <class Form>
DEVICE void densify_csr(const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                        const int32_t* __restrict__ indices, const float* __restrict__ data,
                        const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, double target_sum,
                        int32_t log1p_, int64_t n_rows, int64_t n_cols, typename Form::Element* __restrict__ out,
                        int32_t* bad) {
    constexpr int PER = PER_STORE<Form>;
    SHARED_ARRAY(float, tile, TILE + PER);
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, is_rising, 1);
    const int64_t n_tiles = (n_cols + TILE - 1) / TILE, n_parts = parts_of_each(n_rows, n_tiles);
    PHASE(t) {
        for (int k = t; k < TILE + PER; k += N_THREADS) tile[k] = 0.0f;
        if (t == 0) is_rising[0] = 1;
    }
    for (int64_t b = BLOCK; b < n_rows * n_parts; b += N_BLOCKS) {
        const int64_t row = b / n_parts, part = b % n_parts;
        const int64_t start = indptr[positions[row]], stop = indptr[positions[row] + 1];
        const int32_t* chosen = map_of(positions[row], map_start, columns);
        PHASE(t) {
            for (int64_t k = start + 1 + t; k < stop; k += N_THREADS) {
                if (indices[k] <= indices[k - 1]) atomic_min(is_rising, 0);
            }
        }
        const bool is_apart = agreed(is_rising[0]);
        const Arithmetic arithmetic(row_scale(data + start, stop - start, target_sum, partial), target_sum, log1p_);
        PHASE(t) {
            if (t == 0) is_rising[0] = 1;
        }
        for (int64_t k = n_tiles * part / n_parts; k < n_tiles * (part + 1) / n_parts; ++k) {
            const int64_t lo = k * TILE, width = n_cols - lo < TILE ? n_cols - lo : TILE;
            typename Form::Element* to = out + row * n_cols + lo;
            const int skew = skew_of<Form>(to);  // so that groups are aligned both in the tile and in `out`
            PHASE(t) {
                if (is_apart) {
                    for (int64_t j = start + t; j < stop; j += N_THREADS) {
                        const int64_t place = place_of(chosen, indices[j]) - lo;
                        if (uint64_t(place) < uint64_t(width)) tile[skew + place] += arithmetic.of(data[j]);
                    }
                } else {
                    for (int64_t j = start; j < stop; ++j) {
                        const int64_t place = place_of(chosen, indices[j]) - lo;
                        if (uint64_t(place) < uint64_t(width) && int(place) % N_THREADS == t) {
                            tile[skew + place] += arithmetic.of(data[j]);
                        }
                    }
                }
            }
            PHASE(t) {
                bool is_bad = false;
                for (int64_t g = PER * t; g < skew + width; g += PER * N_THREADS) {
                    float values[PER];
#pragma unroll
                    for (int e = 0; e < PER; e += 4) {
                        const uint4 four = load_aligned<uint4>(tile + g + e);
                        store_aligned(tile + g + e, uint4{0, 0, 0, 0});
                        values[e] = float_of(four.x), values[e + 1] = float_of(four.y);
                        values[e + 2] = float_of(four.z), values[e + 3] = float_of(four.w);
                    }
                    if (g >= skew && g + PER <= skew + width) {
                        store_group<Form>(to - skew + g, values, is_bad);
                    } else {
#pragma unroll
                        for (int e = 0; e < PER; ++e) {
                            const int64_t place = g + e - skew;
                            if (place >= 0 && place < width) to[place] = Form::narrow(values[e], is_bad);
                        }
                    }
                }
                if (is_bad) atomic_min(bad, int32_t(row));
            }
        }
    }
}

#define DENSIFY_CSR(name, form)                                                                                        \
    KERNEL(densify_csr_##name,                                                                                         \
           (const int32_t* positions, const int64_t* indptr, const int32_t* indices, const float* data,                \
            const int64_t* map_start, const int32_t* columns, double target_sum, int32_t log1p, int64_t n_rows,        \
            int64_t n_cols, form::Element* out, int32_t* bad)) {                                                       \
        densify_csr<form>(positions, indptr, indices, data, map_start, columns, target_sum, log1p, n_rows, n_cols,     \
                          out, bad);                                                                                   \
    }

DENSIFY_CSR(f4, Single)
DENSIFY_CSR(f2, Half)
DENSIFY_CSR(bf2, Brain)

// Write dense rows into a dense array. Rows are n_vars wide, or begin where indptr says and are at most so wide; columns
// that a row has nothing for are left as they are.
template <class Form>
DEVICE void gather_dense(const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                         const float* __restrict__ X, const int64_t* __restrict__ map_start,
                         const int32_t* __restrict__ columns, double target_sum, int32_t log1p_, int64_t n_rows,
                         int64_t n_vars, int64_t n_cols, typename Form::Element* __restrict__ out, int32_t* bad) {
    constexpr int PER = PER_STORE<Form>;
    SHARED_ARRAY(double, partial, MAX_THREADS);
    const int64_t n_parts = parts_of_each(n_rows, (n_vars + MIN_PART - 1) / MIN_PART);
    for (int64_t b = BLOCK; b < n_rows * n_parts; b += N_BLOCKS) {
        const int64_t row = b / n_parts, part = b % n_parts;
        const int64_t start = indptr ? indptr[positions[row]] : positions[row] * n_vars;
        const int64_t n_stored = indptr ? indptr[positions[row] + 1] - start : n_vars;
        const int64_t first = n_stored * part / n_parts, width = n_stored * (part + 1) / n_parts - first;
        const float* stored = X + start;
        const float* from = stored + first;
        const int32_t* chosen = map_of(positions[row], map_start, columns);
        const Arithmetic arithmetic(row_scale(stored, n_stored, target_sum, partial), target_sum, log1p_);
        EACH_THREAD(t) {
            bool is_bad = false;
            if (chosen) {
                for (int64_t k = t; k < width; k += N_THREADS) {
                    const int32_t place = chosen[first + k];
                    if (place >= 0) out[row * n_cols + place] = Form::narrow(arithmetic.of(from[k]), is_bad);
                }
            } else {
                typename Form::Element* to = out + row * n_cols + first;
                const int skew = skew_of<Form>(to);
                for (int64_t k = PER * t - skew; k < width; k += PER * N_THREADS) {
                    if (k >= 0 && k + PER <= width) {
                        float values[PER];
                        load_group<Form>(from + k, values);
#pragma unroll
                        for (int e = 0; e < PER; ++e) values[e] = arithmetic.of(values[e]);
                        store_group<Form>(to + k, values, is_bad);
                    } else {
                        for (int64_t e = k < 0 ? 0 : k; e < (k + PER < width ? k + PER : width); ++e) {
                            to[e] = Form::narrow(arithmetic.of(from[e]), is_bad);
                        }
                    }
                }
            }
            if (is_bad) atomic_min(bad, int32_t(row));
        }
    }
}

#define GATHER_DENSE(name, form)                                                                                       \
    KERNEL(gather_dense_##name,                                                                                        \
           (const int32_t* positions, const int64_t* indptr, const float* X, const int64_t* map_start,                 \
            const int32_t* columns, double target_sum, int32_t log1p, int64_t n_rows, int64_t n_vars, int64_t n_cols,  \
            form::Element* out, int32_t* bad)) {                                                                       \
        gather_dense<form>(positions, indptr, X, map_start, columns, target_sum, log1p, n_rows, n_vars, n_cols, out,   \
                           bad);                                                                                       \
    }

GATHER_DENSE(f4, Single)
GATHER_DENSE(f2, Half)
GATHER_DENSE(bf2, Brain)

// Count the values of each row that `columns` keeps; -1 less the count where their new column numbers do not rise.
KERNEL(count_csr, (const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                   const int32_t* __restrict__ indices, const int64_t* __restrict__ map_start,
                   const int32_t* __restrict__ columns, int64_t n_rows, int64_t* out)) {
    SHARED_ARRAY(int64_t, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, first, MAX_THREADS);
    SHARED_ARRAY(int32_t, last, MAX_THREADS);
    SHARED_ARRAY(int32_t, falls, MAX_THREADS);
    if (!columns) {
        EACH_THREAD(t) {
            for (int64_t row = BLOCK * N_THREADS + t; row < n_rows; row += N_BLOCKS * N_THREADS) {
                out[row] = indptr[positions[row] + 1] - indptr[positions[row]];
            }
        }
        return;
    }
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr[positions[row]], n_stored = indptr[positions[row] + 1] - start;
        const int32_t* chosen = map_of(positions[row], map_start, columns);
        // Each thread takes a run of values, and then the first one compares the ends of neighbouring runs.
        PHASE(t) {
            int64_t n = 0;
            int32_t lowest = -1, highest = -1, is_falling = 0;
            for (int64_t k = n_stored * t / N_THREADS; k < n_stored * (t + 1) / N_THREADS; ++k) {
                const int32_t column = chosen[indices[start + k]];
                if (column >= 0) {
                    is_falling |= column <= highest;
                    if (!n++) lowest = column;
                    highest = column;
                }
            }
            partial[t] = n, first[t] = lowest, last[t] = highest, falls[t] = is_falling;
        }
        PHASE(t) {
            if (t == 0) {
                int32_t highest = -1, is_falling = 0;
                for (int k = 0; k < N_THREADS; ++k) {
                    if (first[k] < 0) continue;
                    is_falling |= falls[k] | int32_t(first[k] <= highest);
                    highest = last[k];
                }
                falls[0] = is_falling;
            }
        }
        const int64_t n = block_sum(partial);
        EACH_THREAD(t) {
            if (t == 0) out[row] = falls[0] ? -1 - n : n;
        }
    }
}

// Write CSR rows one after the other, row r from out_indptr[r] on; values keep the order of storage.
KERNEL(gather_csr, (const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                    const int32_t* __restrict__ indices, const float* __restrict__ data,
                    const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, double target_sum,
                    int32_t log1p_, int64_t n_rows, const int64_t* __restrict__ out_indptr,
                    int32_t* __restrict__ out_indices, float* __restrict__ out_data)) {
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int64_t, kept, 2 * MAX_THREADS);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr[positions[row]], n = indptr[positions[row] + 1] - start, to = out_indptr[row];
        const Arithmetic arithmetic(row_scale(data + start, n, target_sum, partial), target_sum, log1p_);
        if (!columns) {
            EACH_THREAD(t) {
                for (int64_t k = t; k < n; k += N_THREADS) {
                    out_indices[to + k] = indices[start + k];
                    out_data[to + k] = arithmetic.of(data[start + k]);
                }
            }
            continue;
        }
        const int32_t* chosen = map_of(positions[row], map_start, columns);
        // Each thread takes a run of values; how many the threads before it keep is where its own go.
        PHASE(t) {
            int64_t count = 0;
            for (int64_t k = n * t / N_THREADS; k < n * (t + 1) / N_THREADS; ++k) {
                count += chosen[indices[start + k]] >= 0;
            }
            kept[t] = count;
        }
        int from = 0;
        for (int step = 1; step < N_THREADS; step *= 2) {
            PHASE(t) {
                kept[(MAX_THREADS - from) + t] = kept[from + t] + (t >= step ? kept[from + t - step] : 0);
            }
            from = MAX_THREADS - from;
        }
        PHASE(t) {
            int64_t place = to + (t ? kept[from + t - 1] : 0);
            for (int64_t k = start + n * t / N_THREADS; k < start + n * (t + 1) / N_THREADS; ++k) {
                const int32_t column = chosen[indices[k]];
                if (column >= 0) {
                    out_indices[place] = column;
                    out_data[place++] = arithmetic.of(data[k]);
                }
            }
        }
    }
}
