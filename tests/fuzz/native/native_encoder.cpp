// The encoder with any shape and any parts, right ones and wrong ones: refused, or computed within its memory; a text's vector is
// the same bits alone and among others, on one thread and on several.
#include "text/packed/code/encoder.cpp"

#include "fuzz.h"

struct Made {  // an encoder, and the words that it reads in place
  Shape s;
  void* handle = nullptr;
  std::vector<bool> plain;  // layers of float32 products, which can be calibrated
  Exact<float> words{0};
  ~Made() { encoder_free(handle); }
};

static Shape shape_from(Input& in) {
  Shape s{};
  s.vocabulary = int32_t(in.from(1, 20)), s.width = int32_t(in.from(1, 40)), s.layers = int32_t(in.from(1, 2));
  s.kv_heads = int32_t(in.from(1, 2)), s.heads = s.kv_heads * int32_t(in.from(1, 3)), s.head_width = int32_t(in.from(1, 20));
  s.inner = int32_t(in.from(1, 40)), s.max_positions = int32_t(in.from(1, 40)), s.position_offset = int32_t(in.from(0, 3));
  s.activation = int32_t(in.from(0, 4)), s.gated = in.flag(), s.pre_norm = in.flag(), s.rms_norm = in.flag();
  s.embed_norm = in.flag(), s.final_norm = in.flag(), s.qk_norm = in.flag(), s.causal = in.flag();
  s.eps = 1e-5f, s.budget = int32_t(in.from(1, 64)), s.block = int32_t(in.from(1, 16));
  return s;
}

// One field of it as no configuration should have it.
static void spoil(Shape& s, Input& in) {
  int32_t odd[] = {0, -1, INT32_MAX, INT32_MIN, 1 << 30, in.word()};
  int32_t value = odd[in.from(0, 5)];
  reinterpret_cast<int32_t*>(&s)[in.from(0, int64_t(sizeof(Shape) / 4) - 1)] = value;
}

// Sets every part; a wrong size now and then. False where the encoder refused one.
static bool fill_parts(Made& made, Input& in, uint32_t seed, bool odd) {
  const Shape& s = made.s;
  auto floats = [&](size_t count) { Exact<float> v(count); fill(v.data(), count, seed++, odd); return v; };
  made.words = floats(size_t(s.vocabulary) * s.width);
  encoder_set_words(made.handle, made.words.data());
  const int added = int(in.from(0, 3));
  if (added) {
    const int rows = added == 1 ? 1 : added == 2 ? s.position_offset + s.max_positions : int(in.from(1, 50));
    if (encoder_set_added(made.handle, floats(size_t(rows) * s.width).data(), rows)) return false;
  }
  if (in.flag()) {
    const int64_t zero = in.flag() ? s.max_positions - 1 : in.from(-2, 60), stride = in.flag() ? 2 * s.max_positions + 63 : in.from(0, 120);
    if (encoder_set_relative(made.handle, floats(size_t(s.heads) * stride).data(), stride, zero)) return false;
  }
  for (int which : {0, 1})
    if (which ? s.final_norm : s.embed_norm)
      if (encoder_set_norm(made.handle, 0, which, floats(s.width).data(), in.flag() ? floats(s.width).data() : nullptr)) return false;
  const int queries = s.heads * s.head_width, keys = s.kv_heads * s.head_width;
  const int outputs[] = {queries + 2 * keys, s.width, s.gated ? 2 * s.inner : s.inner, s.width}, inputs[] = {s.width, queries, s.width, s.inner};
  for (int layer = 0; layer < s.layers; layer++) {
    made.plain.push_back(true);
    const float thetas[] = {0.0f, 10000.0f, 500.0f};
    if (encoder_set_attention(made.handle, in.byte() == 255 ? in.word() : layer, thetas[in.from(0, 2)], in.byte() == 255 ? in.word() : int(in.from(0, 12)))) return false;
    for (int which : {2, 3, 4, 5})
      if (which < 4 || s.qk_norm)
        if (encoder_set_norm(made.handle, layer, which, floats(which < 4 ? s.width : s.head_width).data(), nullptr)) return false;
    for (int which = 0; which < 4; which++) {
      int rows = outputs[which], columns = inputs[which], format = int(in.from(0, 5)), gated = which == 2 && s.gated;
      const int wrong = in.byte();
      if (format != F32 || wrong >= 252) made.plain.back() = false;
      if (wrong == 255) rows = in.word() % 4096;
      if (wrong == 254) columns = in.word() % 4096;
      if (wrong == 253) format = in.word();
      if (wrong == 252) gated = !gated;
      if (encoder_linear_new(made.handle, layer, which, rows, columns, gated, format, in.flag())) return false;
      if (in.flag()) {
        Exact<float> less(columns), importance(columns);
        for (int k = 0; k < columns; k++) less[k] = 0.5f + float(k % 3), importance[k] = float(k % 5);
        if (encoder_linear_smooth(made.handle, layer, which, less.data(), importance.data())) return false;
      }
      const int first = in.byte() == 255 ? in.word() : 0;
      if (encoder_linear_rows(made.handle, layer, which, floats(size_t(rows) * columns).data(), in.flag() ? floats(rows).data() : nullptr, rows, first)) return false;
      encoder_linear_done(made.handle, layer, which);
    }
  }
  return true;
}

static bool same(const float* a, const float* b, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (a[i] != b[i] && (a[i] == a[i] || b[i] == b[i])) return false;
  return true;
}

// What calibration tells of each product's inputs: no square is larger than that of the greatest.
static void calibrate(Made& made, const int32_t* ids, const int32_t* starts, int sequences) {
  const Shape& s = made.s;
  int where;
  REQUIRE(encoder_calibrate(made.handle, s.layers, ids, starts, sequences, nullptr, nullptr, nullptr, nullptr,
      &where) == BAD_PART);
  if (encoder_calibrate(made.handle, -1, ids, starts, sequences, nullptr, nullptr, nullptr, nullptr, &where) != OK) return;
  const int widths[] = {s.width, s.heads * s.head_width, s.width, s.inner};
  for (int layer = 0; layer < s.layers; layer++) {
    if (!made.plain[layer]) continue;
    std::vector<Exact<float>> seen;
    for (int width : widths) seen.emplace_back(size_t(2 * width));
    REQUIRE(encoder_calibrate(made.handle, layer, ids, starts, sequences, seen[0].data(), seen[1].data(),
        seen[2].data(), seen[3].data(), &where) == OK);
    for (int which = 0; which < 4; which++)
      for (int i = 0; i < widths[which]; i++) {
        const double top = seen[which][i], total = seen[which][widths[which] + i];
        REQUIRE(total != total || (top >= 0 && total <= 1.001 * starts[sequences] * top * top + 1e-30));
      }
  }
}

int one(const uint8_t* data, size_t size) {
  REQUIRE(encoder_shape_nbytes() == sizeof(Shape) && encoder_has_bytes() == HAS_FOURS && encoder_peak(size % 3, 1) >= 0);
  Input in(data, size);
  Made made;
  made.s = shape_from(in);
  const int threads = int(in.from(1, 3));
  if (in.byte() >= 224) {  // wrong on purpose: what is accepted is only made and freed, since its sizes may be any
    spoil(made.s, in);
    REQUIRE(encoder_shape_is_valid(&made.s) || !encoder_new(&made.s, threads));
    return 0;
  }
  made.handle = encoder_new(&made.s, threads);
  REQUIRE(made.handle);
  const bool odd = in.flag();
  const uint32_t seed = uint32_t(in.word());
  if (!fill_parts(made, in, seed, odd)) return 0;
  const int sequences = int(in.from(0, 5)), pooling = int(in.from(0, 6)), normalise = in.flag();
  Exact<int32_t> starts(sequences + 1);
  for (int i = 0; i < sequences; i++) starts[i + 1] = starts[i] + int32_t(in.from(0, 24));
  const int total = starts[sequences];
  Exact<int32_t> ids(total);
  for (int t = 0; t < total; t++) ids[t] = in.ended() ? t % made.s.vocabulary : in.byte() % (made.s.vocabulary + (in.byte() == 255));
  if (in.byte() == 255 && sequences) starts[in.from(0, sequences)] = in.word() % 64;
  if (starts[sequences] > total) return 0;  // Python compares it with the number of ids
  Exact<float> pooled(size_t(sequences) * made.s.width), tokens(size_t(total) * made.s.width), alone(made.s.width);
  int where = 0;
  const int answer = encoder_run(made.handle, ids.data(), starts.data(), sequences, pooling, normalise, pooled.data(), in.flag() ? tokens.data() : nullptr, &where);
  REQUIRE(answer == OK || answer == BAD_TOKEN || answer == TOO_LONG || answer == BAD_STARTS);
  if (answer != OK) return 0;
  REQUIRE(encoder_linear_nbytes(made.handle) > 0);
  if (in.flag()) calibrate(made, ids.data(), starts.data(), sequences);
  for (int i = 0; i < sequences; i++) {
    int32_t own[] = {0, starts[i + 1] - starts[i]};
    Exact<int32_t> some(own[1]);
    memcpy(some.data(), ids.data() + starts[i], own[1] * 4);
    REQUIRE(encoder_run(made.handle, some.data(), own, 1, pooling, normalise, alone.data(), nullptr, &where) == OK);
    REQUIRE(same(alone.data(), pooled.data() + size_t(i) * made.s.width, made.s.width));
  }
  return 0;
}
