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
    const whole i4_begin = rest % ((16 + ((4 * W) * 1) - 1) / ((4 * W) * 1)) * ((4 * W) * 1); rest /= ((16 + ((4 * W) * 1) - 1) / ((4 * W) * 1));
    const whole i4_end = std::min<whole>(16, i4_begin + ((4 * W) * 1));
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
            for (; i4 + (4 * W) <= i4_end; i4 += (4 * W)) {
              float s1 = -INF;
              float s2 = -INF;
              vf s3 = fill(0.0f);
              vf s4 = fill(0.0f);
              vf s5 = fill(0.0f);
              vf s6 = fill(0.0f);
              vf s7 = fill(0.0f);
              vf s8 = fill(0.0f);
              vf s9 = fill(0.0f);
              vf s10 = fill(0.0f);
              float s11 = 0.0f;
              auto s11_few = s11;
              float s12 = 0.0f;
              auto s12_few = s12;
              int n13 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s14 = fill(0.0f);
                vf s15 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v17 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v18 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v19 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v20 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v21 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v22 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v23 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v24 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s14 = plus_product(s14, v17, v18);
                  s14 = plus_product(s14, v19, v20);
                  s14 = plus_product(s14, v21, v22);
                  s14 = plus_product(s14, v23, v24);
                  const vf v25 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v26 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v27 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v28 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s15 = plus_product(s15, v25, v18);
                  s15 = plus_product(s15, v26, v20);
                  s15 = plus_product(s15, v27, v22);
                  s15 = plus_product(s15, v28, v24);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v29 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v30 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s14 = s14 + keep_first(wide((v29 * v30)), (int)r1_left, fill(0.0f));
                  const vf v31 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s15 = s15 + keep_first(wide((v31 * v30)), (int)r1_left, fill(0.0f));
                }
                }
                const float s14_all = sum(s14);
                const float s15_all = sum(s15);
                const float v32 = (s14_all * 0.25f);
                const auto s1_next = g_maximum(s1, v32);
                const float s1_safe = s1_next == -INF ? 0.0f : s1_next;
                const float s1_scale = g_exp(s1 - s1_safe);
                s1 = s1_next;
                const float v33 = (s15_all * 0.25f);
                const auto s2_next = g_maximum(s2, v33);
                const float s2_safe = s2_next == -INF ? 0.0f : s2_next;
                const float s2_scale = g_exp(s2 - s2_safe);
                s2 = s2_next;
                s3 = s3 * s1_scale;
                const float v34 = (v32 - s1_safe);
                const float v35 = g_exp(v34);
                const vf v36 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s3 = plus_product(s3, v35, v36);
                s4 = s4 * s2_scale;
                const float v37 = (v33 - s2_safe);
                const float v38 = g_exp(v37);
                s4 = plus_product(s4, v38, v36);
                s5 = s5 * s1_scale;
                const vf v39 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 1 * W) + r0 * 16));
                s5 = plus_product(s5, v35, v39);
                s6 = s6 * s2_scale;
                s6 = plus_product(s6, v38, v39);
                s7 = s7 * s1_scale;
                const vf v40 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 2 * W) + r0 * 16));
                s7 = plus_product(s7, v35, v40);
                s8 = s8 * s2_scale;
                s8 = plus_product(s8, v38, v40);
                s9 = s9 * s1_scale;
                const vf v41 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 3 * W) + r0 * 16));
                s9 = plus_product(s9, v35, v41);
                s10 = s10 * s2_scale;
                s10 = plus_product(s10, v38, v41);
                s11 = s11 * s1_scale;
                s11_few = s11_few * s1_scale;
                s11_few = s11_few + v35;
                s12 = s12 * s2_scale;
                s12_few = s12_few * s2_scale;
                s12_few = s12_few + v38;
                if (++n13 == 64) { n13 = 0; s11 = s11 + s11_few; s11_few = 0.0f; s12 = s12 + s12_few; s12_few = 0.0f; }
              }
              }
              s11 = s11 + s11_few;
              s12 = s12 + s12_few;
              const vf v42 = (wide(s3) / wide(s11));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v42));
              const vf v43 = (wide(s4) / wide(s12));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v43));
              const vf v44 = (wide(s5) / wide(s11));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 1 * W)), wide(v44));
              const vf v45 = (wide(s6) / wide(s12));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (i4 + 1 * W)), wide(v45));
              const vf v46 = (wide(s7) / wide(s11));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 2 * W)), wide(v46));
              const vf v47 = (wide(s8) / wide(s12));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (i4 + 2 * W)), wide(v47));
              const vf v48 = (wide(s9) / wide(s11));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 3 * W)), wide(v48));
              const vf v49 = (wide(s10) / wide(s12));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (i4 + 3 * W)), wide(v49));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s50 = -INF;
              float s51 = -INF;
              vf s52 = fill(0.0f);
              vf s53 = fill(0.0f);
              float s54 = 0.0f;
              auto s54_few = s54;
              float s55 = 0.0f;
              auto s55_few = s55;
              int n56 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s57 = fill(0.0f);
                vf s58 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v60 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v61 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v62 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v63 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v64 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v65 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v66 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v67 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s57 = plus_product(s57, v60, v61);
                  s57 = plus_product(s57, v62, v63);
                  s57 = plus_product(s57, v64, v65);
                  s57 = plus_product(s57, v66, v67);
                  const vf v68 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1));
                  const vf v69 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 1 * W)));
                  const vf v70 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 2 * W)));
                  const vf v71 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + (r1 + 3 * W)));
                  s58 = plus_product(s58, v68, v61);
                  s58 = plus_product(s58, v69, v63);
                  s58 = plus_product(s58, v70, v65);
                  s58 = plus_product(s58, v71, v67);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v72 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v73 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s57 = s57 + keep_first(wide((v72 * v73)), (int)r1_left, fill(0.0f));
                  const vf v74 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + r1), r1_left);
                  s58 = s58 + keep_first(wide((v74 * v73)), (int)r1_left, fill(0.0f));
                }
                }
                const float s57_all = sum(s57);
                const float s58_all = sum(s58);
                const float v75 = (s57_all * 0.25f);
                const auto s50_next = g_maximum(s50, v75);
                const float s50_safe = s50_next == -INF ? 0.0f : s50_next;
                const float s50_scale = g_exp(s50 - s50_safe);
                s50 = s50_next;
                const float v76 = (s58_all * 0.25f);
                const auto s51_next = g_maximum(s51, v76);
                const float s51_safe = s51_next == -INF ? 0.0f : s51_next;
                const float s51_scale = g_exp(s51 - s51_safe);
                s51 = s51_next;
                s52 = s52 * s50_scale;
                const float v77 = (v75 - s50_safe);
                const float v78 = g_exp(v77);
                const vf v79 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s52 = plus_product(s52, v78, v79);
                s53 = s53 * s51_scale;
                const float v80 = (v76 - s51_safe);
                const float v81 = g_exp(v80);
                s53 = plus_product(s53, v81, v79);
                s54 = s54 * s50_scale;
                s54_few = s54_few * s50_scale;
                s54_few = s54_few + v78;
                s55 = s55 * s51_scale;
                s55_few = s55_few * s51_scale;
                s55_few = s55_few + v81;
                if (++n56 == 64) { n56 = 0; s54 = s54 + s54_few; s54_few = 0.0f; s55 = s55 + s55_few; s55_few = 0.0f; }
              }
              }
              s54 = s54 + s54_few;
              s55 = s55 + s55_few;
              const vf v82 = (wide(s52) / wide(s54));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v82), i4_left);
              const vf v83 = (wide(s53) / wide(s55));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + (i3 + 1) * 16 + i4), wide(v83), i4_left);
            }
            }
          }
          for (; i3 < i3_end; i3++) {
            { whole i4 = i4_begin;
            for (; i4 + (4 * W) <= i4_end; i4 += (4 * W)) {
              float s84 = -INF;
              vf s85 = fill(0.0f);
              vf s86 = fill(0.0f);
              vf s87 = fill(0.0f);
              vf s88 = fill(0.0f);
              float s89 = 0.0f;
              auto s89_few = s89;
              int n90 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s91 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v93 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v94 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v95 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v96 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v97 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v98 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v99 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v100 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s91 = plus_product(s91, v93, v94);
                  s91 = plus_product(s91, v95, v96);
                  s91 = plus_product(s91, v97, v98);
                  s91 = plus_product(s91, v99, v100);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v101 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v102 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s91 = s91 + keep_first(wide((v101 * v102)), (int)r1_left, fill(0.0f));
                }
                }
                const float s91_all = sum(s91);
                const float v103 = (s91_all * 0.25f);
                const auto s84_next = g_maximum(s84, v103);
                const float s84_safe = s84_next == -INF ? 0.0f : s84_next;
                const float s84_scale = g_exp(s84 - s84_safe);
                s84 = s84_next;
                s85 = s85 * s84_scale;
                const float v104 = (v103 - s84_safe);
                const float v105 = g_exp(v104);
                const vf v106 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16));
                s85 = plus_product(s85, v105, v106);
                s86 = s86 * s84_scale;
                const vf v107 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 1 * W) + r0 * 16));
                s86 = plus_product(s86, v105, v107);
                s87 = s87 * s84_scale;
                const vf v108 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 2 * W) + r0 * 16));
                s87 = plus_product(s87, v105, v108);
                s88 = s88 * s84_scale;
                const vf v109 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + (i4 + 3 * W) + r0 * 16));
                s88 = plus_product(s88, v105, v109);
                s89 = s89 * s84_scale;
                s89_few = s89_few * s84_scale;
                s89_few = s89_few + v105;
                if (++n90 == 64) { n90 = 0; s89 = s89 + s89_few; s89_few = 0.0f; }
              }
              }
              s89 = s89 + s89_few;
              const vf v110 = (wide(s85) / wide(s89));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v110));
              const vf v111 = (wide(s86) / wide(s89));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 1 * W)), wide(v111));
              const vf v112 = (wide(s87) / wide(s89));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 2 * W)), wide(v112));
              const vf v113 = (wide(s88) / wide(s89));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (i4 + 3 * W)), wide(v113));
            }
            for (; i4 < i4_end; i4 += W) {
              const whole i4_left = std::min<whole>(W, i4_end - i4);
              float s114 = -INF;
              vf s115 = fill(0.0f);
              float s116 = 0.0f;
              auto s116_few = s116;
              int n117 = 0;
              { whole r0 = 0;
              for (; r0 + 1 <= (t); r0 += 1) {
                vf s118 = fill(0.0f);
                { whole r1 = 0;
                for (; r1 + (4 * W) <= 16; r1 += (4 * W)) {
                  const vf v120 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1));
                  const vf v121 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1));
                  const vf v122 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 1 * W)));
                  const vf v123 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 1 * W)));
                  const vf v124 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 2 * W)));
                  const vf v125 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 2 * W)));
                  const vf v126 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + (r1 + 3 * W)));
                  const vf v127 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + (r1 + 3 * W)));
                  s118 = plus_product(s118, v120, v121);
                  s118 = plus_product(s118, v122, v123);
                  s118 = plus_product(s118, v124, v125);
                  s118 = plus_product(s118, v126, v127);
                }
                for (; r1 < 16; r1 += W) {
                  const whole r1_left = std::min<whole>(W, 16 - r1);
                  const vf v128 = lanes(b0 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + r1), r1_left);
                  const vf v129 = lanes(b1 + (i0 * (32*t) + i1 * (16*t) + r0 * 16 + r1), r1_left);
                  s118 = s118 + keep_first(wide((v128 * v129)), (int)r1_left, fill(0.0f));
                }
                }
                const float s118_all = sum(s118);
                const float v130 = (s118_all * 0.25f);
                const auto s114_next = g_maximum(s114, v130);
                const float s114_safe = s114_next == -INF ? 0.0f : s114_next;
                const float s114_scale = g_exp(s114 - s114_safe);
                s114 = s114_next;
                s115 = s115 * s114_scale;
                const float v131 = (v130 - s114_safe);
                const float v132 = g_exp(v131);
                const vf v133 = lanes(b2 + (i0 * (32*t) + i1 * (16*t) + i4 + r0 * 16), i4_left);
                s115 = plus_product(s115, v132, v133);
                s116 = s116 * s114_scale;
                s116_few = s116_few * s114_scale;
                s116_few = s116_few + v132;
                if (++n117 == 64) { n117 = 0; s116 = s116 + s116_few; s116_few = 0.0f; }
              }
              }
              s116 = s116 + s116_few;
              const vf v134 = (wide(s115) / wide(s116));
              put_lanes(b3 + (i0 * (64*n) + i1 * (32*n) + i2 * (16*n) + i3 * 16 + i4), wide(v134), i4_left);
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
