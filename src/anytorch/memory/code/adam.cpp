// Adam and AdamW over weights that rest in host memory: one pass over w, g, m and v by several threads.
//
// The arithmetic is that of torch's fused CPU kernel, operation by operation, so that a run is the same to the last bit
// whichever of the two does the step (anytorch/memory/fused.py compares them before it uses this one). Every fused
// multiply-add is therefore written out, and the file is compiled with -ffp-contract=off.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

extern "C" {

// One tensor. Constants are already rounded to float by the caller's rules: see `_spans` in fused.py.
struct AdamSpan {
    void* weight;
    const void* gradient;
    void* mean;
    void* square;
    int64_t count;
    int32_t bfloat16;   // 1: all four are bfloat16, 0: float32
    int32_t decoupled;  // 1: AdamW's weight decay, 0: Adam's
    float decay;        // AdamW: 1 - lr * weight_decay; Adam: weight_decay, 0 for none
    float mean_rate;    // 1 - beta1, below one half
    float square_keep;  // beta2
    float square_rate;  // 1 - beta2
    float step_size;    // -lr / (1 - beta1^t)
    float correction;   // sqrt(1 - beta2^t)
    float epsilon;
    float scale;        // gradients are multiplied by it first (clipping), and rounded to their type
    int32_t scaled;
};
}

namespace {

constexpr int64_t CHUNK = 1 << 16;  // elements a thread takes at once: its four arrays fit the second-level cache

inline float widen(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To the nearest bfloat16, ties to even.
inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value == value ? uint16_t(rounded) : uint16_t(0xffff);
}

inline float load(const float* at) { return *at; }
inline float load(const uint16_t* at) { return widen(*at); }
inline void store(float* at, float value) { *at = value; }
inline void store(uint16_t* at, float value) { *at = narrow(value); }
inline float rounded(const float*, float value) { return value; }
inline float rounded(const uint16_t*, float value) { return widen(narrow(value)); }

template <typename T, bool DECOUPLED, bool SCALED>
void update(const AdamSpan& span, int64_t begin, int64_t end) {
    T* __restrict w = static_cast<T*>(span.weight) + begin;
    const T* __restrict g = static_cast<const T*>(span.gradient) + begin;
    T* __restrict m = static_cast<T*>(span.mean) + begin;
    T* __restrict v = static_cast<T*>(span.square) + begin;
    const float decay = span.decay, mean_rate = span.mean_rate, keep = span.square_keep, rate = span.square_rate;
    const float step = span.step_size, correction = span.correction, epsilon = span.epsilon, scale = span.scale;
    const bool coupled = !DECOUPLED && decay != 0.0f;
    const int64_t count = end - begin;
    for (int64_t i = 0; i < count; ++i) {
        float weight = load(w + i), gradient = load(g + i), mean = load(m + i), square = load(v + i);
        if (SCALED) gradient = rounded(g, gradient * scale);
        if (DECOUPLED) weight = weight * decay;
        else gradient = coupled ? __builtin_fmaf(weight, decay, gradient) : gradient;
        mean = __builtin_fmaf(mean_rate, gradient - mean, mean);
        square = __builtin_fmaf(rate * gradient, gradient, square * keep);
        const float spread = __builtin_sqrtf(square) / correction + epsilon;
        weight = weight + step * mean / spread;
        store(m + i, mean);
        store(v + i, square);
        store(w + i, weight);
    }
}

template <typename T>
void update_as(const AdamSpan& span, int64_t begin, int64_t end) {
    if (span.decoupled) {
        span.scaled ? update<T, true, true>(span, begin, end) : update<T, true, false>(span, begin, end);
    } else {
        span.scaled ? update<T, false, true>(span, begin, end) : update<T, false, false>(span, begin, end);
    }
}

struct Part {
    int64_t span, begin, end;
};

}  // namespace

// Updates all spans. Every element is computed by itself, so the result does not depend on the number of threads.
// Gives 0, or 1 where there is no memory for the list of parts: then nothing has been changed.
extern "C" __attribute__((visibility("default"))) int32_t anytorch_adam(const AdamSpan* spans, int64_t count,
                                                                        int32_t threads) {
    std::vector<Part> parts;
    try {  // no exception may leave for the C of the caller
        int64_t needed = 0;
        for (int64_t index = 0; index < count; ++index) needed += (spans[index].count - 1) / CHUNK + 1;
        parts.reserve(size_t(needed));
    } catch (const std::exception&) {
        return 1;
    }
    for (int64_t index = 0; index < count; ++index)
        for (int64_t at = 0; at < spans[index].count; at += CHUNK)
            parts.push_back({index, at, at + CHUNK < spans[index].count ? at + CHUNK : spans[index].count});
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t at; (at = next.fetch_add(1)) < parts.size();) {
            const Part& part = parts[at];
            const AdamSpan& span = spans[part.span];
            span.bfloat16 ? update_as<uint16_t>(span, part.begin, part.end) : update_as<float>(span, part.begin, part.end);
        }
    };
    if (threads > int32_t(parts.size())) threads = int32_t(parts.size());
    std::vector<std::thread> helpers;
    for (int32_t index = 1; index < threads; ++index) {
        try {
            helpers.emplace_back(work);
        } catch (...) {
            break;  // no more threads to be had: the others do the work
        }
    }
    work();
    for (auto& helper : helpers) helper.join();
    return 0;
}
