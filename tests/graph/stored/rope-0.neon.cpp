#include "lanes.h"

EXPORT void kernel(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const float* __restrict b0 = (const float*)buffers[0];
  const float* __restrict b1 = (const float*)buffers[1];
  const float* __restrict b2 = (const float*)buffers[2];
  float* __restrict b3 = (float*)buffers[3];
  const whole b = sizes[0]; (void)b;
  const whole s = sizes[1]; (void)s;
  for (whole item = begin; item < end; item++) {
    whole rest = item;
    const whole i3_begin = rest % ((16 + (1 * 16) - 1) / (1 * 16)) * (1 * 16); rest /= ((16 + (1 * 16) - 1) / (1 * 16));
    const whole i3_end = std::min<whole>(16, i3_begin + (1 * 16));
    const whole i2_begin = rest % (((s) + (1 * 5) - 1) / (1 * 5)) * (1 * 5); rest /= (((s) + (1 * 5) - 1) / (1 * 5));
    const whole i2_end = std::min<whole>((s), i2_begin + (1 * 5));
    const whole i1_begin = rest * (1 * 8);
    const whole i1_end = std::min<whole>((4*b), i1_begin + (1 * 8));
    const whole v2 = (8);
    { whole i1 = i1_begin;
    for (; i1 + 1 <= i1_end; i1 += 1) {
      { whole i2 = i2_begin;
      for (; i2 + 1 <= i2_end; i2 += 1) {
        { whole i3 = i3_begin;
        for (; i3 + 1 <= i3_end; i3 += 1) {
          const whole v1 = (i3);
          const whole v3 = (whole)(v1 < v2);
          const float v18 = (v3 != 0 ? [&] { const float v4 = get(b0 + (i1 * (16*s) + i2 * 16 + i3)); const float v5 = get(b1 + (i2 * 8 + i3)); const float v6 = (v4 * v5); const float v7 = get(b0 + (i1 * (16*s) + i2 * 16 + i3 + 8)); const float v8 = get(b2 + (i2 * 8 + i3)); const float v9 = (v7 * v8); const float v10 = (v6 - v9); return (float)v10; }() : [&] { const float v11 = get(b0 + (i1 * (16*s) + i2 * 16 + i3)); const float v12 = get(b1 + (i2 * 8 + i3 + (-8))); const float v13 = (v11 * v12); const float v14 = get(b0 + (i1 * (16*s) + i2 * 16 + i3 + (-8))); const float v15 = get(b2 + (i2 * 8 + i3 + (-8))); const float v16 = (v14 * v15); const float v17 = (v13 + v16); return (float)v17; }());
          put(b3 + (i1 * (16*s) + i2 * 16 + i3), v18);
        }
        }
      }
      }
    }
    }
  }
}
