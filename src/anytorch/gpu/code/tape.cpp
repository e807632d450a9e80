// Launches of a tape, encoded into a compute pass: the same calls of WebGPU's C interface that tape.py makes one by one, without
// a millisecond of Python for every three hundred of them. The functions are handed in; nothing is linked.
#include <cstddef>
#include <cstdint>

struct Launch {
    void *pipeline;         // null: the one that is set already
    void *group;            // of bindings
    const void *immediates;
    uint32_t size;          // of the immediates, in bytes
    uint32_t x, y, z;       // workgroups
};

extern "C" __attribute__((visibility("default"))) void encode_launches(
    void *pass, const Launch *launches, size_t count, void (*set_pipeline)(void *, void *),
    void (*set_bind_group)(void *, uint32_t, void *, size_t, const uint32_t *),
    void (*set_immediates)(void *, uint32_t, const void *, size_t),
    void (*dispatch)(void *, uint32_t, uint32_t, uint32_t)) {
    for (size_t number = 0; number < count; number++) {
        const Launch &one = launches[number];
        if (one.pipeline) set_pipeline(pass, one.pipeline);
        set_bind_group(pass, 0, one.group, 0, nullptr);
        set_immediates(pass, 0, one.immediates, one.size);
        dispatch(pass, one.x, one.y, one.z);
    }
}
