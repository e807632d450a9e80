#include "lanes.h"

EXPORT void kernel(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const float* __restrict b0 = (const float*)buffers[0];
  const float* __restrict b1 = (const float*)buffers[1];
  const float* __restrict b2 = (const float*)buffers[2];
  float* __restrict b3 = (float*)buffers[3];
  for (whole item = begin; item < end; item++) {
    whole rest = item;
    const whole i1_begin = rest * ((1 * W) * 6);
    const whole i1_end = std::min<whole>(45, i1_begin + ((1 * W) * 6));
    alignas(64) float s1[((1 * W) * 6)] = {};
    { whole r0 = 0;
    for (; r0 + 8 <= 100; r0 += 8) {
      const float v3 = get(b0 + (r0));
      const float v4 = get(b1 + (r0));
      const float v5 = (v3 * v4);
      const float v7 = get(b0 + ((r0 + 1)));
      const float v8 = get(b1 + ((r0 + 1)));
      const float v9 = (v7 * v8);
      const float v11 = get(b0 + ((r0 + 2)));
      const float v12 = get(b1 + ((r0 + 2)));
      const float v13 = (v11 * v12);
      const float v15 = get(b0 + ((r0 + 3)));
      const float v16 = get(b1 + ((r0 + 3)));
      const float v17 = (v15 * v16);
      const float v19 = get(b0 + ((r0 + 4)));
      const float v20 = get(b1 + ((r0 + 4)));
      const float v21 = (v19 * v20);
      const float v23 = get(b0 + ((r0 + 5)));
      const float v24 = get(b1 + ((r0 + 5)));
      const float v25 = (v23 * v24);
      const float v27 = get(b0 + ((r0 + 6)));
      const float v28 = get(b1 + ((r0 + 6)));
      const float v29 = (v27 * v28);
      const float v31 = get(b0 + ((r0 + 7)));
      const float v32 = get(b1 + ((r0 + 7)));
      const float v33 = (v31 * v32);
      { whole i1 = i1_begin;
      for (; i1 + (1 * W) <= i1_end; i1 += (1 * W)) {
        const vf v6 = lanes(b2 + (i1 + r0 * 45));
        vf t2 = wide((v5 * v6));
        const vf v10 = lanes(b2 + (i1 + (r0 + 1) * 45));
        t2 = plus_product(t2, v9, v10);
        const vf v14 = lanes(b2 + (i1 + (r0 + 2) * 45));
        t2 = plus_product(t2, v13, v14);
        const vf v18 = lanes(b2 + (i1 + (r0 + 3) * 45));
        t2 = plus_product(t2, v17, v18);
        const vf v22 = lanes(b2 + (i1 + (r0 + 4) * 45));
        t2 = plus_product(t2, v21, v22);
        const vf v26 = lanes(b2 + (i1 + (r0 + 5) * 45));
        t2 = plus_product(t2, v25, v26);
        const vf v30 = lanes(b2 + (i1 + (r0 + 6) * 45));
        t2 = plus_product(t2, v29, v30);
        const vf v34 = lanes(b2 + (i1 + (r0 + 7) * 45));
        t2 = plus_product(t2, v33, v34);
        store(s1 + (i1) - i1_begin, load(s1 + (i1) - i1_begin) + t2);
      }
      for (; i1 < i1_end; i1 += W) {
        const whole i1_left = std::min<whole>(W, i1_end - i1);
        const vf v36 = lanes(b2 + (i1 + r0 * 45), i1_left);
        vf t35 = wide((v5 * v36));
        const vf v37 = lanes(b2 + (i1 + (r0 + 1) * 45), i1_left);
        t35 = plus_product(t35, v9, v37);
        const vf v38 = lanes(b2 + (i1 + (r0 + 2) * 45), i1_left);
        t35 = plus_product(t35, v13, v38);
        const vf v39 = lanes(b2 + (i1 + (r0 + 3) * 45), i1_left);
        t35 = plus_product(t35, v17, v39);
        const vf v40 = lanes(b2 + (i1 + (r0 + 4) * 45), i1_left);
        t35 = plus_product(t35, v21, v40);
        const vf v41 = lanes(b2 + (i1 + (r0 + 5) * 45), i1_left);
        t35 = plus_product(t35, v25, v41);
        const vf v42 = lanes(b2 + (i1 + (r0 + 6) * 45), i1_left);
        t35 = plus_product(t35, v29, v42);
        const vf v43 = lanes(b2 + (i1 + (r0 + 7) * 45), i1_left);
        t35 = plus_product(t35, v33, v43);
        store(s1 + (i1) - i1_begin, load(s1 + (i1) - i1_begin) + t35);
      }
      }
    }
    for (; r0 < 100; r0++) {
      const float v45 = get(b0 + (r0));
      const float v46 = get(b1 + (r0));
      const float v47 = (v45 * v46);
      { whole i1 = i1_begin;
      for (; i1 + (1 * W) <= i1_end; i1 += (1 * W)) {
        const vf v48 = lanes(b2 + (i1 + r0 * 45));
        vf t44 = wide((v47 * v48));
        store(s1 + (i1) - i1_begin, load(s1 + (i1) - i1_begin) + t44);
      }
      for (; i1 < i1_end; i1 += W) {
        const whole i1_left = std::min<whole>(W, i1_end - i1);
        const vf v50 = lanes(b2 + (i1 + r0 * 45), i1_left);
        vf t49 = wide((v47 * v50));
        store(s1 + (i1) - i1_begin, load(s1 + (i1) - i1_begin) + t49);
      }
      }
    }
    }
    float s52 = 0.0f;
    auto s52_few = s52;
    int n53 = 0;
    { whole r0 = 0;
    for (; r0 + 8 <= 100; r0 += 8) {
      const float v54 = get(b0 + (r0));
      const float v55 = g_square(v54);
      const float v56 = get(b0 + ((r0 + 1)));
      const float v57 = g_square(v56);
      const float v58 = get(b0 + ((r0 + 2)));
      const float v59 = g_square(v58);
      const float v60 = get(b0 + ((r0 + 3)));
      const float v61 = g_square(v60);
      const float v62 = get(b0 + ((r0 + 4)));
      const float v63 = g_square(v62);
      const float v64 = get(b0 + ((r0 + 5)));
      const float v65 = g_square(v64);
      const float v66 = get(b0 + ((r0 + 6)));
      const float v67 = g_square(v66);
      const float v68 = get(b0 + ((r0 + 7)));
      const float v69 = g_square(v68);
      s52_few = s52_few + (((v55 + v57) + (v59 + v61)) + ((v63 + v65) + (v67 + v69)));
      if (++n53 == 64) { n53 = 0; s52 = s52 + s52_few; s52_few = 0.0f; }
    }
    for (; r0 < 100; r0++) {
      const float v70 = get(b0 + (r0));
      const float v71 = g_square(v70);
      s52_few = s52_few + v71;
      if (++n53 == 64) { n53 = 0; s52 = s52 + s52_few; s52_few = 0.0f; }
    }
    }
    s52 = s52 + s52_few;
    const float v72 = (float)(100);
    const float v73 = (s52 / v72);
    const float v74 = (v73 + 1e-06f);
    const float v75 = g_rsqrt(v74);
    { whole i1 = i1_begin;
    for (; i1 + (1 * W) <= i1_end; i1 += (1 * W)) {
      const vf v51 = load(s1 + (i1) - i1_begin);
      const vf v76 = (wide(v51) * wide(v75));
      put_lanes(b3 + (i1), wide(v76));
    }
    for (; i1 < i1_end; i1 += W) {
      const whole i1_left = std::min<whole>(W, i1_end - i1);
      const vf v77 = load(s1 + (i1) - i1_begin);
      const vf v78 = (wide(v77) * wide(v75));
      put_lanes(b3 + (i1), wide(v78), i1_left);
    }
    }
  }
}
