// What the drivers share: numbers from an input, memory of exactly the right size, and promises that must hold.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define REQUIRE(condition)                                                              \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition);      \
      std::abort();                                                                     \
    }                                                                                   \
  } while (0)

int one(const uint8_t* data, size_t size);

// Numbers from an input, in its order; zeros after its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  bool flag() { return byte() & 1; }
  // From `low` to `high`, both of them among the numbers.
  int64_t from(int64_t low, int64_t high) {
    uint64_t value = byte();
    if (high - low > 255) value |= uint64_t(byte()) << 8;
    return low + int64_t(value % uint64_t(high - low + 1));
  }
  int32_t word() { uint32_t value = 0; for (int i = 0; i < 4; i++) value = value << 8 | byte(); return int32_t(value); }
  bool ended() const { return at_ >= end_; }
  size_t left() const { return size_t(end_ - at_); }

 private:
  const uint8_t *at_, *end_;
};

// `count` values with nothing behind the last that may be read: not a vector, whose room may be larger.
template <class T>
struct Exact {
  explicit Exact(size_t n) : count(n), values(new T[n]()) {}
  T* data() { return values.get(); }
  T& operator[](size_t i) { return values[i]; }
  size_t size() const { return count; }
  size_t count;
  std::unique_ptr<T[]> values;
};

// Floats that are the same for the same seed; now and then one that few expect.
inline void fill(float* values, size_t count, uint32_t seed, bool odd) {
  static const float strange[] = {0.0f, -0.0f, 1e-40f, 1e30f, -3e38f, INFINITY, -INFINITY, NAN};
  uint32_t state = seed * 2654435769u + 1;
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    values[i] = float(int32_t(state)) / 2147483648.0f;
    if (odd && state >> 28 == 0) values[i] = strange[(state >> 12) & 7];
  }
}
