// Decoded bytes -> the resident's arrays, or the cache.

enum Kind { SIGNED, UNSIGNED, FLOAT };

// A stored type: its size in bytes, its kind, and whether it is big-endian.
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

// Return an element from its bytes in storage order, the first one lowest.
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

// Return element e of words that hold four elements.
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

// Return the element that starts at any byte address.
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
    const uint32_t low = bits & 0x7FFF, wide = low << 13;
    uint32_t magnitude = wide + (112u << 23);
    if (low < 0x0400) magnitude = low ? bits_of(float(low)) - (24u << 23) : 0;  // subnormal: a multiple of 2**-24
    if (low >= 0x7C00) magnitude = wide | 0x7F800000;
    return float_of(magnitude | (bits & 0x8000) << 16);
}

DEVICE bool is_finite(float value) { return (bits_of(value) & 0x7F800000) != 0x7F800000; }
DEVICE bool is_finite(double value) {
    return (bits_of(value) & 0x7FF0000000000000) != 0x7FF0000000000000;
}

template <class S>
DEVICE void convert(uint64_t bits, int64_t, Value& to, Checks& checks) {
    if constexpr (S::kind == FLOAT) {
        if constexpr (S::nbytes == 2) {
            to = as_value(value_of_half(uint32_t(bits)));
        } else if constexpr (S::nbytes == 4) {
            to = as_value(float_of(uint32_t(bits)));
        } else {
            const double value = double_of(bits);
            to = as_value(value);
            checks.is_bad |= is_finite(value) && !is_finite(to);
        }
    } else if constexpr (S::kind == SIGNED) {
        const int64_t value = sign_extended<S::nbytes>(bits);
        to = S::nbytes < 8 ? Value(int32_t(value)) : Value(value);
        checks.is_rounded |= S::nbytes >= sizeof(Value) && (value > MAX_EXACT || value < -MAX_EXACT);
    } else {
        to = S::nbytes < 8 ? Value(uint32_t(bits)) : Value(bits);
        checks.is_rounded |= S::nbytes >= sizeof(Value) && bits > uint64_t(MAX_EXACT);
    }
}

template <class S>
DEVICE void convert(uint64_t bits, int64_t limit, int32_t& to, Checks& checks) {
    int64_t column = int64_t(bits);
    if constexpr (S::kind == FLOAT) {
        double value;
        if constexpr (S::nbytes == 2) {
            value = widened(value_of_half(uint32_t(bits)));
        } else if constexpr (S::nbytes == 4) {
            value = widened(float_of(uint32_t(bits)));
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

template <class S>
DEVICE void convert_fill(double value, int64_t, Value& to, Checks& checks) {
    to = as_value(value);
    checks.is_bad = is_finite(value) && !is_finite(to);
    checks.is_rounded = S::kind != FLOAT && S::nbytes >= sizeof(Value) && (value > MAX_EXACT || value < -MAX_EXACT);
}

template <class S>
DEVICE void convert_fill(double value, int64_t limit, int32_t& to, Checks& checks) {
    checks.is_bad = !(value >= 0 && value < double(limit));
    to = checks.is_bad ? 0 : int32_t(value);
}

// Store two doubles, or four elements of another type, at a multiple of 16 bytes.
DEVICE void store_some(double* to, const double* values) {
    const uint64_t low = bits_of(values[0]), high = bits_of(values[1]);
    store_out(to, uint4{uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)});
}
DEVICE void store_some(float* to, const float* values) {
    store_out(to, uint4{bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3])});
}
DEVICE void store_some(int32_t* to, const int32_t* values) {
    store_out(to, uint4{uint32_t(values[0]), uint32_t(values[1]), uint32_t(values[2]), uint32_t(values[3])});
}

DEVICE int32_t reason_of(Value) { return BAD_VALUE; }
DEVICE int32_t reason_of(int32_t) { return BAD_COLUMN; }

// Copy one thread's share, the lane-th of n_lanes, of n elements.
template <class S, class Out>
DEVICE void copy_run(const uint8_t* __restrict__ from, Out* __restrict__ to, int64_t n, int64_t limit, int lane,
                     int n_lanes, Checks& checks) {
    constexpr int PER = 16 / sizeof(Out);
    const int64_t gap = int64_t(-(address(to) / sizeof(Out)) & (PER - 1)), head = gap < n ? gap : n;
    const int64_t n_groups = (n - head) / 4;
#pragma unroll(S::nbytes < 8 ? 2 : 1)
    for (int64_t k = lane; k < n_groups; k += n_lanes) {
        const int64_t at = head + 4 * k;
        uint32_t words[S::nbytes];
        load_words(from + at * S::nbytes, words);
        Out values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) convert<S>(element<S>(words, e), limit, values[e], checks);
#pragma unroll
        for (int e = 0; e < 4; e += PER) store_some(to + at + e, values + e);
    }
#pragma unroll 1
    for (int64_t k = lane; k < n - 4 * n_groups; k += n_lanes) {
        const int64_t at = k < head ? k : 4 * n_groups + k;
        convert<S>(element_at<S>(from + at * S::nbytes), limit, to[at], checks);
    }
}

// Copy pieces of decoded chunks, or their fill value, into a resident's array of Value or int32_t.
//
// If a piece is a single run, all threads of all blocks that work on the piece share it; if it has several runs, each
// is copied by 32 threads.
template <class S, class Out>
DEVICE void copy_pieces(const uint8_t* __restrict__ decoded, const int64_t* piece_base, const int64_t* piece_src,
                        const int64_t* piece_dest, const int64_t* piece_width, const int64_t* piece_rows,
                        const int32_t* piece_chunk, const int64_t* chunk_limit, int64_t src_stride,
                        int64_t dest_stride, double fill_value, int64_t n_pieces, Out* __restrict__ out,
                        int32_t* status, int32_t* is_rounded) {
    const int64_t n_parts = parts_of_each(n_pieces, 64);
    for (int64_t b = BLOCK; b < n_pieces * n_parts; b += N_BLOCKS) {
        const int64_t p = b / n_parts, part = b % n_parts, rows = piece_rows[p], width = piece_width[p];
        const bool is_one_run = rows == 1;
        const int64_t limit = chunk_limit[piece_chunk[p]];
        const int64_t n = is_one_run ? width : rows, first = n * part / n_parts, last = n * (part + 1) / n_parts;
        const int n_lanes = is_one_run || N_THREADS % 32 ? N_THREADS : 32;
        EACH_THREAD(t) {
            const int lane = t % n_lanes;
            Checks checks;
            Out fill = 0;
            if (piece_base[p] < 0) convert_fill<S>(fill_value, limit, fill, checks);
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
            if (checks.is_rounded) atomic_set_if_zero(is_rounded + piece_chunk[p], 1);
        }
    }
}

// copy_pieces_<src>_<out>: piece p is piece_rows[p] runs of piece_width[p] elements. The first is copied from
// piece_src[p] elements after byte piece_base[p] of `decoded` (negative: the fill value) to out[piece_dest[p]]; each
// next one is src_stride and dest_stride elements further. Column numbers (out i4) must be less than the chunk_limit of
// chunk piece_chunk[p].
#define COPY_PIECES(src, out_name, stored_type, out_type)                                                              \
    KERNEL(copy_pieces_##src##_##out_name,                                                                             \
           (const uint8_t* decoded, const int64_t* piece_base, const int64_t* piece_src, const int64_t* piece_dest,    \
            const int64_t* piece_width, const int64_t* piece_rows, const int32_t* piece_chunk,                         \
            const int64_t* chunk_limit, int64_t src_stride, int64_t dest_stride, double fill_value, int64_t n_pieces,  \
            out_type* out, int32_t* status, int32_t* is_rounded)) {                                                    \
        copy_pieces<stored_type, out_type>(decoded, piece_base, piece_src, piece_dest, piece_width, piece_rows,        \
                                           piece_chunk, chunk_limit, src_stride, dest_stride, fill_value, n_pieces,    \
                                           out, status, is_rounded);                                                   \
    }
#ifdef WIDE
#define COPY_VALUES(src) COPY_PIECES(src, f8, stored_##src, double)
#else
#define COPY_VALUES(src) COPY_PIECES(src, f4, stored_##src, float)
#endif
#define COPY_PIECES_OF(src, nbytes, kind, is_big)                                                                      \
    typedef Stored<nbytes, kind, is_big> stored_##src;                                                                 \
    COPY_VALUES(src)                                                                                                   \
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

// Return whether an element is a whole number that Out, an unsigned type, holds; convert it.
template <class S, class Out>
DEVICE bool fits(uint64_t bits, Out& to) {
    constexpr uint64_t most = Out(~Out(0));
    if constexpr (S::kind == FLOAT) {
        static_assert(S::nbytes >= 4, "float32 or float64");
        if constexpr (S::nbytes == 4) {
            const double value = widened(float_of(uint32_t(bits)));
            to = value >= 0 && value <= double(most) ? Out(uint32_t(value)) : 0;
            return bits_of(float(to)) == uint32_t(bits);  // also not -0.0, nor a fraction, however small
        } else {
            const double value = double_of(bits);
            to = value >= 0 && value <= double(most) ? Out(uint32_t(value)) : 0;
            return bits_of(double(to)) == bits;
        }
    } else {  // a negative number is a large one
        const uint64_t value = S::kind == SIGNED ? uint64_t(sign_extended<S::nbytes>(bits)) : bits;
        to = Out(value);
        return value <= most;
    }
}

// Find how many bytes elements of chunks need as unsigned integers: needed[c] becomes minus 1, 2, or 4, which stands for
// all that an uint16_t does not hold.
template <class S>
DEVICE void measure(const uint8_t* __restrict__ decoded, const int64_t* chunk_start, const int64_t* chunk_nbytes,
                    int64_t n_chunks, int32_t* needed) {
    const int64_t n_parts = parts_of_each(n_chunks, 64);
    for (int64_t b = BLOCK; b < n_chunks * n_parts; b += N_BLOCKS) {
        const int64_t c = b / n_parts, part = b % n_parts, n = chunk_nbytes[c] / S::nbytes, n_groups = n / 4;
        const uint8_t* from = decoded + chunk_start[c];
        EACH_THREAD(t) {
            uint8_t byte;
            uint16_t both;
            bool is_wide = false, is_wider = false;
            for (int64_t k = n_groups * part / n_parts + t; k < n_groups * (part + 1) / n_parts; k += N_THREADS) {
                uint32_t words[S::nbytes];
                load_words(from + 4 * k * S::nbytes, words);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    is_wide |= !fits<S>(element<S>(words, e), byte);
                    is_wider |= !fits<S>(element<S>(words, e), both);
                }
            }
            for (int64_t k = 4 * n_groups + t; k < n; k += N_THREADS) {
                const uint64_t bits = element_at<S>(from + k * S::nbytes);
                is_wide |= !fits<S>(bits, byte);
                is_wider |= !fits<S>(bits, both);
            }
            atomic_min(needed + c, is_wider ? -4 : is_wide ? -2 : -1);
        }
    }
}

// Store elements of decoded chunks as unsigned integers, except chunks that `measure` found to need wider ones.
template <class S, class Out>
DEVICE void narrow(const uint8_t* __restrict__ decoded, const int64_t* chunk_start, const int64_t* chunk_nbytes,
                   const int64_t* place, const int32_t* needed, int64_t n_chunks, uint8_t* __restrict__ out) {
    constexpr int size = sizeof(Out);
    const int64_t n_parts = parts_of_each(n_chunks, 64);
    for (int64_t b = BLOCK; b < n_chunks * n_parts; b += N_BLOCKS) {
        const int64_t c = b / n_parts, part = b % n_parts, n = chunk_nbytes[c] / S::nbytes, n_groups = n / 4;
        if (needed[c] < -size) continue;
        const uint8_t* from = decoded + chunk_start[c];
        uint8_t* to = out + place[c];
        EACH_THREAD(t) {
            for (int64_t k = n_groups * part / n_parts + t; k < n_groups * (part + 1) / n_parts; k += N_THREADS) {
                uint32_t words[S::nbytes], packed[size] = {};
                load_words(from + 4 * k * S::nbytes, words);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    Out value;
                    fits<S>(element<S>(words, e), value);
                    packed[e * size / 4] |= uint32_t(value) << 8 * (e * size % 4);
                }
                store_words(to + 4 * k * size, packed);
            }
            if (part == n_parts - 1) {
                for (int64_t k = 4 * n_groups + t; k < n; k += N_THREADS) {
                    Out value;
                    fits<S>(element_at<S>(from + k * S::nbytes), value);
                    store_aligned(to + k * size, value);
                }
            }
        }
    }
}

#define MEASURE(src)                                                                                                   \
    KERNEL(measure_##src, (const uint8_t* decoded, const int64_t* chunk_start, const int64_t* chunk_nbytes,            \
                           int64_t n_chunks, int32_t* needed)) {                                                       \
        measure<stored_##src>(decoded, chunk_start, chunk_nbytes, n_chunks, needed);                                   \
    }

// narrow_<src>_<out>: the elements of chunk c, chunk_nbytes[c] bytes from byte chunk_start[c] of `decoded` on, to byte
// place[c] of `out`, as unsigned integers.
#define NARROW(src, out_name, out_type)                                                                                \
    KERNEL(narrow_##src##_##out_name,                                                                                  \
           (const uint8_t* decoded, const int64_t* chunk_start, const int64_t* chunk_nbytes, const int64_t* place,     \
            const int32_t* needed, int64_t n_chunks, uint8_t* out)) {                                                  \
        narrow<stored_##src, out_type>(decoded, chunk_start, chunk_nbytes, place, needed, n_chunks, out);              \
    }
#define NARROW_OF(src)                                                                                                 \
    MEASURE(src)                                                                                                       \
    NARROW(src, u1, uint8_t)                                                                                           \
    NARROW(src, u2, uint16_t)

MEASURE(u1)
NARROW(u1, u1, uint8_t)
NARROW_OF(u2)
NARROW_OF(u4)
NARROW_OF(u8)
NARROW_OF(i4)
NARROW_OF(i8)
NARROW_OF(f4)
NARROW_OF(f8)
