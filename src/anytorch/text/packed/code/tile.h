// The one piece of code that does nearly all the arithmetic: a tile of M rows (M <= MR) by NR columns.
#pragma once
#include "simd.h"

// C[m][n] (+)= sum over k of A[m][k] * B[k][n]. A's rows are `lda` floats apart, B's `ldb`, C's `ldc`.
// Each sum runs over k in order, for every M: a row's result is the same bits in any tile.
template <int M>
INLINE void tile(const float* a, long lda, const float* b, long ldb, int depth, float* c, long ldc, bool add) {
  vf sums[M][NV];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sums[m][v] = add ? load(c + m * ldc + v * W) : vf{};
  // Three rows to one pointer: x86 can address p, p + lda and p + 2 lda from two registers, so that 12 rows need 5.
  constexpr int POINTERS = (M + 2) / 3;
  const float* rows[POINTERS];
#pragma GCC unroll 4
  for (int i = 0; i < POINTERS; i++) rows[i] = a + 3 * i * lda;
#pragma GCC unroll AT_ONCE
  for (int k = 0; k < depth; k++) {
    vf column[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) column[v] = load(b + v * W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf x = fill(rows[m / 3][(m % 3) * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sums[m][v] = fma(x, column[v], sums[m][v]);
    }
    b += ldb;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + m * ldc + v * W, sums[m][v]);
}

template <int M>
__attribute__((noinline)) void tile_of(const float* a, long lda, const float* b, long ldb, int depth, float* c, long ldc,
                                       bool add) {
  tile<M>(a, lda, b, ldb, depth, c, ldc, add);
}

typedef void (*Tile)(const float*, long, const float*, long, int, float*, long, bool);
constexpr Tile TILES[] = {  // by rows; see tile_rows
    nullptr, tile_of<1>, tile_of<2>, nullptr, tile_of<4>, nullptr, tile_of<6>,
#if defined(__AVX512F__)
    nullptr, tile_of<8>, nullptr, nullptr, nullptr, tile_of<12>,
#endif
};
