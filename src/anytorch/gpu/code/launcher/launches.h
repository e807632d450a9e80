// Plans as this library knows them, bind groups, and a launch recorded into the open pass.
#pragma once
#include "tensors.h"

static const uint32_t MOST_BUFFERS = 10, MOST_BYTES = 256, MOST_NUMBERS = 16;

struct Plan {
    Object *program;  // gpu.programs.Program, which owns the pipeline
    void *pipeline;
    uint64_t layout;
    uint32_t x, y, buffers, places, head, size;  // head and size in bytes
    uint32_t numbers, numbers_size;
    char codes[MOST_NUMBERS];
    uint8_t shifts[MOST_BUFFERS];
    uint8_t at_starts[MOST_BYTES];
    bool makes;
    Geometry result;
};

static void *pass, *pipeline;
static bool watched;
static int64_t budget = 1, granted = 1;

struct Group {
    uint64_t layout;
    uint32_t count, buffers[MOST_BUFFERS];
    void *handle;
};
static const uint32_t GROUPS = 1 << 15;
static Group *groups;
static uint32_t groups_count;

static Object *tuple_of(Buffer **buffers, uint32_t count) {
    Object *made = py.tuple_new(count);
    for (uint32_t i = 0; made && i < count; i++) {
        py.inc_ref(buffers[i]->object);
        py.tuple_set(made, i, buffers[i]->object);
    }
    return made;
}

static void *group_of(Plan *plan, Buffer **buffers, uint32_t count) {  // null: an error is set
    if (!groups && !(groups = static_cast<Group *>(calloc(GROUPS, sizeof(Group))))) {
        py.set_error(is.type_error, "no memory for bind groups");
        return nullptr;
    }
    uint64_t hash = plan->layout;
    for (uint32_t i = 0; i < count; i++) hash = (hash ^ buffers[i]->key) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    uint32_t at = uint32_t(hash) & (GROUPS - 1);
    for (; groups[at].handle; at = (at + 1) & (GROUPS - 1)) {
        Group &one = groups[at];
        if (one.layout != plan->layout || one.count != count) continue;
        bool same = true;
        for (uint32_t i = 0; same && i < count; i++) same = one.buffers[i] == uint32_t(buffers[i]->key);
        if (same) return one.handle;
    }
    Object *tuple = tuple_of(buffers, count);
    Object *answer = tuple ? py.call_with(runtime.bind, plan->program, tuple, nullptr) : nullptr;
    if (tuple) py.dec_ref(tuple);
    if (!answer) return nullptr;
    void *handle = reinterpret_cast<void *>(py.long_as(answer));
    py.dec_ref(answer);
    if (!handle || py.error()) {
        if (!py.error()) py.set_error(is.type_error, "binding gave no group");
        return nullptr;
    }
    // Python may have forgotten groups meanwhile (`forget_groups`), and the place with them: look for one again.
    if (groups_count >= GROUPS / 2) {
        memset(groups, 0, GROUPS * sizeof(Group));
        groups_count = 0;
    }
    for (at = uint32_t(hash) & (GROUPS - 1); groups[at].handle; at = (at + 1) & (GROUPS - 1)) {}
    Group &one = groups[at];
    one.layout = plan->layout;
    one.count = count;
    for (uint32_t i = 0; i < count; i++) one.buffers[i] = uint32_t(buffers[i]->key);
    one.handle = handle;
    groups_count++;
    return handle;
}

enum Outcome { RECORDED, TOO_LARGE, FAILED };  // an error is set in both of the others; TOO_LARGE: and nothing was recorded

static Outcome failed() { return py.is_error(is.too_large) ? TOO_LARGE : FAILED; }

static Outcome record_locked(Plan *plan, Buffer **buffers, uint32_t count, const uint8_t *bytes) {
    if (!pass || watched) {
        Object *tuple = tuple_of(buffers, count), *data = py.bytes_from(reinterpret_cast<const char *>(bytes), plan->size);
        Object *x = py.long_from(plan->x), *y = py.long_from(plan->y);
        Object *answer = tuple && data && x && y ? py.call_with(runtime.dispatch, plan->program, tuple, data, x, y, nullptr) : nullptr;
        drop(tuple), drop(data), drop(x), drop(y);
        if (!answer) return failed();
        py.dec_ref(answer);
        return RECORDED;
    }
    void *group = group_of(plan, buffers, count);
    if (!group) return failed();
    if (!pass) return record_locked(plan, buffers, count, bytes);  // binding has ended it
    if (pipeline != plan->pipeline) gpu.set_pipeline(pass, pipeline = plan->pipeline);
    gpu.set_bind_group(pass, 0, group, 0, nullptr);
    gpu.set_immediates(pass, 0, bytes, plan->size);
    gpu.dispatch(pass, plan->x, plan->y, 1);
    if (--budget > 0) return RECORDED;
    Object *answer = py.call_plain(runtime.look);
    if (!answer) return FAILED;
    py.dec_ref(answer);
    return RECORDED;
}

static uint32_t recording;  // records under way, which have buffers in their hands
static bool outdated;       // a runtime has gone meanwhile

static Outcome record_found(Plan *plan, const uint64_t *addresses, uint32_t count, const uint8_t *numbers) {
    const uint64_t began = epoch;
    Buffer *buffers[MOST_BUFFERS];
    uint64_t bits = 0;
    for (uint32_t i = 0; i < count; i++) {
        bits |= addresses[i];
        if (!(buffers[i] = find(addresses[i]))) return FAILED;
    }
    const uint8_t *bytes = plan->at_starts;
    uint8_t packed[MOST_BYTES];
    if (plan->numbers || bits & OFFSET) {
        memcpy(packed, plan->at_starts, plan->size);
        if (plan->numbers) memcpy(packed + plan->head, numbers, plan->numbers_size);
        uint8_t *at = packed + plan->head + plan->numbers_size;
        for (uint32_t i = 0; i < plan->places && i < count; i++, at += 4) {
            uint64_t place = (addresses[i] & OFFSET) >> plan->shifts[i];
            if (place >> 32) {
                py.set_error(is.type_error, "an operand begins too far into its buffer for a 32-bit parameter");
                return FAILED;
            }
            uint32_t word = uint32_t(place);
            memcpy(at, &word, 4);
        }
        bytes = packed;
    }
    Object *release = runtime.release;  // of this lock, whatever a reset puts into its place while we wait for it
    py.inc_ref(release);
    Object *held = py.call_plain(runtime.acquire);
    if (!held) {
        py.dec_ref(release);
        return FAILED;
    }
    py.dec_ref(held);
    bool there = true;  // but for a reset while we waited: then Python says what has become of them
    for (uint32_t i = 0; there && began != epoch && i < count; i++) there = (buffers[i] = find(addresses[i]));
    Outcome outcome = there ? record_locked(plan, buffers, count, bytes) : FAILED;
    Object *kind = nullptr, *value = nullptr, *trace = nullptr;
    if (outcome != RECORDED) py.fetch_error(&kind, &value, &trace);  // nothing may be called while an error is set
    Object *freed = py.call_plain(release);
    py.dec_ref(release);
    if (freed) py.dec_ref(freed);
    if (outcome != RECORDED) py.restore_error(kind, value, trace);
    return outcome == RECORDED && !freed ? FAILED : outcome;
}

static Outcome record(Plan *plan, const uint64_t *addresses, uint32_t count, const uint8_t *numbers) {
    recording++;
    const Outcome outcome = record_found(plan, addresses, count, numbers);
    if (!--recording && outdated) {
        outdated = false;
        Object *kind = nullptr, *value = nullptr, *trace = nullptr;
        py.fetch_error(&kind, &value, &trace);
        sweep();
        py.restore_error(kind, value, trace);
    }
    return outcome;
}

static uint32_t nbytes_of(char code) { return code == 'q' || code == 'Q' || code == 'd' ? 8 : 4; }

// One number as a parameter; false: Python must convert it (`strict`, of users' numbers; others are converted already).
static bool packed_number(Object *value, char code, uint8_t *&at, bool strict) {
    bool whole = type_of(value) == is.int_type;
    if (code == 'f' || code == 'd') {
        double number = whole ? py.long_as_double(value) : py.float_as(value);
        if (code == 'd') {
            memcpy(at, &number, 8), at += 8;
        } else {
            float single = float(number);  // beyond its range it is infinite, as in pointwise.clip
            memcpy(at, &single, 4), at += 4;
        }
        return true;
    }
    if (strict && !whole) return false;
    long long number = py.long_as(value);
    if (code == 'q' || code == 'Q') {
        memcpy(at, &number, 8), at += 8;
    } else {
        uint32_t word = uint32_t(number);
        memcpy(at, &word, 4), at += 4;
    }
    return true;
}
