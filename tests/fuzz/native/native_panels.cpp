// Weights in panels of 8 and 4 bits by any inputs: the same bits as a plain reference, which reads each code by its
// place; a text's
// are the same alone and among others.
#include "decoder.h"

namespace {
// Column `c` of a row of a panel's group, as panels.h describes its place.
int weight_of(const uint8_t* group, int32_t bits, int row, int c) {
  if (bits == 8) return int(group[c / 4 * 64 + row * 4 + c % 4]) - 128;
  const uint8_t both = group[c % 16 / 4 * 64 + row * 4 + c % 4];
  return (c < 16 ? both & 15 : both >> 4) - 8;
}

float expected(const Matrix& m, int32_t bits, const float* x, int64_t row) {
  const int64_t groups = (m.columns + GROUP - 1) / GROUP, panel = row / PANEL;
  float total = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t count = std::min<int64_t>(GROUP, m.columns - g * GROUP), place = panel * groups + g;
    float greatest = 0;
    bool finite = true;
    for (int64_t i = 0; i < count; i++) finite = finite && std::isfinite(x[g * GROUP + i]),
        greatest = std::max(greatest, std::fabs(x[g * GROUP + i]));
    const float inverse = 127.0f / greatest;
    const bool nothing = !(greatest > 0) || !(inverse <= FLT_MAX);
    int32_t sum = 0;
    for (int64_t i = 0; finite && !nothing && i < count; i++) {
      const int whole = int(std::nearbyint(double(x[g * GROUP + i]) * double(inverse)));  // the product is exact
      REQUIRE(whole >= -127 && whole <= 127);
      sum += whole * weight_of(static_cast<const uint8_t*>(m.data) + place * PANEL * GROUP * bits / 8, bits,
          int(row % PANEL), int(i));
    }
    const float step = !finite ? NAN : nothing ? 0.0f : greatest / 127.0f,
        scale = get(m.scales + place * PANEL + row % PANEL);
    total = std::fmaf(float(sum), scale * step, total);
  }
  return std::fmaf(total, m.scale, m.bias ? m.bias[row] : 0.0f);
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  held.clear();
  const int32_t bits = in.flag() ? 8 : 4;
  const int64_t rows = in.from(1, 50), columns = in.from(1, 150), texts = in.from(0, 9);
  const bool odd = in.flag(), biased = in.flag();
  const uint32_t seed = uint32_t(in.word());
  const Matrix by = matrix(rows, columns, 0, bits, seed, odd, biased);
  auto codes = static_cast<uint8_t*>(const_cast<void*>(by.data));
  for (int64_t i = 0, most = rows * columns * bits / 8; !in.ended() && i < most; i++) codes[i] = in.byte();
  if (in.byte() == 0) memset(codes, seed % 2 ? 255 : 0, size_t(rows) * columns * bits / 8);  // the largest sums there are
  Exact<float> x(texts * columns), out(texts * rows), alone(rows);
  fill(x.data(), x.size(), seed + 1, odd);
  if (seed % 5 == 0) for (size_t i = 0; i < x.size(); i++) x[i] = x[i] < 0 ? -1.0f : 1.0f;
  REQUIRE(panel_product(&by, bits, x.data(), texts, out.data()) == 0);
  auto same = [](float a, float b) { return a == b || (a != a && b != b); };
  for (int64_t b = 0; b < texts; b++) {
    REQUIRE(panel_product(&by, bits, x.data() + b * columns, 1, alone.data()) == 0);
    for (int64_t r = 0; r < rows; r++) {
      REQUIRE(same(out[b * rows + r], alone[r]));
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)  // without it products are rounded once more
      REQUIRE(same(alone[r], expected(by, bits, x.data() + b * columns, r)));
#endif
    }
  }
  held.clear();
  return 0;
}
