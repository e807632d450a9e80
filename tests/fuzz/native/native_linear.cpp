// Packed weights times inputs: within its memory for every format and shape, the same bits by both kernels, alone or in
// a batch, and
// by a plain reference, which takes one code after the other.
#include "quant/cpp/linear.cpp"

#include "fuzz.h"

static int code_of(const Weight& w, int64_t row, int64_t k) {
  const int64_t per_byte = 8 / w.bits;
  return w.codes[row * w.row_bytes + k / per_byte] >> (w.bits * (k % per_byte)) & ((1 << w.bits) - 1);
}
static bool alike(float a, float b) { return a == b || (a != a && b != b); }

// One row of x by one of the weight's: whole numbers within a group, then one rounding for each group, in order.
static float expected(const Weight& w, const float* x, int64_t row, float bias) {
  float largest = 0;
  for (int64_t k = 0; k < w.columns; k++) {
    if (!std::isfinite(x[k])) return NAN;
    largest = std::max(largest, std::fabs(x[k]));
  }
  const float factor = float(w.x_top) / largest;
  const bool nothing = !(largest > 0) || !std::isfinite(factor);
  float sum = 0;
  for (int64_t g = 0; g * w.group < w.columns; g++) {
    int64_t products = 0, inputs = 0;
    for (int64_t k = g * w.group; k < std::min(w.columns, (g + 1) * w.group) && !nothing; k++) {
      const int64_t rounded = std::lrintf(x[k] * factor), code = code_of(w, row, k);
      products += rounded * (w.bits == 8 ? int8_t(code) : w.table[code]), inputs += rounded;
    }
    REQUIRE(products >= INT32_MIN && products <= INT32_MAX);
    const int64_t at = row * w.stored_groups + (w.group_size ? g * w.group / w.group_size : 0);
    sum = std::fma(float(products), stored(w, w.scale, at) * (w.tensor_scale * w.unit), sum);
    if (w.offset) sum = std::fma(stored(w, w.offset, at) * w.tensor_scale, float(inputs), sum);
  }
  return std::fma(sum, nothing ? 0.0f : largest / float(w.x_top), bias);
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int sizes_of[] = {16, 32, 64, 128, 256};
  Weight w{};
  w.bits = int32_t(8 >> in.from(0, 2));
  w.group_size = w.bits == 8 && in.flag() ? 0 : sizes_of[in.from(0, 4)];
  w.group = w.group_size ? w.group_size : 128;
  w.rows = in.from(1, 40), w.columns = in.from(1, 300);
  const int64_t per_byte = 8 / w.bits;
  w.stored_groups = w.group_size ? (w.columns + w.group_size - 1) / w.group_size : 1;
  w.row_bytes = (w.group_size ? w.stored_groups * w.group_size : (w.columns + per_byte - 1) / per_byte * per_byte) / per_byte;
  w.scale_kind = int32_t(in.from(0, 2));
  const int64_t scale_nbytes = w.scale_kind == 0 ? 4 : w.scale_kind == 1 ? 2 : 1;
  const bool offsets = in.flag(), odd = in.flag(), biased = in.flag();
  const uint32_t seed = uint32_t(in.word());
  const int64_t m = in.from(0, 40), first = in.from(0, w.rows - 1), count = in.from(0, w.rows - first);
  Exact<uint8_t> codes(w.rows * w.row_bytes), scale(w.rows * w.stored_groups * scale_nbytes), offset(offsets ? scale.size() : 0);
  for (size_t i = 0; i < codes.size(); i++) codes[i] = in.ended() ? uint8_t(seed * (i + 1) >> 13) : in.byte();
  auto scales = [&](Exact<uint8_t>& to, uint32_t other) {
    Exact<float> values(to.size() / scale_nbytes);
    fill(values.data(), values.size(), seed + other, odd);
    for (size_t i = 0; i < values.size(); i++) {
      if (w.scale_kind == 0) memcpy(to.data() + 4 * i, &values[i], 4);
      else if (w.scale_kind == 1) to[2 * i] = uint8_t(i * seed), to[2 * i + 1] = odd ? uint8_t(seed >> i % 24) : uint8_t(0x20 + i % 16);
      else to[i] = uint8_t(seed + i);
    }
  };
  scales(scale, 1), scales(offset, 2);
  Exact<float> scale_values(256), values(1 << w.bits), x(m * w.columns), bias(w.rows);
  Exact<int16_t> table(1 << w.bits);
  fill(scale_values.data(), 256, seed + 3, odd), fill(x.data(), x.size(), seed + 4, odd), fill(bias.data(), w.rows, seed + 5, odd);
  const int64_t top = w.bits == 8 ? 128 : in.flag() ? 12 : std::min<int64_t>(32767, int64_t(std::sqrt(2147483647.0 / double(w.group))));
  for (size_t i = 0; i < table.size(); i++) table[i] = int16_t(int64_t(i * seed) % (2 * top + 1) - top), values[i] = float(table[i]);
  w.codes = codes.data(), w.scale = scale.data(), w.offset = offsets ? offset.data() : nullptr;
  w.scale_values = w.scale_kind == 2 ? scale_values.data() : nullptr;
  w.table = w.bits == 8 ? nullptr : table.data(), w.values = w.bits == 8 ? nullptr : values.data();
  w.x_top = int32_t(std::min<int64_t>(32767, 2147483647 / (top * w.group)));
  w.unit = 0.5f, w.tensor_scale = 2.0f;

  Exact<float> dot(m * w.rows), panel(m * w.rows), alone(w.rows), unpacked(count * w.columns);
  REQUIRE(quant_linear(&w, x.data(), m, biased ? bias.data() : nullptr, panel.data(), 1) == 0);
  if (dot_split_of(&w)) {
    REQUIRE(quant_linear(&w, x.data(), m, biased ? bias.data() : nullptr, dot.data(), 0) == 0);
    for (size_t i = 0; i < dot.size(); i++) REQUIRE(dot[i] == panel[i] || (dot[i] != dot[i] && panel[i] != panel[i]));
  } else {
    REQUIRE(quant_linear(&w, x.data(), m, nullptr, dot.data(), 0) == NO_DOT);
  }
  for (int64_t i = 0; i < m; i += 7) {
    REQUIRE(quant_linear(&w, x.data() + i * w.columns, 1, biased ? bias.data() : nullptr, alone.data(), 1) == 0);
    for (int64_t r = 0; r < w.rows; r++) {
      const float a = alone[r], b = panel[i * w.rows + r];
      REQUIRE(alike(a, b));
      REQUIRE(alike(a, expected(w, x.data() + i * w.columns, r, biased ? bias[r] : 0.0f)));
    }
  }
  REQUIRE(quant_unpack(&w, first, count, unpacked.data()) == 0);
  for (int64_t r = 0; r < count; r++)
    for (int64_t k = 0; k < w.columns; k++) {
      const int64_t at = (first + r) * w.stored_groups + (w.group_size ? k / w.group_size : 0);
      const int code = code_of(w, first + r, k);
      volatile float value = (w.bits == 8 ? float(int8_t(code)) : w.values[code]) * (stored(w, w.scale,
          at) * w.tensor_scale);
      if (w.offset) value = value + stored(w, w.offset, at) * w.tensor_scale;
      REQUIRE(alike(unpacked[r * w.columns + k], value));
    }
  return 0;
}
