// What the library is handed: functions of Python's stable C interface, of WebGPU's and of torch's, and a few objects.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef void Object;  // of Python
typedef ptrdiff_t Count;

static struct {  // in the order of launcher.py's PYTHON
    void (*inc_ref)(Object *);
    void (*dec_ref)(Object *);
    Object *(*long_from)(long long);
    long long (*long_as)(Object *);
    double (*long_as_double)(Object *);
    double (*float_as)(Object *);
    Object *(*tuple_new)(Count);
    int (*tuple_set)(Object *, Count, Object *);
    Object *(*tuple_get)(Object *, Count);
    Count (*tuple_size)(Object *);
    Object *(*list_new)(Count);
    int (*list_append)(Object *, Object *);
    Object *(*list_get)(Object *, Count);
    Count (*list_size)(Object *);
    Object *(*bytes_from)(const char *, Count);
    char *(*bytes_as)(Object *);
    Count (*bytes_size)(Object *);
    Object *(*capsule_new)(void *, const char *, void (*)(Object *));
    void *(*capsule_get)(Object *, const char *);
    Object *(*call)(Object *, Object *, Object *);
    Object *(*call_with)(Object *, ...);
    Object *(*call_plain)(Object *);
    Object *(*error)(void);
    void (*clear_error)(void);
    void (*set_error)(Object *, const char *);
    void (*fetch_error)(Object **, Object **, Object **);
    void (*restore_error)(Object *, Object *, Object *);
    Count (*dict_size)(Object *);
    int (*is_error)(Object *);
} py;

static struct {  // objects of Python, in the order of launcher.py's OBJECTS; types are compared by address
    Object *none, *int_type, *float_type, *bool_type, *tuple_type, *list_type, *type_error, *too_large;
} is;

static struct {  // WebGPU's functions, in the order of launcher.py's WEBGPU
    void (*set_pipeline)(void *, void *);
    void (*set_bind_group)(void *, uint32_t, void *, size_t, const uint32_t *);
    void (*set_immediates)(void *, uint32_t, const void *, size_t);
    void (*dispatch)(void *, uint32_t, uint32_t, uint32_t);
} gpu;

static struct {  // what reads a tensor (torch's C shim; each returns 0 if it could), in the order of webgpu/fast.py's READERS
    int32_t (*data)(void *, void **);
    int32_t (*rank)(void *, int64_t *);
    int32_t (*sizes)(void *, int64_t **);
    int32_t (*strides)(void *, int64_t **);
    int32_t (*dtype)(void *, int32_t *);
} tensor_of;

static Object *tensor_type, *parameter_type, *from_dlpack, *take_python, *tensor_python;
static size_t handle_at;  // where in a tensor's Python object its C++ one is

// What a runtime calls back, and its lock.
static struct {
    Object *acquire, *release, *dispatch, *bind, *look, *missing;
} runtime;

static inline Object *type_of(Object *object) { return static_cast<Object **>(object)[1]; }
static inline void drop(Object *&object) {
    Object *held = object;
    object = nullptr;
    if (held) py.dec_ref(held);
}

static Object *nothing() {
    py.inc_ref(is.none);
    return is.none;
}
