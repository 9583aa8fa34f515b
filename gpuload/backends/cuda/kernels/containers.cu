// Containers: chunks that hold several streams of a codec.
//
// A blosc container (c-blosc 1, README_CHUNK_FORMAT.rst) is a header of 16 bytes, a table of block offsets, and the
// blocks. A whole block is n_splits equal streams, any other is one; each stream is preceded by its stored size, which
// equals the decoded size if the stream is stored uncompressed. A container may also hold all its bytes uncompressed.
//
// A container of HDF5's lz4 filter (HDF Group, registered filter 32004) is a header of 12 bytes (decoded size and block
// size), then the blocks, each one stream preceded by its stored size as above; all numbers are big-endian.

// The layout of all chunks of an array, from a header: chunks of `nbytes` in blocks of `block_nbytes`.
struct Cut {
    int64_t nbytes, block_nbytes, n_splits;

    DEVICE int64_t n_whole() const { return nbytes / block_nbytes; }
    DEVICE int64_t rest() const { return nbytes % block_nbytes; }
    DEVICE int64_t n_blocks() const { return n_whole() + (rest() ? 1 : 0); }
    DEVICE int64_t n_streams() const { return n_whole() * n_splits + (rest() ? 1 : 0); }

    // Number of streams of block b, and the decoded bytes of each.
    DEVICE int64_t streams_in(int64_t b) const { return b < n_whole() ? n_splits : 1; }
    DEVICE int64_t stream_nbytes(int64_t b) const { return b < n_whole() ? block_nbytes / n_splits : rest(); }

    // Each stream has a slot, a multiple of 16 bytes, large enough for the decoded stream and for its snappy form
    // (which may be longer); a chunk's slots are contiguous.
    DEVICE int64_t slot(int64_t b, int64_t k) const { return (b * n_splits + k) * slots_of(block_nbytes / n_splits); }
    DEVICE int64_t chunk_slots() const { return slot(n_whole(), 0) + slots_of(rest()); }
    DEVICE static int64_t most_stored(int64_t size) { return 32 + size + size / 6; }
    DEVICE static int64_t slots_of(int64_t size) { return size ? (most_stored(size) + 15) / 16 * 16 : 0; }
};

// Per-stream facts: rows of a table with one column per stream.
enum Row { SOURCE, STORED, SLOT, IN, IN_NBYTES, OUT, ROOM, WANTED, FROM, TRAILER };

// Whether a chunk's header equals the array's first one, except for the container's size and whether its bytes are
// stored uncompressed.
DEVICE bool is_alike(const uint8_t* chunk, const uint8_t* head) {
    const uint32_t words = load4(chunk) ^ load4(head), copied = 0x00020000;
    return !(words & ~copied) && load4(chunk + 4) == load4(head + 4) && load4(chunk + 8) == load4(head + 8);
}

// Fills a table that says where the streams of containers go. For each stream it holds: the first stored byte, how many
// bytes to move, and to which slot of `compressed`; the codec's input (address and size) and output (address and room,
// in `decoded`), and the required output size; the address from which to take the decoded bytes; and the place of its
// adler32, or -1. A stream that is stored uncompressed, or cannot be found, is not moved: instead the codec gets the
// filler, a valid stream that decodes to one byte, and the bytes are taken from where they are stored.
struct Streams {
    Cut cut;
    int64_t n;
    const uint8_t* stored;
    const int64_t* place;
    const uint8_t* filler;
    int64_t filler_nbytes;
    const uint8_t* decoded;
    uint8_t* compressed;
    int64_t* table;

    // Record stream k of block b of container c: `size` bytes at offset `at`, the first `head` and last `tail` of which
    // are not input of the codec. A negative size means that it cannot be found.
    DEVICE void put(int64_t c, int64_t b, int64_t k, int64_t at, int64_t size, int64_t head, int64_t tail) const {
        const int64_t room = cut.stream_nbytes(b), n_columns = n * cut.n_streams();
        const bool is_coded = size > 0 && size != room;
        const int64_t n_moved = is_coded ? size - head - tail : 0;
        const int64_t slot = c * cut.chunk_slots() + cut.slot(b, k);
        int64_t* column = table + c * cut.n_streams() + b * cut.n_splits + k;
        column[SOURCE * n_columns] = place[c] + (is_coded ? at + head : 0);
        column[STORED * n_columns] = n_moved;
        column[SLOT * n_columns] = slot;
        column[IN * n_columns] = int64_t(address(compressed + slot));
        column[IN_NBYTES * n_columns] = is_coded ? n_moved : filler_nbytes;
        column[OUT * n_columns] = int64_t(address(decoded + slot));
        column[ROOM * n_columns] = room;
        column[WANTED * n_columns] = is_coded ? room : 1;
        column[FROM * n_columns] = int64_t(address(size == room ? stored + place[c] + at : decoded + slot));
        column[TRAILER * n_columns] = is_coded && tail ? place[c] + at + size - tail : -1;
        if (!is_coded) {
            for (int64_t j = 0; j < filler_nbytes; ++j) compressed[slot + j] = filler[j];
        }
    }
};

// Find the streams of n blosc containers whose headers all match `head`; one thread follows the streams of a block. Bad
// containers are reported in `status`.
KERNEL(walk_blosc, (const uint8_t* __restrict__ stored, const int64_t* place, const int64_t* stored_nbytes,
                    const uint8_t* head, const uint8_t* filler, int64_t filler_nbytes, int64_t nbytes,
                    int64_t block_nbytes, int64_t n_splits, int32_t is_zlib, int64_t n, const uint8_t* decoded,
                    uint8_t* __restrict__ compressed, int64_t* __restrict__ table, int32_t* __restrict__ is_copied,
                    int32_t* status)) {
    constexpr int64_t HEAD = 16, ZLIB_HEAD = 2, ZLIB_TAIL = 4;
    const Cut cut{nbytes, block_nbytes, n_splits};
    const Streams streams{cut, n, stored, place, filler, filler_nbytes, decoded, compressed, table};
    const int64_t n_blocks = cut.n_blocks();
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
                    int64_t size = -1;
                    bool is_framed = false;
                    if (is_plain && at >= 0) {
                        size = room;
                    } else if (at >= 0 && at + 4 <= end) {
                        size = signed4(chunk + at);
                        at += 4;
                        if (size <= 0 || size > Cut::most_stored(room) || at + size > end) size = -1;
                        if (is_zlib && size > 0 && size != room) {
                            is_framed = size > ZLIB_HEAD + ZLIB_TAIL && is_zlib_header(chunk[at], chunk[at + 1]);
                            if (!is_framed) size = -1;
                        }
                    }
                    streams.put(c, b, k, at, size, is_framed ? ZLIB_HEAD : 0, is_framed ? ZLIB_TAIL : 0);
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

// The same for n containers of HDF5's lz4 filter; a thread finds a block from the sizes of those before it.
KERNEL(walk_lz4, (const uint8_t* __restrict__ stored, const int64_t* place, const int64_t* stored_nbytes,
                  const uint8_t* head, const uint8_t* filler, int64_t filler_nbytes, int64_t nbytes,
                  int64_t block_nbytes, int64_t n, const uint8_t* decoded, uint8_t* __restrict__ compressed,
                  int64_t* __restrict__ table, int32_t* __restrict__ is_copied, int32_t* status)) {
    constexpr int64_t HEAD = 12;
    const Cut cut{nbytes, block_nbytes, 1};
    const Streams streams{cut, n, stored, place, filler, filler_nbytes, decoded, compressed, table};
    const int64_t n_blocks = cut.n_blocks();
    for (int64_t group = BLOCK; group * N_THREADS < n * n_blocks; group += N_BLOCKS) {
        EACH_THREAD(t) {
            const int64_t item = group * N_THREADS + t, c = item / n_blocks, b = item % n_blocks;
            if (item < n * n_blocks) {
                const uint8_t* chunk = stored + place[c];
                const int64_t end = stored_nbytes[c];
                bool is_good = end >= HEAD;
                for (int64_t k = 0; is_good && k < HEAD; k += 4) is_good = load4(chunk + k) == load4(head + k);
                int64_t at = HEAD, size = 0;
                for (int64_t k = 0; is_good && k <= b; ++k) {
                    at += size;
                    size = at + 4 <= end ? big4(chunk + at) : -1;
                    at += 4;
                    is_good = 0 < size && size <= cut.stream_nbytes(k) && at + size <= end;
                }
                if (b == 0) is_copied[c] = 0;
                streams.put(c, b, 0, at, is_good ? size : -1, 0, 0);
                if (!is_good) atomic_set_if_zero(status + c, BAD_LZ4);
            }
        }
    }
}

// Report in `status` the chunks, of n_streams streams each, that have a stream with an error or a wrong decoded size.
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

// Assemble n containers from their decoded streams, at the addresses `from`; itemsize 1: not shuffled.
KERNEL(join_blocks, (const int64_t* __restrict__ from, const int32_t* is_copied, int64_t nbytes, int64_t block_nbytes,
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
            const int64_t lo = room / 16 * part / n_parts * 16;
            const int64_t hi = part + 1 == n_parts ? room : room / 16 * (part + 1) / n_parts * 16;
            for (int64_t k = 0; k < n_streams; ++k) {
                copy_bytes(reinterpret_cast<const uint8_t*>(each[k]) + lo, to + k * room + lo, hi - lo);
            }
        }
    }
}
