// The resident's rows -> a minibatch.

// Element types of a minibatch. `narrow` rounds to nearest, ties to even, and flags finite values rounded to infinity.

#ifdef WIDE

struct Double {
    typedef double Element;
    static DEVICE double narrow(double value, bool&) { return value; }
    static DEVICE uint32_t word(const double* values, int k, bool&) {
        return uint32_t(bits_of(values[k / 2]) >> 32 * (k % 2));
    }
};

DEVICE void unpack(uint4 words, double* values) {
    values[0] = double_of(uint64_t(words.y) << 32 | words.x), values[1] = double_of(uint64_t(words.w) << 32 | words.z);
}

#else

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
        if (magnitude > 0x7F800000) return uint16_t(wide >> 16 | 0x40);  // NaN
        const uint32_t bits = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
        is_bad |= (bits & 0x7FFF) == 0x7F80 && magnitude < 0x7F800000;
        return uint16_t(bits);
    }
    static DEVICE uint32_t word(const float* values, int k, bool& is_bad) {
        return uint32_t(narrow(values[2 * k + 1], is_bad)) << 16 | narrow(values[2 * k], is_bad);
    }
};

DEVICE void unpack(uint4 words, float* values) {
    values[0] = float_of(words.x), values[1] = float_of(words.y);
    values[2] = float_of(words.z), values[3] = float_of(words.w);
}

#endif

// Elements per 16-byte store.
template <class Form>
constexpr int PER_STORE = 16 / int(sizeof(typename Form::Element));

// Return the distance in elements of a pointer from the preceding multiple of 16 bytes.
template <class Form>
DEVICE int skew_of(const typename Form::Element* to) {
    return int(address(to) / sizeof(*to) % PER_STORE<Form>);
}

// Store PER_STORE values at a multiple of 16 bytes.
template <class Form>
DEVICE void store_group(typename Form::Element* to, const Value* values, bool& is_bad) {
    store_out(to, uint4{Form::word(values, 0, is_bad), Form::word(values, 1, is_bad), Form::word(values, 2, is_bad),
                        Form::word(values, 3, is_bad)});
}

// Read PER_STORE values, wherever they are.
template <class Form>
DEVICE void load_group(const Value* from, Value (&values)[PER_STORE<Form>]) {
    constexpr int PER_LOAD = 16 / sizeof(Value);
#pragma unroll
    for (int k = 0; k < PER_STORE<Form>; k += PER_LOAD) {
        unpack(load16(reinterpret_cast<const uint8_t*>(from + k)), values + k);
    }
}

// Return the factor that scales values to sum to `target_sum`; 1 if that is 0 or they sum to 0. partial: see block_sum.
DEVICE double row_scale(const Value* data, int64_t n, double target_sum, double* partial) {
    if (target_sum == 0.0) return 1.0;
    PHASE(t) {
        double sum = 0.0;
#pragma unroll 4
        for (int64_t k = t; k < n; k += N_THREADS) sum += widened(data[k]);
        partial[t] = sum;
    }
    const double total = block_sum(partial);
    return total != 0.0 ? target_sum / total : 1.0;
}

// The transform of a cell's values.
struct Arithmetic {
    double scale;
    bool is_any, is_log1p;

    DEVICE Arithmetic(double scale_, double target_sum, int32_t log1p_)
        : scale(scale_), is_any(log1p_ || target_sum != 0.0), is_log1p(log1p_) {}

    DEVICE Value of(Value value) const {
        if (!is_any) return value;
        const double scaled = widened(value) * scale;
        if (!is_log1p) return as_value(scaled);
        return as_value(scaled != 0.0 ? log1p(scaled) : 0.0);  // 0.0 for a zero of either sign
    }
};

// Return the column map of a resident row: its file's, which begins at map_start[row], or the only one, or null.
DEVICE const int32_t* map_of(int32_t row, const int64_t* map_start, const int32_t* columns) {
    return columns && map_start ? columns + map_start[row] : columns;
}

// Return the output column of a stored column, or a negative number.
DEVICE int64_t place_of(const int32_t* columns, int32_t column) { return columns ? columns[column] : column; }

// Write CSR rows into a dense array, zeros included.
//
// If a row's columns are strictly increasing, its values are written in any order (`columns` maps no two to the same
// place) over zeros that were written just before, tile by tile: tiles in progress fit in the GPU's L2 cache, so that
// memory is written once. Otherwise values are summed in shared memory, in storage order: each place belongs to one
// thread.
template <class Form>
DEVICE void densify_csr(const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                        const int32_t* __restrict__ indices, const Value* __restrict__ data,
                        const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, double target_sum,
                        int32_t log1p_, int64_t n_rows, int64_t n_cols, typename Form::Element* out, int32_t* bad) {
    constexpr int PER = PER_STORE<Form>;
    SHARED_ARRAY(Value, sums, SUM_TILE);
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, is_rising, 1);
    const int64_t n_tiles = (n_cols + TILE - 1) / TILE, n_parts = parts_of_each(n_rows, n_tiles);
    PHASE(t) {
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
        const int64_t first = n_tiles * part / n_parts * TILE, last = n_tiles * (part + 1) / n_parts * TILE;
        const int64_t end = last < n_cols ? last : n_cols;
        for (int64_t lo = first, width; lo < end; lo += width) {
            const int64_t most = is_apart ? TILE : SUM_TILE;
            width = end - lo < most ? end - lo : most;
            typename Form::Element* to = out + row * n_cols + lo;
            PHASE(t) {
                if (is_apart) {
                    const int64_t gap = (PER - skew_of<Form>(to)) % PER, head = gap < width ? gap : width;
                    const int64_t n_groups = (width - head) / PER;
                    for (int64_t g = t; g < n_groups; g += N_THREADS) store_zeros(to + head + PER * g);
                    for (int64_t k = t; k < width - PER * n_groups; k += N_THREADS) {
                        to[k < head ? k : PER * n_groups + k] = 0;
                    }
                } else {
                    for (int64_t k = t; k < width; k += N_THREADS) sums[k] = 0;
                }
            }
            PHASE(t) {
                bool is_bad = false;
                if (is_apart) {
                    for (int64_t j = start + t; j < stop; j += N_THREADS) {
                        const int64_t place = place_of(chosen, indices[j]) - lo;
                        if (uint64_t(place) < uint64_t(width)) {
                            Value value = 0;
                            add_to(value, arithmetic.of(data[j]));  // which makes 0.0 of -0.0
                            to[place] = Form::narrow(value, is_bad);
                        }
                    }
                } else {
                    for (int64_t j = start; j < stop; ++j) {
                        const int64_t place = place_of(chosen, indices[j]) - lo;
                        if (uint64_t(place) < uint64_t(width) && int(place) % N_THREADS == t) {
                            add_to(sums[place], arithmetic.of(data[j]));
                        }
                    }
                    for (int64_t k = t; k < width; k += N_THREADS) to[k] = Form::narrow(sums[k], is_bad);
                }
                if (is_bad) atomic_min(bad, int32_t(row));
            }
        }
    }
}

#define DENSIFY_CSR(name, form)                                                                                        \
    KERNEL(densify_csr_##name,                                                                                         \
           (const int32_t* positions, const int64_t* indptr, const int32_t* indices, const Value* data,                \
            const int64_t* map_start, const int32_t* columns, double target_sum, int32_t log1p, int64_t n_rows,        \
            int64_t n_cols, form::Element* out, int32_t* bad)) {                                                       \
        densify_csr<form>(positions, indptr, indices, data, map_start, columns, target_sum, log1p, n_rows, n_cols,     \
                          out, bad);                                                                                   \
    }

#ifdef WIDE
DENSIFY_CSR(f8, Double)
#else
DENSIFY_CSR(f4, Single)
DENSIFY_CSR(f2, Half)
DENSIFY_CSR(bf2, Brain)
#endif

// Write dense rows into a dense array. Rows are n_vars wide, or begin at indptr and are at most n_vars wide; output
// columns that a row lacks are left unchanged.
template <class Form>
DEVICE void gather_dense(const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                         const Value* __restrict__ X, const int64_t* __restrict__ map_start,
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
        const Value* stored = X + start;
        const Value* from = stored + first;
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
                        Value values[PER];
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
           (const int32_t* positions, const int64_t* indptr, const Value* X, const int64_t* map_start,                 \
            const int32_t* columns, double target_sum, int32_t log1p, int64_t n_rows, int64_t n_vars, int64_t n_cols,  \
            form::Element* out, int32_t* bad)) {                                                                       \
        gather_dense<form>(positions, indptr, X, map_start, columns, target_sum, log1p, n_rows, n_vars, n_cols, out,   \
                           bad);                                                                                       \
    }

#ifdef WIDE
GATHER_DENSE(f8, Double)
#else
GATHER_DENSE(f4, Single)
GATHER_DENSE(f2, Half)
GATHER_DENSE(bf2, Brain)
#endif

// Return the inclusive prefix sums of kept[t] over the threads; kept has room for twice MAX_THREADS.
DEVICE const int64_t* running_sums(int64_t* kept) {
    int from = 0;
    for (int step = 1; step < N_THREADS; step *= 2) {
        PHASE(t) {
            kept[(MAX_THREADS - from) + t] = kept[from + t] + (t >= step ? kept[from + t - step] : 0);
        }
        from = MAX_THREADS - from;
    }
    return kept + from;
}

// Count the values of each resident row that `columns` keeps; -1 minus the count if their new column numbers are not
// strictly increasing.
KERNEL(count_csr, (const int64_t* __restrict__ indptr, const int32_t* __restrict__ indices,
                   const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, int64_t n_rows,
                   int64_t* out)) {
    SHARED_ARRAY(int64_t, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, first, MAX_THREADS);
    SHARED_ARRAY(int32_t, last, MAX_THREADS);
    SHARED_ARRAY(int32_t, falls, MAX_THREADS);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr[row], n_stored = indptr[row + 1] - start;
        const int32_t* chosen = map_of(int32_t(row), map_start, columns);
        // Each thread takes a run of values, and then the first one compares the ends of adjacent runs.
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

// Write a row's offset in a CSR minibatch, and once the end of the last row, given the rows' offsets in their fetch.
DEVICE int64_t start_of_row(int64_t row, int64_t n_rows, const int64_t* offsets, int32_t* out_indptr) {
    const int64_t to = offsets[row] - offsets[0];
    EACH_THREAD(t) {
        if (t == 0) out_indptr[row] = int32_t(to);
        if (t == 0 && row == n_rows - 1) out_indptr[n_rows] = int32_t(offsets[n_rows] - offsets[0]);
    }
    return to;
}

// Write CSR rows consecutively; values keep their storage order.
KERNEL(gather_csr, (const int32_t* __restrict__ positions, const int64_t* __restrict__ indptr,
                    const int32_t* __restrict__ indices, const Value* __restrict__ data,
                    const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, double target_sum,
                    int32_t log1p_, int64_t n_rows, const int64_t* __restrict__ offsets,
                    int32_t* __restrict__ out_indptr, int32_t* __restrict__ out_indices,
                    Value* __restrict__ out_data)) {
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int64_t, kept, 2 * MAX_THREADS);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr[positions[row]], n = indptr[positions[row] + 1] - start;
        const int64_t to = start_of_row(row, n_rows, offsets, out_indptr);
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
        // Each thread takes a run of values; the counts of the threads before it give its output offset.
        PHASE(t) {
            int64_t count = 0;
            for (int64_t k = n * t / N_THREADS; k < n * (t + 1) / N_THREADS; ++k) {
                count += chosen[indices[start + k]] >= 0;
            }
            kept[t] = count;
        }
        const int64_t* ends = running_sums(kept);
        PHASE(t) {
            int64_t place = to + (t ? ends[t - 1] : 0);
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

// Whether CSR stores a value: anything but zero, of either sign.
DEVICE bool is_stored(Value value) { return bits_of(value) << 1; }

// Count the nonzero minibatch values that `columns` keeps in each dense resident row: with the arithmetic of
// gather_dense and the same number of threads, because compact_dense has room only for what is counted here.
KERNEL(count_dense, (const int64_t* __restrict__ indptr, const Value* __restrict__ X,
                     const int64_t* __restrict__ map_start, const int32_t* __restrict__ columns, double target_sum,
                     int32_t log1p_, int64_t n_rows, int64_t n_vars, int64_t* out)) {
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int64_t, counts, MAX_THREADS);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr ? indptr[row] : row * n_vars;
        const int64_t n_stored = indptr ? indptr[row + 1] - start : n_vars;
        const int32_t* chosen = map_of(int32_t(row), map_start, columns);
        const Arithmetic arithmetic(row_scale(X + start, n_stored, target_sum, partial), target_sum, log1p_);
        PHASE(t) {
            int64_t n = 0;
            for (int64_t k = t; k < n_stored; k += N_THREADS) {
                n += (!chosen || chosen[k] >= 0) && is_stored(arithmetic.of(X[start + k]));
            }
            counts[t] = n;
        }
        const int64_t n = block_sum(counts);
        EACH_THREAD(t) {
            if (t == 0) out[row] = n;
        }
    }
}

#ifndef WIDE

// A float32 sum below this surely fits float16, even if rounded up.
constexpr double SURELY_HALF = 32768.0;

// Report for each resident row, CSR or (without indices) dense, whether float16 may fail to hold one of its minibatch
// values: a value that rounds to infinity or, if columns repeat (their values are summed) or decrease, the row's sum.
// After log1p no single value is too large, so rows whose columns increase are not read further.
KERNEL(mark_large, (const int64_t* __restrict__ indptr, const int32_t* __restrict__ indices,
                    const float* __restrict__ data, const int64_t* __restrict__ map_start,
                    const int32_t* __restrict__ columns, double target_sum, int32_t log1p_, int64_t n_rows,
                    int64_t n_vars, int64_t* out)) {
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, has_none, 2);  // no value that is too large; no column out of order
    PHASE(t) {
        if (t < 2) has_none[t] = 1;
    }
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr ? indptr[row] : row * n_vars;
        const int64_t n_stored = indptr ? indptr[row + 1] - start : n_vars;
        if (log1p_) {
            PHASE(t) {
                for (int64_t k = 1 + t; indices && k < n_stored; k += N_THREADS) {
                    if (indices[start + k] <= indices[start + k - 1]) atomic_min(&has_none[1], 0);
                }
            }
            if (agreed(has_none[1])) {
                EACH_THREAD(t) {
                    if (t == 0) out[row] = 0;
                }
                continue;
            }
        }
        const int32_t* chosen = map_of(int32_t(row), map_start, columns);
        const Arithmetic arithmetic(row_scale(data + start, n_stored, target_sum, partial), target_sum, log1p_);
        PHASE(t) {
            double sum = 0.0;
            for (int64_t k = t; k < n_stored; k += N_THREADS) {
                if (indices && k && indices[start + k] <= indices[start + k - 1]) atomic_min(&has_none[1], 0);
                if (place_of(chosen, indices ? indices[start + k] : int32_t(k)) < 0) continue;
                const double size = widened(float_of(bits_of(arithmetic.of(data[start + k])) & 0x7FFFFFFF));
                if (!(size < 65520.0)) atomic_min(&has_none[0], 0);
                sum += size;
            }
            partial[t] = sum;
        }
        const double total = block_sum(partial);
        const bool is_apart = agreed(has_none[1]), is_large = !agreed(has_none[0]);
        EACH_THREAD(t) {
            if (t == 0) out[row] = is_large || (!is_apart && !(total < SURELY_HALF));
        }
        PHASE(t) {
            if (t < 2) has_none[t] = 1;
        }
    }
}

#endif

// Write the nonzero values of dense rows as CSR rows, row r from out_indptr[r] on.
KERNEL(compact_dense, (const Value* __restrict__ X, int64_t n_rows, int64_t n_cols,
                       const int64_t* __restrict__ offsets, int32_t* __restrict__ out_indptr,
                       int32_t* __restrict__ out_indices, Value* __restrict__ out_data)) {
    SHARED_ARRAY(int64_t, kept, 2 * MAX_THREADS);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const Value* from = X + row * n_cols;
        const int64_t to = start_of_row(row, n_rows, offsets, out_indptr);
        PHASE(t) {
            int64_t n = 0;
            for (int64_t k = n_cols * t / N_THREADS; k < n_cols * (t + 1) / N_THREADS; ++k) n += is_stored(from[k]);
            kept[t] = n;
        }
        const int64_t* ends = running_sums(kept);
        PHASE(t) {
            int64_t place = to + (t ? ends[t - 1] : 0);
            for (int64_t k = n_cols * t / N_THREADS; k < n_cols * (t + 1) / N_THREADS; ++k) {
                if (is_stored(from[k])) {
                    out_indices[place] = int32_t(k);
                    out_data[place++] = from[k];
                }
            }
        }
    }
}
