// Stored bytes -> decoded bytes.

// Copy n byte ranges of `stored` to offsets of `out` that are multiples of 16.
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

// Compare the adler32 (RFC 1950) of decoded chunks with the 4 bytes, big-endian, at stored[trailer[i]]; negative: none.
KERNEL(check_adler32, (const uint8_t* __restrict__ decoded, const int64_t* start, const int64_t* nbytes,
                       const uint8_t* __restrict__ stored, const int64_t* trailer, int64_t n, int32_t* status)) {
    constexpr uint64_t BASE = 65521;
    SHARED_ARRAY(uint64_t, partial, MAX_THREADS);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        if (trailer[i] < 0) continue;
        const uint8_t* from = decoded + start[i];
        const int64_t size = nbytes[i], n_vectors = size / 16;
        PHASE(t) {
            // Each byte counts once in the low half, and in the high half once for each byte from it to the end.
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
                if (!(++turn & 255)) high %= BASE;  // stays below 2**63 until then for chunks of up to 2**40 bytes
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
                const uint32_t found = uint32_t(big4(stored + trailer[i]));
                if (found != uint32_t(b << 16 | a)) atomic_set_if_zero(status + i, BAD_CHECKSUM);
            }
        }
    }
}

// Remainder of a polynomial over GF(2) modulo one of degree 32, the divisor, both in the bit order of reflected CRCs:
// bit 31 - k is the coefficient of x**k, and the divisor's x**32 is implicit. Addition is exclusive or.
struct Remainder {
    uint32_t bits;

    DEVICE Remainder& operator+=(Remainder other) {
        bits ^= other.bits;
        return *this;
    }

    DEVICE Remainder times_x(uint32_t divisor) const { return {bits >> 1 ^ (divisor & (0u - (bits & 1)))}; }

    DEVICE Remainder times(Remainder other, uint32_t divisor) const {
        Remainder product{0}, power = *this;
        for (int k = 31; k >= 0; --k) {
            product.bits ^= power.bits & (0u - (other.bits >> k & 1));
            power = power.times_x(divisor);
        }
        return product;
    }

    // Append 4 bytes, the first one lowest: each multiplies by x**8. table[b] is x**8 times the remainder of bits b.
    DEVICE void take(uint32_t word, const uint32_t* table) {
        bits ^= word;
#pragma unroll
        for (int k = 0; k < 4; ++k) bits = bits >> 8 ^ table[bits & 255];
    }
};

// Compare the 32-bit CRC of n byte ranges with the 4 bytes, little-endian, at stored[trailer[i]]; negative: none. The
// reflected polynomial selects the CRC: 0xEDB88320 is gzip's (RFC 1952, 8), 0x82F63B78 CRC-32C (RFC 3720, B.4).
// `reason` is the status code of a mismatch.
//
// Each thread processes a contiguous segment with a byte-wise table (Sarwate, "Computation of cyclic redundancy checks
// via table look-up", Commun. ACM 1988, doi:10.1145/63030.63037). Remainders are linear: a range's is the sum of its
// segments', each times x**(8 * bytes after it), a product of repeated squares of x**8 (as in zlib's crc32_combine).
KERNEL(check_crc, (const uint8_t* __restrict__ bytes, const int64_t* start, const int64_t* nbytes,
                   const uint8_t* __restrict__ stored, const int64_t* trailer, int64_t polynomial, int32_t reason,
                   int64_t n, int32_t* status)) {
    const uint32_t divisor = uint32_t(polynomial);
    SHARED_ARRAY(uint32_t, table, 256);
    SHARED_ARRAY(Remainder, squares, 64);
    SHARED_ARRAY(Remainder, partial, MAX_THREADS);
    PHASE(t) {
        for (int k = t; k < 256; k += N_THREADS) {
            Remainder byte{uint32_t(k)};
            for (int bit = 0; bit < 8; ++bit) byte = byte.times_x(divisor);
            table[k] = byte.bits;
        }
    }
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        if (trailer[i] < 0) continue;
        const uint8_t* from = bytes + start[i];
        const int64_t size = nbytes[i], n_vectors = size / 16;
        PHASE(t) {
            if (t == 0) {
                Remainder square{1u << 23};
                for (int k = 0; size >> k; ++k) {  // squares[k] is x**(8 * 2**k)
                    squares[k] = square;
                    square = square.times(square, divisor);
                }
            }
        }
        PHASE(t) {
            const int64_t first = n_vectors * t / N_THREADS, last = n_vectors * (t + 1) / N_THREADS;
            Remainder sum{t == 0 ? 0xFFFFFFFF : 0};  // the first 32 bits of a range enter inverted
            for (int64_t k = first; k < last; ++k) {
                const uint4 v = load16(from + 16 * k);
                sum.take(v.x, table);
                sum.take(v.y, table);
                sum.take(v.z, table);
                sum.take(v.w, table);
            }
            int64_t after = size - 16 * last;
            if (t == N_THREADS - 1) {
                for (; after; --after) sum.bits = sum.bits >> 8 ^ table[(sum.bits ^ from[size - after]) & 255];
            }
            for (int k = 0; after >> k; ++k) {
                if (after >> k & 1) sum = sum.times(squares[k], divisor);
            }
            partial[t] = sum;
        }
        const uint32_t wanted = ~block_sum(partial).bits;
        EACH_THREAD(t) {
            if (t == 0 && load4(stored + trailer[i]) != wanted) atomic_set_if_zero(status + i, reason);
        }
    }
}

// Reduce a sum to 16 bits with end-around carry: 0 only if it is 0, else 1 to 65,535.
DEVICE uint64_t folded(uint64_t sum) { return sum ? (sum - 1) % 65535 + 1 : 0; }

// Swap the bytes of both halves.
DEVICE uint32_t with_halves_swapped(uint32_t word) {
    return (word & 0x00FF00FF) << 8 | (word >> 8 & 0x00FF00FF);
}

// Compare HDF5's fletcher32 of stored bytes with the 4 bytes after them, in either byte order that HDF5 accepts. A
// negative nbytes (a chunk too short for a checksum) is a mismatch.
KERNEL(check_fletcher32, (const uint8_t* __restrict__ stored, const int64_t* start, const int64_t* nbytes, int64_t n,
                          int32_t* status)) {
    SHARED_ARRAY(uint64_t, partial, MAX_THREADS);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        const uint8_t* from = stored + start[i];
        const int64_t size = nbytes[i], n_vectors = size / 16, n_words = (size + 1) / 2;
        PHASE(t) {
            // 16-bit words are summed as bytes are in adler32.
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
                const uint32_t found = size < 0 ? 0 : load4(from + size);
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

// The byte planes of shuffled elements: plane p holds byte p of every element. The planes are contiguous, or each has
// its own address.
struct Planes {
    const uint8_t* first;
    int64_t nbytes;
    const int64_t* addresses;

    DEVICE const uint8_t* operator[](int64_t p) const {
        return addresses ? reinterpret_cast<const uint8_t*>(addresses[p]) : first + p * nbytes;
    }
};

// Unshuffle elements first to last of a range in groups of four; the caller handles the remainder.
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

// Undo one part's share of a byte shuffle; `rest` points to the bytes after the last whole element, which are copied
// unchanged.
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

// Undo HDF5's byte shuffle of n chunks; bytes after the last whole element keep their place.
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

// Write bytes first to last of a chunk from the sliding window; `first` is a multiple of 16.
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

// Decode one LZF stream; return 0 or the reason why it is bad.
//
// A control byte c below 32 is followed by c + 1 literal bytes. Otherwise it starts a match of (c >> 5) + 2 bytes, or,
// if c >> 5 is 7, of that plus the next byte, at a distance of 1 + 13 bits: the low 5 of c and the next byte. All
// threads follow the stream and share the copying.
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

// Decode n chunks of LZF as written by HDF5's filter 32000. Input is untrusted; the output of a bad chunk is undefined.
KERNEL(decode_lzf, (const uint8_t* __restrict__ in, const int64_t* in_start, const int64_t* in_nbytes,
                    uint8_t* __restrict__ out, const int64_t* out_start, const int64_t* out_nbytes, int64_t n,
                    int32_t* status)) {
    // Twice the longest distance: room for the window, a match, and bytes not written yet.
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

// Compare the little-endian word before each of n payloads with its required decoded size.
KERNEL(check_sizes, (const uint8_t* __restrict__ stored, const int64_t* at, int64_t nbytes, int64_t n,
                     int32_t* status)) {
    for (int64_t group = BLOCK; group * N_THREADS < n; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t i = group * N_THREADS + t;
            if (i < n && signed4(stored + at[i]) != nbytes) atomic_set_if_zero(status + i, BAD_LZ4);
        }
    }
}

// Whether two bytes are a zlib header (RFC 1950, 2.2): deflate, a window of at most 32 KiB, and no dictionary.
DEVICE bool is_zlib_header(int32_t method, int32_t flags) {
    return (method & 15) == 8 && method < 0x80 && (256 * method + flags) % 31 == 0 && !(flags & 0x20);
}

// Check the headers of n zlib streams.
KERNEL(check_zlib, (const uint8_t* __restrict__ stored, const int64_t* at, int64_t n, int32_t* status)) {
    for (int64_t group = BLOCK; group * N_THREADS < n; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t i = group * N_THREADS + t;
            if (i < n && !is_zlib_header(stored[at[i]], stored[at[i] + 1])) atomic_set_if_zero(status + i, BAD_HEADER);
        }
    }
}

// Check the headers of n gzip members (RFC 1952, 2.3): deflate, and no flags, which would make them longer than 10
// bytes; and, after the CRC at stored[trailer[i]] unless that is negative, the decoded size.
KERNEL(check_gzip, (const uint8_t* __restrict__ stored, const int64_t* at, const int64_t* trailer, int64_t nbytes,
                    int64_t n, int32_t* status)) {
    for (int64_t group = BLOCK; group * N_THREADS < n; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t i = group * N_THREADS + t;
            if (i < n) {
                const bool is_head = load4(stored + at[i]) == 0x00088B1F;
                const bool is_size = trailer[i] < 0 || load4(stored + trailer[i] + 4) == uint32_t(nbytes);
                if (!is_head || !is_size) atomic_set_if_zero(status + i, is_head ? BAD_CHECKSUM : BAD_HEADER);
            }
        }
    }
}

DEVICE uint64_t rotated(uint64_t word, int n) { return word << n | word >> (64 - n); }

// XXH64 of bytes, with seed 0 (xxHash specification 0.1.1): four sums over every fourth word, then the remaining bytes.
constexpr uint64_t XXH_1 = 0x9E3779B185EBCA87, XXH_2 = 0xC2B2AE3D27D4EB4F, XXH_3 = 0x165667B19E3779F9;
constexpr uint64_t XXH_4 = 0x85EBCA77C2B2AE63, XXH_5 = 0x27D4EB2F165667C5;

DEVICE uint64_t xxh_round(uint64_t sum, uint64_t word) { return rotated(sum + word * XXH_2, 31) * XXH_1; }

DEVICE uint64_t xxh_end(const uint64_t* sums, const uint8_t* from, int64_t size) {
    uint64_t hash = XXH_5;
    int64_t k = 0;
    if (size >= 32) {
        hash = rotated(sums[0], 1) + rotated(sums[1], 7) + rotated(sums[2], 12) + rotated(sums[3], 18);
        for (int lane = 0; lane < 4; ++lane) hash = (hash ^ xxh_round(0, sums[lane])) * XXH_1 + XXH_4;
        k = size / 32 * 32;
    }
    hash += uint64_t(size);
    for (; k + 8 <= size; k += 8) hash = rotated(hash ^ xxh_round(0, load8(from + k)), 27) * XXH_1 + XXH_4;
    for (; k + 4 <= size; k += 4) hash = rotated(hash ^ load4(from + k) * XXH_1, 23) * XXH_2 + XXH_3;
    for (; k < size; ++k) hash = rotated(hash ^ from[k] * XXH_5, 11) * XXH_1;
    hash = (hash ^ hash >> 33) * XXH_2;
    hash = (hash ^ hash >> 29) * XXH_3;
    return hash ^ hash >> 32;
}

// Compare the decoded bytes of n zstd frames with the frames' checksum (RFC 8878, 3.1.1): the low half of their XXH64,
// the last 4 bytes before stored[end[i]]; negative: no comparison. Bit 2 of byte 4 says whether a frame has one.
KERNEL(check_zstd, (const uint8_t* __restrict__ decoded, const int64_t* start, const int64_t* nbytes,
                    const uint8_t* __restrict__ stored, const int64_t* at, const int64_t* end, int64_t n,
                    int32_t* status)) {
    constexpr int64_t LEAST = 13;  // magic number, description, size or window, header of a block, checksum
    SHARED_ARRAY(uint64_t, sums, 4);
    for (int64_t i = BLOCK; i < n; i += N_BLOCKS) {
        if (end[i] - at[i] < LEAST || !(stored[at[i] + 4] & 4)) continue;
        const uint8_t* from = decoded + start[i];
        const int64_t size = nbytes[i];
        PHASE(t) {
            for (int lane = t; lane < 4; lane += N_THREADS) {
                uint64_t sum = lane == 0 ? XXH_1 + XXH_2 : lane == 1 ? XXH_2 : lane == 2 ? 0 : 0 - XXH_1;
#pragma unroll 4
                for (int64_t k = 8 * lane; k + 32 <= size + 8 * lane; k += 32) sum = xxh_round(sum, load8(from + k));
                sums[lane] = sum;
            }
        }
        PHASE(t) {
            if (t == 0 && uint32_t(xxh_end(sums, from, size)) != load4(stored + end[i] - 4)) {
                atomic_set_if_zero(status + i, BAD_CHECKSUM);
            }
        }
    }
}
