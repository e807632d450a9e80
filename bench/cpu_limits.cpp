// The most that cores can read and compute: for floors that no correct result is faster than.
#include "lanes.h"

#define MANY 8  // sums that do not wait for each other

// Each item reads its part of the numbers, `sizes[1]` times, and leaves their sum.
EXPORT void read_all(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const int64_t part = sizes[0], rounds = sizes[1];
  for (int64_t item = begin; item < end; item++) {
    const float* numbers = (const float*)buffers[0] + item * part;
    float found = 0.0f;
    for (int64_t round = 0; round < rounds; round++) {
      vf sums[MANY];
      for (int n = 0; n < MANY; n++) sums[n] = fill(0.0f);
      for (int64_t i = 0; i < part; i += MANY * W)
        for (int n = 0; n < MANY; n++) sums[n] = sums[n] + lanes(numbers + i + n * W);
      vf all = sums[0];
      for (int n = 1; n < MANY; n++) all = all + sums[n];
      found = sum(all);
      asm volatile("" : "+r"(numbers) : "m"(found) : "memory");  // every round is computed, and reads anew
    }
    ((float*)buffers[1])[item] = found;
  }
}

// Each item adds `sizes[0]` products to each of its sums, `sizes[1]` times, and leaves the operations of one time.
EXPORT void multiply_all(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const int64_t count = sizes[0], rounds = sizes[1];
  for (int64_t item = begin; item < end; item++) {
    vf sums[MANY];
    for (int n = 0; n < MANY; n++) sums[n] = fill((float)n);
    const vf x = fill(0.5f), y = fill(1.0f);
    for (int64_t round = 0; round < rounds; round++)
      for (int64_t i = 0; i < count; i++)
        for (int n = 0; n < MANY; n++) sums[n] = plus_product(y, sums[n], x);
    vf all = sums[0];
    for (int n = 1; n < MANY; n++) all = all + sums[n];
    ((float*)buffers[0])[item] = sum(all) < 0.0f ? 0.0f : 2.0f * W * MANY * (float)count;
  }
}
