// Buffers by their addresses, and those that tensors have given back, by size.
#pragma once
#include "handed_in.h"

static const int SHIFT = 36;  // as in buffers.py
static const uint64_t TAG = uint64_t(1) << 62, OFFSET = (uint64_t(1) << SHIFT) - 1;

struct DLTensor {  // DLPack 0.8, which every torch takes
    void *data;
    int32_t device_type, device_index, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes, *strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(DLManagedTensor *);
};
static const int32_t DL_OTHER_DEVICE = 12;

enum Place : uint8_t { ELSEWHERE, IN_TENSOR, RETURNED };  // where a buffer is, as far as this library knows

struct Buffer {
    DLManagedTensor managed;  // of the one storage that has it at a time
    uint64_t key, nbytes;
    void *handle;
    Object *object;  // gpu.buffers.Buffer
    uint64_t epoch;  // of the runtime it belongs to
    std::atomic<int32_t> pins;
    std::atomic<Place> place;
    Buffer *next;  // in a list of returned ones
};

static uint64_t epoch;  // counts runtimes: a tensor of a lost one must not find a buffer here
static const uint32_t PAGE = 4096, PAGES = 1 << 14;
static Buffer **pages[PAGES];  // by the buffer's number

static Buffer **place_of(uint64_t key, bool make) {
    uint64_t number = key & ((TAG >> SHIFT) - 1);
    if (!(key & TAG >> SHIFT) || number / PAGE >= PAGES) return nullptr;
    Buffer **&page = pages[number / PAGE];
    if (!page) {
        if (!make || !(page = static_cast<Buffer **>(calloc(PAGE, sizeof(Buffer *))))) return nullptr;
    }
    return &page[number % PAGE];
}

static inline Buffer *known(uint64_t key) {
    Buffer **place = place_of(key, false);
    return place && *place && (*place)->epoch == epoch ? *place : nullptr;
}

static Buffer *find(uint64_t address) {  // null: an error is set
    Buffer *buffer = known(address >> SHIFT);
    if (buffer) return buffer;
    if (!runtime.missing) {
        py.set_error(is.type_error, "the device has been closed");
        return nullptr;
    }
    Object *key = py.long_from(static_cast<long long>(address >> SHIFT));
    if (!key) return nullptr;
    Object *answer = py.call_with(runtime.missing, key, nullptr);  // raises, or calls `add`
    py.dec_ref(key);
    if (!answer) return nullptr;
    py.dec_ref(answer);
    buffer = known(address >> SHIFT);
    if (!buffer) py.set_error(is.type_error, "a buffer cannot be found");
    return buffer;
}

// Returned buffers, by size: the one list that is used without the GIL, since a tensor may die in any thread.
static const uint32_t SIZES = 256, PROBES = 8;
static struct {
    uint64_t nbytes;
    Buffer *first;
} returned[SIZES];
static Buffer *others;  // pinned, of a size that found no place, or of a runtime that is gone
static std::atomic_flag returning = ATOMIC_FLAG_INIT;
static uint64_t reused;

struct Turn {
    Turn() { while (returning.test_and_set(std::memory_order_acquire)) {} }
    ~Turn() { returning.clear(std::memory_order_release); }
};

static inline uint32_t size_at(uint64_t nbytes) { return uint32_t((nbytes * 0x9E3779B97F4A7C15ull) >> 56) & (SIZES - 1); }

static void give_back(Buffer *buffer) {
    Turn turn;
    buffer->place.store(RETURNED, std::memory_order_relaxed);
    if (!buffer->pins.load(std::memory_order_relaxed) && buffer->epoch == epoch) {
        for (uint32_t probe = 0; probe < PROBES; probe++) {
            auto &list = returned[(size_at(buffer->nbytes) + probe) & (SIZES - 1)];
            if (!list.first && list.nbytes != buffer->nbytes) list.nbytes = buffer->nbytes;
            if (list.nbytes == buffer->nbytes) {
                buffer->next = list.first;
                list.first = buffer;
                return;
            }
        }
    }
    buffer->next = others;
    others = buffer;
}

static void deleted(DLManagedTensor *managed) { give_back(static_cast<Buffer *>(managed->context)); }

static uint64_t bucket(uint64_t nbytes) {  // as in buffers.py
    if (nbytes <= 256) return 256;
    int length = 64 - __builtin_clzll(nbytes - 1);
    uint64_t step = length > 12 ? uint64_t(1) << (length - 4) : 256;
    return (nbytes + step - 1) / step * step;
}

static Buffer *take_returned(uint64_t nbytes) {
    uint64_t size = bucket(nbytes);
    Turn turn;
    for (uint32_t probe = 0; probe < PROBES; probe++) {
        auto &list = returned[(size_at(size) + probe) & (SIZES - 1)];
        if (list.nbytes != size || !list.first) continue;
        Buffer *buffer = list.first;
        list.first = buffer->next;
        if (!buffer->pins.load(std::memory_order_relaxed)) {
            buffer->place.store(ELSEWHERE, std::memory_order_relaxed);
            reused++;
            return buffer;
        }
        buffer->next = others;
        others = buffer;
        return nullptr;
    }
    return nullptr;
}

// Every buffer in a list, as one list (the lock is held).
static Buffer *all_returned() {
    Buffer *all = others;
    others = nullptr;
    for (auto &list : returned) {
        while (Buffer *one = list.first) {
            list.first = one->next;
            one->next = all;
            all = one;
        }
    }
    return all;
}

static void forget(Buffer *buffer) {
    Buffer **place = place_of(buffer->key, false);
    if (place && *place == buffer) *place = nullptr;
    drop(buffer->object);
    free(buffer);
}

// Forget the buffers of runtimes that are gone: whoever keeps them keeps their device. Those in tensors come back one day.
static void sweep() {
    Buffer *gone = nullptr;
    {
        Turn turn;
        for (Buffer *all = all_returned(), *one; (one = all);) {
            all = one->next;
            Buffer *&list = one->epoch == epoch ? others : gone;
            one->next = list;
            list = one;
        }
    }
    for (Buffer **page : pages) {
        for (uint32_t i = 0; page && i < PAGE; i++) {
            Buffer *one = page[i];
            if (!one || one->epoch == epoch || one->place.load(std::memory_order_relaxed) != ELSEWHERE) continue;
            page[i] = nullptr;  // dropping an object below may let another thread come here
            one->next = gone;
            gone = one;
        }
    }
    while (Buffer *one = gone) {
        gone = one->next;
        forget(one);
    }
}

static Buffer *take(uint64_t nbytes) {  // null: an error is set
    Buffer *buffer = take_returned(nbytes);
    if (buffer) return buffer;
    Object *wanted = py.long_from(static_cast<long long>(nbytes));
    if (!wanted) return nullptr;
    Object *address = py.call_with(take_python, wanted, nullptr);
    py.dec_ref(wanted);
    if (!address) return nullptr;
    buffer = find(static_cast<uint64_t>(py.long_as(address)));
    py.dec_ref(address);
    return buffer;
}
