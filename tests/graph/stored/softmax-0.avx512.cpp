#include "lanes.h"

EXPORT void kernel(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const float* __restrict b0 = (const float*)buffers[0];
  float* __restrict b1 = (float*)buffers[1];
  const whole b = sizes[0]; (void)b;
  for (whole item = begin; item < end; item++) {
    whole rest = item;
    const whole i1_begin = rest % ((100 + ((4 * W) * 2) - 1) / ((4 * W) * 2)) * ((4 * W) * 2); rest /= ((100 + ((4 * W) * 2) - 1) / ((4 * W) * 2));
    const whole i1_end = std::min<whole>(100, i1_begin + ((4 * W) * 2));
    const whole i0_begin = rest * (1 * 7);
    const whole i0_end = std::min<whole>((b), i0_begin + (1 * 7));
    { whole i0 = i0_begin;
    for (; i0 + 1 <= i0_end; i0 += 1) {
      float s2 = -INF;
      float s3 = 0.0f;
      auto s3_few = s3;
      int n4 = 0;
      { whole r0 = 0;
      for (; r0 + (4 * W) <= 100; r0 += (4 * W)) {
        const vf v5 = lanes(b0 + (i0 * 100 + r0));
        const vf v6 = lanes(b0 + (i0 * 100 + (r0 + 1 * W)));
        const vf v7 = lanes(b0 + (i0 * 100 + (r0 + 2 * W)));
        const vf v8 = lanes(b0 + (i0 * 100 + (r0 + 3 * W)));
        const auto s2_next = g_maximum(s2, g_largest(wide(g_maximum(g_maximum(g_maximum(v5, v6), v7), v8))));
        const float s2_safe = s2_next == -INF ? 0.0f : s2_next;
        const float s2_scale = g_exp(s2 - s2_safe);
        s2 = s2_next;
        s3 = s3 * s2_scale;
        s3_few = s3_few * s2_scale;
        const vf v9 = (wide(v5) - wide(s2_safe));
        const vf v10 = g_exp(wide(v9));
        const vf v11 = (wide(v6) - wide(s2_safe));
        const vf v12 = g_exp(wide(v11));
        const vf v13 = (wide(v7) - wide(s2_safe));
        const vf v14 = g_exp(wide(v13));
        const vf v15 = (wide(v8) - wide(s2_safe));
        const vf v16 = g_exp(wide(v15));
        s3_few = s3_few + sum(wide(v10));
        s3_few = s3_few + sum(wide(v12));
        s3_few = s3_few + sum(wide(v14));
        s3_few = s3_few + sum(wide(v16));
        if (++n4 == 64) { n4 = 0; s3 = s3 + s3_few; s3_few = 0.0f; }
      }
      for (; r0 < 100; r0 += W) {
        const whole r0_left = std::min<whole>(W, 100 - r0);
        const vf v17 = lanes(b0 + (i0 * 100 + r0), r0_left);
        const auto s2_next = g_maximum(s2, g_largest(wide(keep_first(wide(v17), (int)r0_left, fill(-INF)))));
        const float s2_safe = s2_next == -INF ? 0.0f : s2_next;
        const float s2_scale = g_exp(s2 - s2_safe);
        s2 = s2_next;
        s3 = s3 * s2_scale;
        s3_few = s3_few * s2_scale;
        const vf v18 = (wide(v17) - wide(s2_safe));
        const vf v19 = g_exp(wide(v18));
        s3_few = s3_few + sum(wide(keep_first(wide(v19), (int)r0_left, fill(0.0f))));
        if (++n4 == 64) { n4 = 0; s3 = s3 + s3_few; s3_few = 0.0f; }
      }
      }
      s3 = s3 + s3_few;
      { whole i1 = i1_begin;
      for (; i1 + (4 * W) <= i1_end; i1 += (4 * W)) {
        const vf v1 = lanes(b0 + (i0 * 100 + i1));
        const vf v20 = (wide(v1) - wide(s2));
        const vf v21 = g_exp(wide(v20));
        const vf v22 = (wide(v21) / wide(s3));
        put_lanes(b1 + (i0 * 100 + i1), wide(v22));
        const vf v23 = lanes(b0 + (i0 * 100 + (i1 + 1 * W)));
        const vf v24 = (wide(v23) - wide(s2));
        const vf v25 = g_exp(wide(v24));
        const vf v26 = (wide(v25) / wide(s3));
        put_lanes(b1 + (i0 * 100 + (i1 + 1 * W)), wide(v26));
        const vf v27 = lanes(b0 + (i0 * 100 + (i1 + 2 * W)));
        const vf v28 = (wide(v27) - wide(s2));
        const vf v29 = g_exp(wide(v28));
        const vf v30 = (wide(v29) / wide(s3));
        put_lanes(b1 + (i0 * 100 + (i1 + 2 * W)), wide(v30));
        const vf v31 = lanes(b0 + (i0 * 100 + (i1 + 3 * W)));
        const vf v32 = (wide(v31) - wide(s2));
        const vf v33 = g_exp(wide(v32));
        const vf v34 = (wide(v33) / wide(s3));
        put_lanes(b1 + (i0 * 100 + (i1 + 3 * W)), wide(v34));
      }
      for (; i1 < i1_end; i1 += W) {
        const whole i1_left = std::min<whole>(W, i1_end - i1);
        const vf v35 = lanes(b0 + (i0 * 100 + i1), i1_left);
        const vf v36 = (wide(v35) - wide(s2));
        const vf v37 = g_exp(wide(v36));
        const vf v38 = (wide(v37) / wide(s3));
        put_lanes(b1 + (i0 * 100 + i1), wide(v38), i1_left);
      }
      }
    }
    }
  }
}
