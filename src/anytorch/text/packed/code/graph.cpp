// The encoder's attention and norms by themselves, as kernels of graphs: items of work, run by the graphs' pool of threads.
#include <cstdint>
#include <cstring>
#include <new>

#include "attention.h"
#include "norm.h"

#define API extern "C" __attribute__((visibility("default")))

enum Answer { OK = 0, NO_MEMORY = 1 };

static float as_real(int64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return float(value);
}

// b: q [batch][heads][n][width], k and v [batch][kv_heads][n][width], out as q, and an int32 that is set to what went wrong.
// s: heads, kv_heads, n, width, causal, the scale's bits as a double. An item is a head of a batch row.
API void graph_attend(void** b, const int64_t* s, int64_t first, int64_t last) {
  static thread_local AttentionScratch scratch;
  const int64_t heads = s[0], groups = s[1], n = s[2], width = s[3];
  try {
    scratch.reserve(int(n), int(width));
  } catch (const std::bad_alloc&) {
    *static_cast<int32_t*>(b[4]) = NO_MEMORY;
    return;
  }
  for (int64_t item = first; item < last; item++) {
    const int64_t shared = item / heads * groups + item % heads / (heads / groups);
    Head h;
    h.q = static_cast<const float*>(b[0]) + item * n * width;
    h.k = static_cast<const float*>(b[1]) + shared * n * width;
    h.v = static_cast<const float*>(b[2]) + shared * n * width;
    h.out = static_cast<float*>(b[3]) + item * n * width;
    h.stride = h.out_stride = long(width);
    h.length = int(n), h.width = int(width);
    h.scale = as_real(s[5]);
    h.causal = s[4] != 0, h.window = 0, h.bias = nullptr;
    attend(h, scratch);
  }
}

// b: x [rows][width], weight and bias [width] or null, out as x. s: width, rms, the bits of eps, rows, rows of an item.
API void graph_normalise(void** b, const int64_t* s, int64_t first, int64_t last) {
  const int64_t width = s[0], end = last * s[4] < s[3] ? last * s[4] : s[3];
  for (int64_t row = first * s[4]; row < end; row++)
    normalise_row(static_cast<const float*>(b[0]) + row * width, static_cast<float*>(b[3]) + row * width, int(width),
                  static_cast<const float*>(b[1]), static_cast<const float*>(b[2]), as_real(s[2]), s[1] != 0);
}
