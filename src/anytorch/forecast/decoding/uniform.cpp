// Uniform doubles of torch's CPU generator (MT19937), many at a time.
//
// torch draws them one by one through a virtual call, 4 to 8 ns each; a forecast of 20 samples needs 40,000 per step, which
// is longer than a small model's step takes on a GPU. Here 624 words are made and tempered at once, in loops that compilers
// vectorise. The numbers and the state afterwards are torch's, bit for bit.

#include <cstdint>

namespace {

constexpr int WORDS = 624, APART = 397;

inline uint32_t mixed(uint32_t high, uint32_t low) {
    const uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (both >> 1) ^ ((0u - (low & 1u)) & 0x9908b0dfu);
}

void next_state(uint32_t *state) {
    for (int i = 0; i < WORDS - APART; ++i) state[i] = state[i + APART] ^ mixed(state[i], state[i + 1]);
    // What is read behind `i` was written 227 words ago: far enough for any vector.
#pragma GCC ivdep
    for (int i = WORDS - APART; i < WORDS - 1; ++i) state[i] = state[i + APART - WORDS] ^ mixed(state[i], state[i + 1]);
    state[WORDS - 1] = state[APART - 1] ^ mixed(state[WORDS - 1], state[0]);
}

inline uint32_t tempered(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

inline double number(uint32_t first, uint32_t second) {
    const uint64_t both = (static_cast<uint64_t>(first) << 32) | second;
    return static_cast<double>(static_cast<int64_t>(both & ((uint64_t{1} << 53) - 1))) * 0x1p-53;
}

}  // namespace

// `state` [624] and `next`, the word that comes next (624: none is left), are read and written.
extern "C" __attribute__((visibility("default"))) void uniform(uint32_t *state, int32_t *next, double *out, int64_t count) {
    uint32_t words[WORDS];
    int place = *next;
    for (int i = 0; i < WORDS; ++i) words[i] = tempered(state[i]);
    const auto refill = [&] {
        next_state(state);
        for (int i = 0; i < WORDS; ++i) words[i] = tempered(state[i]);
        place = 0;
    };
    for (int64_t done = 0; done < count;) {
        if (WORDS - place < 2) {  // the two words of a number lie in two states, or none is left
            const bool one = place < WORDS;
            const uint32_t first = one ? words[place] : 0;
            refill();
            if (one) out[done++] = number(first, words[place++]);
            continue;
        }
        const int64_t pairs = (WORDS - place) / 2, many = pairs < count - done ? pairs : count - done;
        for (int64_t i = 0; i < many; ++i) out[done + i] = number(words[place + 2 * i], words[place + 2 * i + 1]);
        place += static_cast<int>(2 * many);
        done += many;
    }
    *next = place;
}
