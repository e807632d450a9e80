// The hot path of elementwise ops: arguments in, a key, a plan found by it, a new tensor, a launch.
#pragma once
#include "launches.h"

static const uint32_t MOST_OPERANDS = 4, MOST_WORDS = 2 + MOST_OPERANDS * (1 + 2 * MOST_RANK), MOST_ENTRIES = 8192;

struct Entry {
    uint64_t hash;
    uint32_t words;
    Plan *plan;
    Object *owner;  // the plan's capsule
    uint64_t key[];
};
static Entry **entries;
static uint32_t entries_count;

// forget_plans()
static Object *forget_plans(Object *, Object *const *, Count) {
    Entry **all = entries;
    entries = nullptr;
    entries_count = 0;
    if (all) {
        for (uint32_t i = 0; i < 2 * MOST_ENTRIES; i++) {
            if (all[i]) drop(all[i]->owner), free(all[i]);
        }
        free(all);
    }
    return nothing();
}

struct Op {
    Object *otherwise, *plan_of;  // what computes the same, and (*args) → its plan's capsule, or None
    uint32_t least, most;
    bool in_place;
};

// Computes op(*args) as the Python kernel `otherwise` does, which gets everything that is not a plain call of a known geometry.
static Object *kernel(Object *self, Object *args, Object *options) {
    Op *op = static_cast<Op *>(py.capsule_get(self, nullptr));
    Count count = py.tuple_size(args);
    if (!runtime.bind || (options && py.dict_size(options)) || count < Count(op->least) || count > Count(op->most) ||
        count > Count(MOST_OPERANDS))
        return py.call(op->otherwise, args, options);
    uint64_t key[MOST_WORDS], addresses[MOST_OPERANDS + 1], bits = 0, kinds = 0;
    uint32_t words = 2, tensors = 0, scalars = 0;
    Object *numbers[MOST_OPERANDS];
    for (Count i = 0; i < count; i++) {
        Object *value = py.tuple_get(args, i), *type = type_of(value);
        if (type == tensor_type || type == parameter_type) {
            void *handle = static_cast<char *>(value) + handle_at, *data;
            int64_t rank, *sizes, *strides;
            int32_t dtype;
            if (tensor_of.data(handle, &data) || tensor_of.rank(handle, &rank) || rank > MOST_RANK || tensor_of.sizes(handle, &sizes) ||
                tensor_of.strides(handle, &strides) || tensor_of.dtype(handle, &dtype) || !(reinterpret_cast<uint64_t>(data) & TAG))
                return py.call(op->otherwise, args, options);
            addresses[tensors++] = reinterpret_cast<uint64_t>(data);
            bits |= reinterpret_cast<uint64_t>(data);
            key[words++] = uint64_t(dtype) << 8 | uint64_t(rank);
            for (int64_t d = 0; d < rank; d++) key[words++] = uint64_t(sizes[d]);
            for (int64_t d = 0; d < rank; d++) key[words++] = uint64_t(strides[d]);
            kinds = kinds << 3 | 1;
        } else if (type == is.float_type) {
            numbers[scalars++] = value;
            kinds = kinds << 3 | 2;
        } else if (type == is.int_type) {
            long long number = py.long_as(value);
            if (py.error()) {  // larger than 64 bits
                py.clear_error();
                return py.call(op->otherwise, args, options);
            }
            numbers[scalars++] = value;
            kinds = kinds << 3 | (number >= INT32_MIN && number <= INT32_MAX ? 3 : 4);
        } else {
            return py.call(op->otherwise, args, options);
        }
    }
    if (!tensors || (op->in_place && (kinds >> 3 * (count - 1)) != 1)) return py.call(op->otherwise, args, options);
    uint64_t shared = 0;
    if (op->in_place) {  // two bits per operand in the output's buffer: at the same place, or elsewhere (as in pointwise.run)
        for (uint32_t i = 0; i < tensors; i++) {
            if (addresses[i] >> SHIFT == addresses[0] >> SHIFT) shared |= uint64_t(addresses[i] == addresses[0] ? 1 : 2) << 2 * i;
        }
    }
    key[0] = reinterpret_cast<uint64_t>(op);
    key[1] = kinds << 16 | shared << 4 | (bits & 15);
    uint64_t hash = 0xCBF29CE484222325ull;
    for (uint32_t i = 0; i < words; i++) hash = (hash ^ key[i]) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 32;
    Entry *entry = nullptr;
    if (entries) {
        for (uint32_t at = uint32_t(hash) & (2 * MOST_ENTRIES - 1); entries[at]; at = (at + 1) & (2 * MOST_ENTRIES - 1)) {
            Entry *one = entries[at];
            if (one->hash == hash && one->words == words && !memcmp(one->key, key, words * sizeof *key)) {
                entry = one;
                break;
            }
        }
    }
    if (!entry) {
        Object *made = py.call(op->otherwise, args, options);
        if (!made) return nullptr;
        Object *owner = py.call(op->plan_of, args, nullptr);  // the capsule of a plan, or None
        if (!owner) {
            py.dec_ref(made);
            return nullptr;
        }
        Plan *plan = owner == is.none ? nullptr : static_cast<Plan *>(py.capsule_get(owner, nullptr));
        // The result is an operand of every plan; so are all tensors, and all numbers.
        if (!plan || plan->buffers != tensors + 1 || plan->numbers != scalars || (!op->in_place && !plan->makes)) {
            py.dec_ref(owner);
            return made;
        }
        if (entries_count >= MOST_ENTRIES) py.dec_ref(forget_plans(nullptr, nullptr, 0));
        if (!entries) entries = static_cast<Entry **>(calloc(2 * MOST_ENTRIES, sizeof(Entry *)));
        Entry *kept = entries ? static_cast<Entry *>(malloc(sizeof(Entry) + words * sizeof *key)) : nullptr;
        if (!kept) {
            py.dec_ref(owner);
            return made;
        }
        kept->hash = hash, kept->words = words, kept->plan = plan, kept->owner = owner;
        memcpy(kept->key, key, words * sizeof *key);
        uint32_t at = uint32_t(hash) & (2 * MOST_ENTRIES - 1);
        while (entries[at]) at = (at + 1) & (2 * MOST_ENTRIES - 1);
        entries[at] = kept;
        entries_count++;
        return made;
    }
    Plan *plan = entry->plan;
    uint8_t packed[8 * MOST_OPERANDS], *at = packed;
    for (uint32_t i = 0; i < scalars; i++) {
        if (!packed_number(numbers[i], plan->codes[i], at, true)) return py.call(op->otherwise, args, options);
    }
    if (py.error()) {  // a number too large for what it is computed in: Python clips it
        py.clear_error();
        return py.call(op->otherwise, args, options);
    }
    Object *owner = entry->owner, *made;
    py.inc_ref(owner);  // making a tensor may call Python, and that forget this entry
    if (op->in_place) {
        made = py.tuple_get(args, 0);
        py.inc_ref(made);
        addresses[tensors] = addresses[0];
    } else if (!(made = new_tensor(plan->result, &addresses[tensors]))) {
        py.dec_ref(owner);
        return nullptr;
    }
    Outcome outcome = record(plan, addresses, tensors + 1, packed);
    py.dec_ref(owner);
    if (outcome == RECORDED) return made;
    py.dec_ref(made);
    if (outcome == FAILED) return nullptr;
    py.clear_error();
    return py.call(op->otherwise, args, options);
}
