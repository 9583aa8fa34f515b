// The primitives of the kernels on the host, and launches of its kernels by name; included before it.
//
// Blocks run one after the other. Within a block, a phase is a loop over its threads, forwards or backwards: a kernel
// that gives another result backwards has a race within a phase. With SHIM_THREADS threads are threads and barriers are
// barriers, so that ThreadSanitizer can look for races between phases.
//
// The host is made as strict as a GPU: aligned accesses must be aligned, and shared memory is at most what CUDA gives
// without asking, begins with rubbish in each block, and has guards between its arrays.

#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

namespace shim {

enum Fault { NONE, UNKNOWN_KERNEL, MISALIGNED, TOO_MUCH_SHARED, SHARED_OVERRUN };

constexpr size_t MAX_SHARED = 48 << 10, GUARD = 64;
constexpr unsigned char RUBBISH = 0xFB;

// Shared memory of a block: arrays, each with a guard behind it.
struct Arena {
    alignas(64) unsigned char bytes[2 * MAX_SHARED];
    std::vector<unsigned char*> guards;
    size_t used = 0;

    void clear() {
        guards.clear();
        used = 0;
    }

    bool is_overrun() const {
        for (const unsigned char* guard : guards) {
            for (size_t k = 0; k < GUARD; ++k) {
                if (guard[k] != RUBBISH) return true;
            }
        }
        return false;
    }
};

// Where a thread runs.
struct Place {
    int64_t block = 0, n_blocks = 1;
    int n_threads = 1, thread = 0, n_arrays = 0;
    bool is_reversed = false;
    Arena* arena = nullptr;
    Fault fault = NONE;
};

inline thread_local Place at;

inline void fail(Fault fault) {
    if (at.fault == NONE) at.fault = fault;
}

inline std::mutex mutex;
inline pthread_barrier_t barrier;

inline void wait() {
#ifdef SHIM_THREADS
    pthread_barrier_wait(&barrier);
#endif
}

// Return the place of the next shared array; every thread of a block asks for the same ones in the same order.
template <class T>
T* shared_array(size_t n) {
    const size_t nbytes = (n * sizeof(T) + 15) / 16 * 16;
    const size_t number = size_t(at.n_arrays++);
    wait();
    if (at.thread == 0) {
        at.arena->used += nbytes;
        if (at.arena->used > MAX_SHARED) fail(TOO_MUCH_SHARED);
        unsigned char* array = number ? at.arena->guards.back() + GUARD : at.arena->bytes;
        memset(array, RUBBISH, nbytes + GUARD);
        at.arena->guards.push_back(array + nbytes);
    }
    wait();
    return reinterpret_cast<T*>(number ? at.arena->guards[number - 1] + GUARD : at.arena->bytes);
}

// The name of a parameter's type: that of a NumPy scalar; for pointers with r: (only read) or w: before it.
template <class T> struct Name;
template <> struct Name<uint8_t> { static constexpr const char* text = "u1"; };
template <> struct Name<uint16_t> { static constexpr const char* text = "u2"; };
template <> struct Name<int32_t> { static constexpr const char* text = "i4"; };
template <> struct Name<int64_t> { static constexpr const char* text = "i8"; };
template <> struct Name<float> { static constexpr const char* text = "f4"; };
template <> struct Name<double> { static constexpr const char* text = "f8"; };

template <class T> std::string name_of(T*) { return std::string(" ") + Name<T>::text; }
template <class T> std::string name_of(T**) { return std::string(" w:") + Name<T>::text; }
template <class T> std::string name_of(const T**) { return std::string(" r:") + Name<T>::text; }

struct Kernel {
    std::string signature;
    void (*function)();
    void (*call)(void (*)(), void**);
};

inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

template <class... A, size_t... I>
void call(void (*function)(A...), void** args, std::index_sequence<I...>) {
    function(*static_cast<A*>(args[I])...);
}

struct Registered {
    template <class... A>
    Registered(const char* name, void (*function)(A...)) {
        kernels()[name] = {(std::string() + ... + name_of(static_cast<A*>(nullptr))),
                           reinterpret_cast<void (*)()>(function), [](void (*plain)(), void** args) {
                               call(reinterpret_cast<void (*)(A...)>(plain), args, std::index_sequence_for<A...>());
                           }};
    }
};

// Run all blocks as one thread of each, or as all.
inline void run_blocks(const Kernel& kernel, void** args) {
    for (int64_t k = 0; k < at.n_blocks; ++k) {
        at.block = at.is_reversed ? at.n_blocks - 1 - k : k;
        at.n_arrays = 0;
        wait();
        if (at.thread == 0) at.arena->clear();
        wait();
        kernel.call(kernel.function, args);
        wait();
        if (at.thread == 0 && at.arena->is_overrun()) fail(SHARED_OVERRUN);
    }
}

}  // namespace shim

extern "C" const char* shim_signatures() {
    static std::string all;
    all.clear();
    for (const auto& [name, kernel] : shim::kernels()) all += name + kernel.signature + "\n";
    return all.c_str();
}

extern "C" int shim_launch(const char* name, int64_t n_blocks, int n_threads, int is_reversed, void** args) {
    using namespace shim;
    const auto found = kernels().find(name);
    if (found == kernels().end()) return UNKNOWN_KERNEL;
    thread_local std::unique_ptr<Arena> arena = std::make_unique<Arena>();
    Place place;
    place.n_blocks = n_blocks;
    place.n_threads = n_threads;
    place.is_reversed = is_reversed;
    place.arena = arena.get();
#ifdef SHIM_THREADS
    const std::lock_guard<std::mutex> lock(mutex);
    pthread_barrier_init(&barrier, nullptr, unsigned(n_threads));
    std::vector<std::thread> threads;
    std::vector<Fault> faults(n_threads, NONE);
    for (int t = 0; t < n_threads; ++t) {
        threads.emplace_back([&, t] {
            at = place;
            at.thread = t;
            run_blocks(found->second, args);
            faults[t] = at.fault;
        });
    }
    for (std::thread& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
    for (const Fault fault : faults) {
        if (fault != NONE) return fault;
    }
    return NONE;
#else
    at = place;
    run_blocks(found->second, args);
    return at.fault;
#endif
}

#define GPULOAD_HOST
#define DEVICE inline
#define KERNEL(name, parameters)                               \
    extern "C" void name parameters;                           \
    static const shim::Registered registered_##name(#name, name); \
    extern "C" void name parameters
#define BLOCK shim::at.block
#define N_BLOCKS shim::at.n_blocks
#define N_THREADS shim::at.n_threads
#define SHARED_ARRAY(type, name, n) type* const name = shim::shared_array<type>(n)
#define BARRIER() shim::wait()
#ifdef SHIM_THREADS
#define EACH_THREAD(t) for (int t = shim::at.thread, phase_ = 1; phase_; phase_ = 0)
#define PHASE(t) for (int t = shim::at.thread, phase_ = 1; phase_; phase_ = 0, shim::wait())
#else
#define EACH_THREAD(t)                                                                                           \
    for (int turn_ = 0, n_ = N_THREADS, t = shim::at.is_reversed ? n_ - 1 : 0, step_ = t ? -1 : 1; turn_ < n_; \
         ++turn_, t += step_)
#define PHASE(t) EACH_THREAD(t)
#endif

template <class T>
T load_aligned(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) shim::fail(shim::MISALIGNED);
    T value;
    memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
void store_aligned(void* to, T value) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) shim::fail(shim::MISALIGNED);
    memcpy(to, &value, sizeof(T));
}

inline void store_out(void* to, uint4 value) { store_aligned(to, value); }
inline void store_zeros(void* to) { store_aligned(to, uint4{0, 0, 0, 0}); }

inline void atomic_min(int32_t* at, int32_t value) {
    int32_t found = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (value < found && !__atomic_compare_exchange_n(at, &found, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

inline void atomic_set_if_zero(int32_t* at, int32_t value) {
    int32_t zero = 0;
    __atomic_compare_exchange_n(at, &zero, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

inline int32_t count_ones(uint64_t bits) { return __builtin_popcountll(bits); }
inline float float_of(uint32_t bits) { return same_bits<float>(bits); }
inline double double_of(uint64_t bits) { return same_bits<double>(bits); }
inline uint32_t bits_of(float value) { return same_bits<uint32_t>(value); }
inline uint64_t bits_of(double value) { return same_bits<uint64_t>(value); }

inline double widened(float value) { return value; }
inline double widened(double value) { return value; }
inline float narrowed(double value) { return float(value); }
inline void add_to(float& sum, float value) { sum += value; }
inline void add_to(double& sum, double value) { sum += value; }

inline uint32_t dot_bytes(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (int k = 0; k < 32; k += 8) sum += (a >> k & 255) * (b >> k & 255);
    return sum;
}

// Below 2**-14 float16 counts in steps of 2**-24, as float32 does around 0.5: the addition rounds. Above, half a step
// of float16, less one where the last bit kept is 0, makes what is cut off rounded.
inline uint16_t half_bits(float value) {
    const uint32_t wide = bits_of(value), sign = wide >> 16 & 0x8000, magnitude = wide & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return uint16_t(sign | 0x7C00);  // 65,520 and above
    if (magnitude < 0x38800000) return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    return uint16_t(sign | (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}
