#include "lanes.h"

EXPORT void kernel(void** buffers, const int64_t* sizes, int64_t begin, int64_t end) {
  const float* __restrict b0 = (const float*)buffers[0];
  const float* __restrict b1 = (const float*)buffers[1];
  const float* __restrict b2 = (const float*)buffers[2];
  float* __restrict b3 = (float*)buffers[3];
  const whole b = sizes[0]; (void)b;
  const whole n = sizes[1]; (void)n;
  const whole t = sizes[2]; (void)t;
  for (whole item = begin; item < end; item++) {
    whole rest = item;
    const whole i4_begin = rest % ((16 + ((2 * W) * 1) - 1) / ((2 * W) * 1)) * ((2 * W) * 1); rest /= ((16 + ((2 * W) * 1) - 1) / ((2 * W) * 1));
    const whole i4_end = std::min<whole>(16, i4_begin + ((2 * W) * 1));
    const whole i3_begin = rest % (((n) + (2 * 2) - 1) / (2 * 2)) * (2 * 2); rest /= (((n) + (2 * 2) - 1) / (2 * 2));
    const whole i3_end = std::min<whole>((n), i3_begin + (2 * 2));
    const whole i2_begin = rest % ((2 + (1 * 2) - 1) / (1 * 2)) * (1 * 2); rest /= ((2 + (1 * 2) - 1) / (1 * 2));
    const whole i2_end = std::min<whole>(2, i2_begin + (1 * 2));
    const whole i1_begin = rest % ((2 + (1 * 2) - 1) / (1 * 2)) * (1 * 2); rest /= ((2 + (1 * 2) - 1) / (1 * 2));
    const whole i1_end = std::min<whole>(2, i1_begin + (1 * 2));
    const whole i0_begin = rest * (1 * 1);
    const whole i0_end = std::min<whole>((b), i0_begin + (1 * 1));
    { whole i0 = i0_begin;
    for (; i0 + 1 <= i0_end; i0 += 1) {
      { whole i1 = i1_begin;
      for (; i1 + 1 <= i1_end; i1 += 1) {
        { whole i2 = i2_begin;
        for (; i2 + 1 <= i2_end; i2 += 1) {
          { whole i3 = i3_begin;
          for (; i3 + 2 <= i3_end; i3 += 2) {
            { whole i4 = i4_begin;
            for (; i4 + (2 * W) <= i4_end; i4 += (2 * W)) {
              float s1 = -INF;
              float s2 = -INF;
              vf s3 = fill(0.0f);
              vf s4 = fill(0.0f);
              vf s5 = fill(0.0f);
              vf s6 = fill(0.0f);
              float s7 = 0.0f;
              auto s7_few = s7;
              float s8 = 0.0f;
              auto s8_few = s8;
              int n9 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s10 = fill(0.0f);
                vf s11 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v13 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v14 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v15 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v16 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v17 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v18 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v19 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v20 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s10 = plus_product(s10, v13, v14);
                  s10 = plus_product(s10, v15, v16);
                  s10 = plus_product(s10, v17, v18);
                  s10 = plus_product(s10, v19, v20);
                  const vf v21 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v22 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v23 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v24 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s11 = plus_product(s11, v21, v14);
                  s11 = plus_product(s11, v22, v16);
                  s11 = plus_product(s11, v23, v18);
                  s11 = plus_product(s11, v24, v20);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v25 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v26 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s10 = s10 + keep_first(wide((v25 * v26)), (int)r1_left, fill(0.0f));
                  const vf v27 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s11 = s11 + keep_first(wide((v27 * v26)), (int)r1_left, fill(0.0f));
                }
                }
                const float s10_all = sum(s10);
                const float s11_all = sum(s11);
                const float v28 = (s10_all * 0.25f);
                const auto s1_next = g_maximum(s1, v28);
                const float s1_safe = s1_next == -INF ? 0.0f : s1_next;
                const float s1_scale = g_exp(s1 - s1_safe);
                s1 = s1_next;
                const float v29 = (s11_all * 0.25f);
                const auto s2_next = g_maximum(s2, v29);
                const float s2_safe = s2_next == -INF ? 0.0f : s2_next;
                const float s2_scale = g_exp(s2 - s2_safe);
                s2 = s2_next;
                s3 = s3 * s1_scale;
                const float v30 = (v28 - s1_safe);
                const float v31 = g_exp(v30);
                const vf v32 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s3 = plus_product(s3, v31, v32);
                s4 = s4 * s2_scale;
                const float v33 = (v29 - s2_safe);
                const float v34 = g_exp(v33);
                s4 = plus_product(s4, v34, v32);
                s5 = s5 * s1_scale;
                const vf v35 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 1 * W) + r0 * 16));
                s5 = plus_product(s5, v31, v35);
                s6 = s6 * s2_scale;
                s6 = plus_product(s6, v34, v35);
                s7 = s7 * s1_scale;
                s7_few = s7_few * s1_scale;
                s7_few = s7_few + v31;
                s8 = s8 * s2_scale;
                s8_few = s8_few * s2_scale;
                s8_few = s8_few + v34;
                if (++n9 == 64) { n9 = 0; s7 = s7 + s7_few; s7_few = 0.0f; s8 = s8 + s8_few; s8_few = 0.0f; }
              }
              }
              s7 = s7 + s7_few;
              s8 = s8 + s8_few;
              const vf v36 = (wide(s3) / wide(s7));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v36));
              const vf v37 = (wide(s4) / wide(s8));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v37));
              const vf v38 = (wide(s5) / wide(s7));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 1 * W)), wide(v38));
              const vf v39 = (wide(s6) / wide(s8));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (i4 + 1 * W)), wide(v39));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s40 = -INF;
              float s41 = -INF;
              vf s42 = fill(0.0f);
              vf s43 = fill(0.0f);
              float s44 = 0.0f;
              auto s44_few = s44;
              float s45 = 0.0f;
              auto s45_few = s45;
              int n46 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s47 = fill(0.0f);
                vf s48 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v50 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v51 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v52 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v53 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v54 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v55 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v56 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v57 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s47 = plus_product(s47, v50, v51);
                  s47 = plus_product(s47, v52, v53);
                  s47 = plus_product(s47, v54, v55);
                  s47 = plus_product(s47, v56, v57);
                  const vf v58 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v59 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v60 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v61 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s48 = plus_product(s48, v58, v51);
                  s48 = plus_product(s48, v59, v53);
                  s48 = plus_product(s48, v60, v55);
                  s48 = plus_product(s48, v61, v57);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v62 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v63 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s47 = s47 + keep_first(wide((v62 * v63)), (int)r1_left, fill(0.0f));
                  const vf v64 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s48 = s48 + keep_first(wide((v64 * v63)), (int)r1_left, fill(0.0f));
                }
                }
                const float s47_all = sum(s47);
                const float s48_all = sum(s48);
                const float v65 = (s47_all * 0.25f);
                const auto s40_next = g_maximum(s40, v65);
                const float s40_safe = s40_next == -INF ? 0.0f : s40_next;
                const float s40_scale = g_exp(s40 - s40_safe);
                s40 = s40_next;
                const float v66 = (s48_all * 0.25f);
                const auto s41_next = g_maximum(s41, v66);
                const float s41_safe = s41_next == -INF ? 0.0f : s41_next;
                const float s41_scale = g_exp(s41 - s41_safe);
                s41 = s41_next;
                s42 = s42 * s40_scale;
                const float v67 = (v65 - s40_safe);
                const float v68 = g_exp(v67);
                const vf v69 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s42 = plus_product(s42, v68, v69);
                s43 = s43 * s41_scale;
                const float v70 = (v66 - s41_safe);
                const float v71 = g_exp(v70);
                s43 = plus_product(s43, v71, v69);
                s44 = s44 * s40_scale;
                s44_few = s44_few * s40_scale;
                s44_few = s44_few + v68;
                s45 = s45 * s41_scale;
                s45_few = s45_few * s41_scale;
                s45_few = s45_few + v71;
                if (++n46 == 64) { n46 = 0; s44 = s44 + s44_few; s44_few = 0.0f; s45 = s45 + s45_few; s45_few = 0.0f; }
              }
              }
              s44 = s44 + s44_few;
              s45 = s45 + s45_few;
              const vf v72 = (wide(s42) / wide(s44));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v72), i4_left);
              const vf v73 = (wide(s43) / wide(s45));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v73), i4_left);
            }
            }
          }
          for (; i3 < i3_end; i3++) {
            { whole i4 = i4_begin;
            for (; i4 + (2 * W) <= i4_end; i4 += (2 * W)) {
              float s74 = -INF;
              vf s75 = fill(0.0f);
              vf s76 = fill(0.0f);
              float s77 = 0.0f;
              auto s77_few = s77;
              int n78 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s79 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v81 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v82 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v83 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v84 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v85 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v86 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v87 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v88 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s79 = plus_product(s79, v81, v82);
                  s79 = plus_product(s79, v83, v84);
                  s79 = plus_product(s79, v85, v86);
                  s79 = plus_product(s79, v87, v88);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v89 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v90 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s79 = s79 + keep_first(wide((v89 * v90)), (int)r1_left, fill(0.0f));
                }
                }
                const float s79_all = sum(s79);
                const float v91 = (s79_all * 0.25f);
                const auto s74_next = g_maximum(s74, v91);
                const float s74_safe = s74_next == -INF ? 0.0f : s74_next;
                const float s74_scale = g_exp(s74 - s74_safe);
                s74 = s74_next;
                s75 = s75 * s74_scale;
                const float v92 = (v91 - s74_safe);
                const float v93 = g_exp(v92);
                const vf v94 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s75 = plus_product(s75, v93, v94);
                s76 = s76 * s74_scale;
                const vf v95 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 1 * W) + r0 * 16));
                s76 = plus_product(s76, v93, v95);
                s77 = s77 * s74_scale;
                s77_few = s77_few * s74_scale;
                s77_few = s77_few + v93;
                if (++n78 == 64) { n78 = 0; s77 = s77 + s77_few; s77_few = 0.0f; }
              }
              }
              s77 = s77 + s77_few;
              const vf v96 = (wide(s75) / wide(s77));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v96));
              const vf v97 = (wide(s76) / wide(s77));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 1 * W)), wide(v97));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s98 = -INF;
              vf s99 = fill(0.0f);
              float s100 = 0.0f;
              auto s100_few = s100;
              int n101 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s102 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v104 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v105 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v106 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v107 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v108 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v109 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v110 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v111 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s102 = plus_product(s102, v104, v105);
                  s102 = plus_product(s102, v106, v107);
                  s102 = plus_product(s102, v108, v109);
                  s102 = plus_product(s102, v110, v111);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v112 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v113 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s102 = s102 + keep_first(wide((v112 * v113)), (int)r1_left, fill(0.0f));
                }
                }
                const float s102_all = sum(s102);
                const float v114 = (s102_all * 0.25f);
                const auto s98_next = g_maximum(s98, v114);
                const float s98_safe = s98_next == -INF ? 0.0f : s98_next;
                const float s98_scale = g_exp(s98 - s98_safe);
                s98 = s98_next;
                s99 = s99 * s98_scale;
                const float v115 = (v114 - s98_safe);
                const float v116 = g_exp(v115);
                const vf v117 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s99 = plus_product(s99, v116, v117);
                s100 = s100 * s98_scale;
                s100_few = s100_few * s98_scale;
                s100_few = s100_few + v116;
                if (++n101 == 64) { n101 = 0; s100 = s100 + s100_few; s100_few = 0.0f; }
              }
              }
              s100 = s100 + s100_few;
              const vf v118 = (wide(s99) / wide(s100));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v118), i4_left);
            }
            }
          }
          }
        }
        }
      }
      }
    }
    }
  }
}
