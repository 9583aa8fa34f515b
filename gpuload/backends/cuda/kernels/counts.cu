// The resident's counts -> binomial draws of them, in place; native/counts.py describes the draws, which are the same.

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
constexpr int64_t WHOLE = int64_t(1) << 32;

// Largest count.
constexpr double MAX_COUNT = 1 << 24;

// Number of trials, at most, that take half a word each.
constexpr int32_t FEW = 8;

// Return the first output of SplitMix64 seeded with x.
DEVICE uint64_t hash64(uint64_t x) {
    x += GAMMA;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

// Return how many of n trials succeed, each with probability threshold / 2**32, which is below 1.
DEVICE int32_t drawn(int32_t n, uint32_t threshold, uint64_t word) {
    int32_t total = 0;
    uint64_t seed = word;
    if (n <= FEW) {
        for (int32_t k = 0; k < n; ++k) {
            if (k && !(k & 1)) {
                word = hash64(seed);
                seed += GAMMA;
            }
            total += uint32_t(word >> 32 * (k & 1)) < threshold;
        }
        return total;
    }
    for (; n > 0; n -= 64) {
        uint64_t undecided = n < 64 ? (uint64_t(1) << n) - 1 : ~uint64_t(0);  // a bit per trial
        for (uint32_t bits = threshold; undecided && bits; bits <<= 1) {
            if (bits >> 31) {
                total += count_ones(undecided & ~word);
                undecided &= word;
            } else {
                undecided &= ~word;
            }
            word = hash64(seed);
            seed += GAMMA;
        }
    }
    return total;
}

// Draw the counts of each row, CSR or (without indices) dense. If a row holds anything else, it is left as it was, and
// *bad is lowered to its number.
KERNEL(downsample_counts, (const int64_t* __restrict__ indptr, const int32_t* __restrict__ indices, Value* data,
                           const int64_t* __restrict__ rows, int64_t key, double amount, int64_t n_rows,
                           int64_t n_vars, int32_t* bad)) {
    SHARED_ARRAY(double, partial, MAX_THREADS);
    SHARED_ARRAY(int32_t, are_counts, 1);
    for (int64_t row = BLOCK; row < n_rows; row += N_BLOCKS) {
        const int64_t start = indptr ? indptr[row] : row * n_vars;
        const int64_t n_stored = indptr ? indptr[row + 1] - start : n_vars;
        PHASE(t) {
            if (t == 0) are_counts[0] = 1;
        }
        PHASE(t) {
            double sum = 0.0;  // exact, whatever the order
            for (int64_t k = t; k < n_stored; k += N_THREADS) {
                const double value = widened(data[start + k]);
                if (!(value >= 0.0 && value <= MAX_COUNT && value == double(int32_t(value)))) {
                    atomic_min(&are_counts[0], 0);
                }
                sum += value;
            }
            partial[t] = sum;
        }
        const double total = block_sum(partial);
        if (!agreed(are_counts[0])) {
            EACH_THREAD(t) {
                if (t == 0) atomic_min(bad, int32_t(row));
            }
            continue;
        }
        const double share = amount <= 1.0 ? amount : total > amount ? amount / total : 1.0;
        const int64_t threshold = int64_t(share * double(WHOLE) + 0.5);
        if (threshold >= WHOLE) continue;
        const uint64_t seed = hash64(uint64_t(key) ^ uint64_t(rows[row]));
        PHASE(t) {
            for (int64_t k = t; k < n_stored; k += N_THREADS) {
                const int32_t n = int32_t(widened(data[start + k]));
                if (!n) continue;
                const uint64_t column = uint64_t(indices ? int64_t(indices[start + k]) : k);
                data[start + k] = Value(drawn(n, uint32_t(threshold), hash64(seed + column * GAMMA)));
            }
        }
    }
}
