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
    const whole i4_begin = rest % ((16 + ((1 * W) * 1) - 1) / ((1 * W) * 1)) * ((1 * W) * 1); rest /= ((16 + ((1 * W) * 1) - 1) / ((1 * W) * 1));
    const whole i4_end = std::min<whole>(16, i4_begin + ((1 * W) * 1));
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
            for (; i4 + (1 * W) <= i4_end; i4 += (1 * W)) {
              float s1 = -INF;
              float s2 = -INF;
              vf s3 = fill(0.0f);
              vf s4 = fill(0.0f);
              float s5 = 0.0f;
              auto s5_few = s5;
              float s6 = 0.0f;
              auto s6_few = s6;
              int n7 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s8 = fill(0.0f);
                vf s9 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v11 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v12 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v13 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v14 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v15 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v16 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v17 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v18 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s8 = plus_product(s8, v11, v12);
                  s8 = plus_product(s8, v13, v14);
                  s8 = plus_product(s8, v15, v16);
                  s8 = plus_product(s8, v17, v18);
                  const vf v19 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v20 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v21 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v22 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s9 = plus_product(s9, v19, v12);
                  s9 = plus_product(s9, v20, v14);
                  s9 = plus_product(s9, v21, v16);
                  s9 = plus_product(s9, v22, v18);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v23 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v24 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s8 = s8 + keep_first(wide((v23 * v24)), (int)r1_left, fill(0.0f));
                  const vf v25 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s9 = s9 + keep_first(wide((v25 * v24)), (int)r1_left, fill(0.0f));
                }
                }
                const float s8_all = sum(s8);
                const float s9_all = sum(s9);
                const float v26 = (s8_all * 0.25f);
                const auto s1_next = g_maximum(s1, v26);
                const float s1_safe = s1_next == -INF ? 0.0f : s1_next;
                const float s1_scale = g_exp(s1 - s1_safe);
                s1 = s1_next;
                const float v27 = (s9_all * 0.25f);
                const auto s2_next = g_maximum(s2, v27);
                const float s2_safe = s2_next == -INF ? 0.0f : s2_next;
                const float s2_scale = g_exp(s2 - s2_safe);
                s2 = s2_next;
                s3 = s3 * s1_scale;
                const float v28 = (v26 - s1_safe);
                const float v29 = g_exp(v28);
                const vf v30 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s3 = plus_product(s3, v29, v30);
                s4 = s4 * s2_scale;
                const float v31 = (v27 - s2_safe);
                const float v32 = g_exp(v31);
                s4 = plus_product(s4, v32, v30);
                s5 = s5 * s1_scale;
                s5_few = s5_few * s1_scale;
                s5_few = s5_few + v29;
                s6 = s6 * s2_scale;
                s6_few = s6_few * s2_scale;
                s6_few = s6_few + v32;
                if (++n7 == 64) { n7 = 0; s5 = s5 + s5_few; s5_few = 0.0f; s6 = s6 + s6_few; s6_few = 0.0f; }
              }
              }
              s5 = s5 + s5_few;
              s6 = s6 + s6_few;
              const vf v33 = (wide(s3) / wide(s5));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v33));
              const vf v34 = (wide(s4) / wide(s6));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v34));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s35 = -INF;
              float s36 = -INF;
              vf s37 = fill(0.0f);
              vf s38 = fill(0.0f);
              float s39 = 0.0f;
              auto s39_few = s39;
              float s40 = 0.0f;
              auto s40_few = s40;
              int n41 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s42 = fill(0.0f);
                vf s43 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v45 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v46 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v47 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v48 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v49 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v50 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v51 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v52 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s42 = plus_product(s42, v45, v46);
                  s42 = plus_product(s42, v47, v48);
                  s42 = plus_product(s42, v49, v50);
                  s42 = plus_product(s42, v51, v52);
                  const vf v53 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v54 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v55 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v56 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s43 = plus_product(s43, v53, v46);
                  s43 = plus_product(s43, v54, v48);
                  s43 = plus_product(s43, v55, v50);
                  s43 = plus_product(s43, v56, v52);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v57 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v58 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s42 = s42 + keep_first(wide((v57 * v58)), (int)r1_left, fill(0.0f));
                  const vf v59 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s43 = s43 + keep_first(wide((v59 * v58)), (int)r1_left, fill(0.0f));
                }
                }
                const float s42_all = sum(s42);
                const float s43_all = sum(s43);
                const float v60 = (s42_all * 0.25f);
                const auto s35_next = g_maximum(s35, v60);
                const float s35_safe = s35_next == -INF ? 0.0f : s35_next;
                const float s35_scale = g_exp(s35 - s35_safe);
                s35 = s35_next;
                const float v61 = (s43_all * 0.25f);
                const auto s36_next = g_maximum(s36, v61);
                const float s36_safe = s36_next == -INF ? 0.0f : s36_next;
                const float s36_scale = g_exp(s36 - s36_safe);
                s36 = s36_next;
                s37 = s37 * s35_scale;
                const float v62 = (v60 - s35_safe);
                const float v63 = g_exp(v62);
                const vf v64 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s37 = plus_product(s37, v63, v64);
                s38 = s38 * s36_scale;
                const float v65 = (v61 - s36_safe);
                const float v66 = g_exp(v65);
                s38 = plus_product(s38, v66, v64);
                s39 = s39 * s35_scale;
                s39_few = s39_few * s35_scale;
                s39_few = s39_few + v63;
                s40 = s40 * s36_scale;
                s40_few = s40_few * s36_scale;
                s40_few = s40_few + v66;
                if (++n41 == 64) { n41 = 0; s39 = s39 + s39_few; s39_few = 0.0f; s40 = s40 + s40_few; s40_few = 0.0f; }
              }
              }
              s39 = s39 + s39_few;
              s40 = s40 + s40_few;
              const vf v67 = (wide(s37) / wide(s39));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v67), i4_left);
              const vf v68 = (wide(s38) / wide(s40));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v68), i4_left);
            }
            }
          }
          for (; i3 < i3_end; i3++) {
            { whole i4 = i4_begin;
            for (; i4 + (1 * W) <= i4_end; i4 += (1 * W)) {
              float s69 = -INF;
              vf s70 = fill(0.0f);
              float s71 = 0.0f;
              auto s71_few = s71;
              int n72 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s73 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v75 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v76 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v77 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v78 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v79 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v80 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v81 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v82 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s73 = plus_product(s73, v75, v76);
                  s73 = plus_product(s73, v77, v78);
                  s73 = plus_product(s73, v79, v80);
                  s73 = plus_product(s73, v81, v82);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v83 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v84 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s73 = s73 + keep_first(wide((v83 * v84)), (int)r1_left, fill(0.0f));
                }
                }
                const float s73_all = sum(s73);
                const float v85 = (s73_all * 0.25f);
                const auto s69_next = g_maximum(s69, v85);
                const float s69_safe = s69_next == -INF ? 0.0f : s69_next;
                const float s69_scale = g_exp(s69 - s69_safe);
                s69 = s69_next;
                s70 = s70 * s69_scale;
                const float v86 = (v85 - s69_safe);
                const float v87 = g_exp(v86);
                const vf v88 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s70 = plus_product(s70, v87, v88);
                s71 = s71 * s69_scale;
                s71_few = s71_few * s69_scale;
                s71_few = s71_few + v87;
                if (++n72 == 64) { n72 = 0; s71 = s71 + s71_few; s71_few = 0.0f; }
              }
              }
              s71 = s71 + s71_few;
              const vf v89 = (wide(s70) / wide(s71));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v89));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s90 = -INF;
              vf s91 = fill(0.0f);
              float s92 = 0.0f;
              auto s92_few = s92;
              int n93 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s94 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v96 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v97 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v98 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v99 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v100 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v101 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v102 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v103 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s94 = plus_product(s94, v96, v97);
                  s94 = plus_product(s94, v98, v99);
                  s94 = plus_product(s94, v100, v101);
                  s94 = plus_product(s94, v102, v103);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v104 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v105 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s94 = s94 + keep_first(wide((v104 * v105)), (int)r1_left, fill(0.0f));
                }
                }
                const float s94_all = sum(s94);
                const float v106 = (s94_all * 0.25f);
                const auto s90_next = g_maximum(s90, v106);
                const float s90_safe = s90_next == -INF ? 0.0f : s90_next;
                const float s90_scale = g_exp(s90 - s90_safe);
                s90 = s90_next;
                s91 = s91 * s90_scale;
                const float v107 = (v106 - s90_safe);
                const float v108 = g_exp(v107);
                const vf v109 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s91 = plus_product(s91, v108, v109);
                s92 = s92 * s90_scale;
                s92_few = s92_few * s90_scale;
                s92_few = s92_few + v108;
                if (++n93 == 64) { n93 = 0; s92 = s92 + s92_few; s92_few = 0.0f; }
              }
              }
              s92 = s92 + s92_few;
              const vf v110 = (wide(s91) / wide(s92));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v110), i4_left);
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
