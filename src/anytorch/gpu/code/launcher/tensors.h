// New tensors over returned buffers, made by DLPack.
#pragma once
#include "buffers.h"

static const int MOST_RANK = 12;

struct Geometry {
    int64_t sizes[MOST_RANK], strides[MOST_RANK];
    int32_t rank;
    uint8_t code, bits;
    uint64_t nbytes;
};

static struct {
    Object *dtype;
    uint8_t code, bits;
} dtypes[32];
static uint32_t dtypes_count;

static bool dtype_of(Object *dtype, Geometry &made) {
    for (uint32_t i = 0; i < dtypes_count; i++) {
        if (dtypes[i].dtype == dtype) {
            made.code = dtypes[i].code;
            made.bits = dtypes[i].bits;
            return true;
        }
    }
    return false;
}

static bool numbers_of(Object *tuple, int64_t *numbers, Count count) {
    bool listed = type_of(tuple) == is.list_type;
    if (!listed && (type_of(tuple) == is.int_type || type_of(tuple) == is.none)) return false;
    for (Count i = 0; i < count; i++) {
        Object *one = listed ? py.list_get(tuple, i) : py.tuple_get(tuple, i);
        if (!one || type_of(one) != is.int_type) return false;
        numbers[i] = py.long_as(one);
        if (numbers[i] == -1 && py.error()) return false;  // larger than 64 bits
    }
    return true;
}

// (sizes, strides, dtype, nbytes), as of tensors.sized_tensor; false: leave it to Python.
static bool geometry_of(Object *sizes, Object *strides, Object *dtype, Object *nbytes, Geometry &made) {
    Count rank = type_of(sizes) == is.list_type ? py.list_size(sizes) : py.tuple_size(sizes);
    Count other = type_of(strides) == is.list_type ? py.list_size(strides) : py.tuple_size(strides);
    bool fine = rank >= 0 && rank <= MOST_RANK && rank == other && type_of(nbytes) == is.int_type && dtype_of(dtype, made) &&
                numbers_of(sizes, made.sizes, rank) && numbers_of(strides, made.strides, rank);
    if (py.error()) py.clear_error();  // neither a tuple nor a list
    if (!fine) return false;
    made.rank = int32_t(rank);
    const int64_t size = py.long_as(nbytes);
    if (size == -1 && py.error()) py.clear_error();
    made.nbytes = uint64_t(size);
    return size > 0;
}

static Object *new_tensor(Geometry &geometry, uint64_t *address) {
    Buffer *buffer = take(geometry.nbytes);
    if (!buffer) return nullptr;
    *address = buffer->key << SHIFT;
    buffer->place.store(IN_TENSOR, std::memory_order_relaxed);
    DLManagedTensor &managed = buffer->managed;
    managed.tensor = {reinterpret_cast<void *>(*address), DL_OTHER_DEVICE, 0, geometry.rank, geometry.code, geometry.bits, 1,
                      geometry.sizes, geometry.strides, 0};
    managed.context = buffer;
    managed.deleter = deleted;
    Object *capsule = py.capsule_new(&managed, "dltensor", nullptr);
    Object *made = capsule ? py.call_with(from_dlpack, capsule, nullptr) : nullptr;
    if (capsule) py.dec_ref(capsule);
    if (!made) give_back(buffer);
    return made;
}
