// The launch path of small ops (gpu/launcher.py) without Python code between its steps: a key, a plan, a new tensor, a recorded
// launch. Everything it calls is handed in as addresses: Python's stable C interface, WebGPU's, and a few C functions that read a
// tensor. Nothing is linked, so one library serves every Python and every torch. Tensors are made by DLPack, whose structures are
// a C interface too.
//
// Whatever is unusual goes to Python, which computes the same: an argument that is not a plain tensor or number, a geometry not
// seen before, a recording or a profile under way. All functions but `give_back` are called with the GIL held.
#if !defined(_WIN32)
#include <unistd.h>
#endif

#include "kernels.h"

static void free_plan(Object *capsule) {
    Plan *plan = static_cast<Plan *>(py.capsule_get(capsule, nullptr));
    drop(plan->program);
    free(plan);
}

// plan(program, pipeline, layout, x, y, buffers, at_starts, head, codes, shifts, result or None) → capsule, or None: it is too
// large for this library.
static Object *make_plan(Object *, Object *const *args, Count) {
    Plan made;
    memset(&made, 0, sizeof made);
    made.program = args[0];
    made.pipeline = reinterpret_cast<void *>(py.long_as(args[1]));
    made.layout = uint64_t(py.long_as(args[2]));
    made.x = uint32_t(py.long_as(args[3])), made.y = uint32_t(py.long_as(args[4]));
    const int64_t buffers = py.long_as(args[5]), head = py.long_as(args[7]);
    Count size = py.bytes_size(args[6]), codes = py.bytes_size(args[8]), shifts = py.bytes_size(args[9]);
    if (py.error()) return nullptr;
    if (buffers < 0 || buffers > MOST_BUFFERS || head < 0 || head > size || size > Count(MOST_BYTES) ||
        codes > Count(MOST_NUMBERS) || shifts > Count(MOST_BUFFERS))
        return nothing();
    made.buffers = uint32_t(buffers), made.head = uint32_t(head);
    made.size = uint32_t(size), made.numbers = uint32_t(codes), made.places = uint32_t(shifts);
    memcpy(made.at_starts, py.bytes_as(args[6]), size);
    memcpy(made.codes, py.bytes_as(args[8]), codes);
    memcpy(made.shifts, py.bytes_as(args[9]), shifts);
    for (Count i = 0; i < codes; i++) made.numbers_size += nbytes_of(made.codes[i]);
    for (Count i = 0; i < shifts; i++)
        if (made.shifts[i] >= SHIFT) return nothing();
    if (made.head + made.numbers_size + 4 * made.places > made.size) return nothing();
    if (args[10] != is.none && type_of(args[10]) == is.tuple_type && py.tuple_size(args[10]) == 4) {
        Object *part[4];
        for (int i = 0; i < 4; i++) part[i] = py.tuple_get(args[10], i);
        made.makes = geometry_of(part[0], part[1], part[2], part[3], made.result);
    }
    Plan *kept = static_cast<Plan *>(malloc(sizeof made));
    if (!kept) return nothing();
    *kept = made;
    Object *capsule = py.capsule_new(kept, nullptr, free_plan);
    if (capsule) {
        py.inc_ref(made.program);
    } else {
        free(kept);
    }
    return capsule;
}

// launch(plan, addresses, *numbers)
static Object *launch(Object *, Object *const *args, Count count) {
    Plan *plan = static_cast<Plan *>(py.capsule_get(args[0], nullptr));
    if (!plan) return nullptr;
    if (!runtime.bind) {
        py.set_error(is.type_error, "a launch was asked for without a device");
        return nullptr;
    }
    bool listed = type_of(args[1]) == is.list_type;
    Count operands = listed ? py.list_size(args[1]) : py.tuple_size(args[1]);
    if (operands < 0) return nullptr;
    if (operands != Count(plan->buffers) || count - 2 != Count(plan->numbers)) {
        py.set_error(is.type_error, "a launch was given other operands than its plan has");
        return nullptr;
    }
    uint64_t addresses[MOST_BUFFERS];
    for (Count i = 0; i < operands; i++)
        addresses[i] = uint64_t(py.long_as(listed ? py.list_get(args[1], i) : py.tuple_get(args[1], i)));
    uint8_t numbers[8 * MOST_NUMBERS], *at = numbers;
    for (uint32_t i = 0; i < plan->numbers; i++) packed_number(args[2 + i], plan->codes[i], at, false);
    if (py.error()) return nullptr;
    return record(plan, addresses, uint32_t(operands), numbers) == RECORDED ? nothing() : nullptr;
}

// tensor(size, stride, dtype, nbytes) → a new tensor
static Object *make_tensor(Object *, Object *const *args, Count count) {
    Geometry geometry;
    uint64_t address;
    if (count == 4 && runtime.bind && geometry_of(args[0], args[1], args[2], args[3], geometry)) return new_tensor(geometry, &address);
    Object *tuple = py.tuple_new(count);
    for (Count i = 0; tuple && i < count; i++) py.inc_ref(args[i]), py.tuple_set(tuple, i, args[i]);
    Object *made = tuple ? py.call(tensor_python, tuple, nullptr) : nullptr;
    if (tuple) py.dec_ref(tuple);
    return made;
}

// add(buffer, key, handle, nbytes)
static Object *add(Object *, Object *const *args, Count) {
    uint64_t key = uint64_t(py.long_as(args[1]));
    Buffer **place = place_of(key, true);
    if (py.error()) return nullptr;
    if (!place || known(key)) return nothing();
    void *memory = calloc(1, sizeof(Buffer));
    if (!memory) return nothing();
    Buffer *buffer = static_cast<Buffer *>(memory);
    buffer->key = key;
    buffer->epoch = epoch;
    buffer->handle = reinterpret_cast<void *>(py.long_as(args[2]));
    buffer->nbytes = uint64_t(py.long_as(args[3]));
    py.inc_ref(args[0]);
    buffer->object = args[0];
    *place = buffer;
    return nothing();
}

// remove(key): the buffer is destroyed; nobody has it, and it is in no list
static Object *remove_buffer(Object *, Object *const *args, Count) {
    Buffer *buffer = known(uint64_t(py.long_as(args[0])));
    if (buffer) forget(buffer);
    return nothing();
}

// pin(key, pins)
static Object *pin(Object *, Object *const *args, Count) {
    Buffer *buffer = known(uint64_t(py.long_as(args[0])));
    if (buffer) buffer->pins.store(int32_t(py.long_as(args[1])), std::memory_order_relaxed);
    return nothing();
}

// returned() → [buffer, …] that tensors have given back since the last call
static Object *drain(Object *, Object *const *, Count) {
    Object *made = py.list_new(0);
    if (!made) return nullptr;
    Buffer *all = nullptr;
    {
        Turn turn;
        all = all_returned();
    }
    while (all) {
        Buffer *one = all;
        all = one->next;
        if (one->epoch != epoch) {
            forget(one);
            continue;
        }
        one->place.store(ELSEWHERE, std::memory_order_relaxed);
        py.list_append(made, one->object);
    }
    return made;
}

// reused() → how many buffers were handed out again by this library
static Object *count_reused(Object *, Object *const *, Count) { return py.long_from(static_cast<long long>(reused)); }

// forget_groups(): they are released
static Object *forget_groups(Object *, Object *const *, Count) {
    if (groups) memset(groups, 0, GROUPS * sizeof(Group));
    groups_count = 0;
    return nothing();
}

// use_pass(pass): record into it; 0: there is none
static Object *use_pass(Object *, Object *const *args, Count) {
    pass = reinterpret_cast<void *>(py.long_as(args[0]));
    pipeline = nullptr;
    return nothing();
}

// watch(yes): let every launch go through Python, or no longer
static Object *watch(Object *, Object *const *args, Count) {
    watched = py.long_as(args[0]) != 0;
    pipeline = nullptr;
    return nothing();
}

// refill(launches) → how many were recorded since the last time; after `launches` more, `look` is called
static Object *refill(Object *, Object *const *args, Count) {
    int64_t made = granted - budget;
    granted = budget = py.long_as(args[0]);
    return py.long_from(made);
}

// Is this the first call in a child of fork?
static bool forked() {
#if defined(_WIN32)
    return false;
#else
    static pid_t mine = getpid();
    const pid_t before = mine;
    mine = getpid();
    return mine != before;
#endif
}

// attach(acquire, release, dispatch, bind, look, missing); attach() leaves the runtime
static Object *attach(Object *, Object *const *args, Count count) {
    Object **all[] = {&runtime.acquire, &runtime.release, &runtime.dispatch, &runtime.bind, &runtime.look, &runtime.missing};
    for (int i = 0; i < 6; i++) {
        Object *before = *all[i];
        *all[i] = i < count ? args[i] : nullptr;
        if (*all[i]) py.inc_ref(*all[i]);
        if (before) py.dec_ref(before);
    }
    pass = pipeline = nullptr;
    watched = false;
    granted = budget = 1;
    const bool child = forked();
    if (child) returning.clear();  // the thread that held it is not in this process; else it is to be waited for
    {
        Turn turn;
        epoch++;
        others = all_returned();  // none of them is handed out again
    }
    outdated = recording != 0 && !child;
    if (!recording && !child) sweep();  // in a child the device is its parent's: nothing of it may be freed there
    py.dec_ref(forget_plans(nullptr, nullptr, 0));
    return forget_groups(nullptr, nullptr, 0);
}

struct Method {  // PyMethodDef
    const char *name;
    void *function;
    int flags;
    const char *doc;
};
static const int FAST = 0x80, WITH_OPTIONS = 0x01 | 0x02;
static Method kernel_method = {"kernel", reinterpret_cast<void *>(kernel), WITH_OPTIONS, nullptr};

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
__attribute__((visibility("default"))) Method methods[] = {
    {"plan", reinterpret_cast<void *>(make_plan), FAST, nullptr},
    {"launch", reinterpret_cast<void *>(launch), FAST, nullptr},
    {"tensor", reinterpret_cast<void *>(make_tensor), FAST, nullptr},
    {"add", reinterpret_cast<void *>(add), FAST, nullptr},
    {"remove", reinterpret_cast<void *>(remove_buffer), FAST, nullptr},
    {"pin", reinterpret_cast<void *>(pin), FAST, nullptr},
    {"returned", reinterpret_cast<void *>(drain), FAST, nullptr},
    {"reused", reinterpret_cast<void *>(count_reused), FAST, nullptr},
    {"forget_groups", reinterpret_cast<void *>(forget_groups), FAST, nullptr},
    {"forget_plans", reinterpret_cast<void *>(forget_plans), FAST, nullptr},
    {"use_pass", reinterpret_cast<void *>(use_pass), FAST, nullptr},
    {"watch", reinterpret_cast<void *>(watch), FAST, nullptr},
    {"refill", reinterpret_cast<void *>(refill), FAST, nullptr},
    {"attach", reinterpret_cast<void *>(attach), FAST, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
}

// Addresses of functions and objects, in the order of the structures above. Called once, with the GIL held.
EXPORT void use_python(void *const *functions, Object *const *objects, void *const *webgpu) {
    memcpy(&py, functions, sizeof py);
    memcpy(&is, objects, sizeof is);
    memcpy(&gpu, webgpu, sizeof gpu);
}

struct Dtype {
    Object *dtype;
    uint64_t code, bits;
};

EXPORT void use_tensors(void *const *readers, size_t handle, Object *const *objects, const Dtype *all, size_t count) {
    memcpy(&tensor_of, readers, sizeof tensor_of);
    handle_at = handle;
    tensor_type = objects[0], parameter_type = objects[1], from_dlpack = objects[2];
    take_python = objects[3], tensor_python = objects[4];
    for (int i = 0; i < 5; i++) py.inc_ref(objects[i]);
    dtypes_count = 0;
    for (size_t i = 0; i < count && i < sizeof dtypes / sizeof *dtypes; i++)
        dtypes[dtypes_count++] = {all[i].dtype, uint8_t(all[i].code), uint8_t(all[i].bits)};
}

// What `PyCFunction_NewEx` makes a kernel of: the method, and (returned) the op for its capsule.
EXPORT void *kernel_of(Object *otherwise, Object *plan_of, uint32_t least, uint32_t most, int in_place, Method **method) {
    Op *op = static_cast<Op *>(malloc(sizeof(Op)));
    if (!op) return nullptr;
    py.inc_ref(otherwise), py.inc_ref(plan_of);
    *op = {otherwise, plan_of, least, most, in_place != 0};
    *method = &kernel_method;
    return op;
}
