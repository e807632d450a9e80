// Moving texts' tokens and rows of vectors between arrays: what NumPy does by an index per element, and holding the GIL.

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// The ids of the texts at `places`, one after the other, and where each starts: out_starts [count + 1].
EXPORT void moves_gather(const int32_t* ids, const int32_t* starts, const int64_t* places, int64_t count, int32_t* out,
                         int32_t* out_starts) {
    int64_t total = 0;
    out_starts[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = places[i];
        const int64_t length = starts[place + 1] - starts[place];
        std::memcpy(out + total, ids + starts[place], length * sizeof(int32_t));
        total += length;
        out_starts[i + 1] = static_cast<int32_t>(total);
    }
}

// Row i of `rows` to row places[i] of `out`, both of `width` bytes.
EXPORT void moves_scatter(const char* rows, int64_t width, const int64_t* places, int64_t count, char* out) {
    for (int64_t i = 0; i < count; i++) std::memcpy(out + places[i] * width, rows + i * width, width);
}
