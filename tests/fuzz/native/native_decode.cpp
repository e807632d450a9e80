// A decoder's token loop, for every format, shape, window and number of rows: within its memory, the same bits on one worker and on several.
#include "decoder.h"

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  held.clear();
  const int32_t format = int32_t(in.from(0, 2)), bits = int32_t((in.from(0, 2) * 4) % 12);
  Model m{};
  m.vocabulary = in.from(1, 70), m.width = in.from(1, 80), m.layers = in.from(1, 2), m.kv_heads = in.from(1, 3);
  m.heads = m.kv_heads * in.from(1, 3), m.head = 2 * in.from(1, 20), m.inner = in.from(1, 90), m.positions = in.from(1, 20);
  if (in.byte() >= 240) m.positions = 300;  // long enough to be cut into parts
  m.eps = 1e-6f, m.format = format, m.bits = bits;
  const bool odd = in.flag(), biased = in.flag(), normed = in.flag(), windowed = in.flag();
  const uint32_t seed = uint32_t(in.word());
  const int64_t rows = in.from(1, 3), steps = in.from(1, 4), threads = in.from(1, 5);
  const int64_t q = m.heads * m.head, kv = m.kv_heads * m.head, kept = rows * kv * m.positions;
  m.words = numbers(m.vocabulary * m.width, format, seed, odd), m.norm = floats(m.width, seed + 1, odd);
  m.logits = matrix(m.vocabulary, m.width, format, bits, seed + 2, odd, false);
  m.cos = floats(m.positions * m.head / 2, seed + 3, false), m.sin = floats(m.positions * m.head / 2, seed + 4, false);
  std::vector<Layer> layers[2];
  for (int64_t l = 0; l < m.layers; l++) {
    const uint32_t own = seed + 100 * uint32_t(l + 1);
    auto by = [&](int64_t r, int64_t c, uint32_t n) { return matrix(r, c, format, bits, own + n, odd, biased); };
    Layer layer{by(q, m.width, 1), by(kv, m.width, 2), by(kv, m.width, 3), by(m.width, q, 4), by(m.inner, m.width, 5), by(m.inner, m.width, 6), by(m.width, m.inner, 7)};
    layer.norm = floats(m.width, own + 8, odd), layer.after = floats(m.width, own + 9, odd);
    layer.q_norm = normed ? floats(m.head, own + 10, odd) : nullptr, layer.k_norm = normed ? floats(m.head, own + 11, odd) : nullptr;
    layer.window = windowed ? in.from(1, 9) : 0;
    for (auto& some : layers) {
      layer.keys = numbers(kept, format, own + 12, odd), layer.values = numbers(kept, format, own + 13, odd);
      some.push_back(layer);
    }
  }
  Exact<int64_t> first(rows), places(rows);
  for (int64_t b = 0; b < rows; b++) first[b] = in.from(-1, m.vocabulary - 1), places[b] = in.from(0, m.positions - 1);
  Exact<int64_t> end(2);
  end[0] = in.from(0, m.vocabulary - 1), end[1] = m.vocabulary;
  std::vector<Exact<int64_t>> made, tokens, at;
  std::vector<Exact<float>> logits;
  for (int side = 0; side < 2; side++) {
    made.emplace_back(steps * rows), tokens.emplace_back(rows), at.emplace_back(rows), logits.emplace_back(rows * m.vocabulary);
    for (int64_t b = 0; b < rows; b++) tokens[side][b] = first[b], at[side][b] = places[b];
    for (int64_t i = 0; i < steps * rows; i++) made[side][i] = -1;
    std::atomic<int64_t> done{0};
    std::atomic<int32_t> stopping{0};
    m.layer = layers[side].data();
    // As many parts of a context on both sides: with one head of keys more workers would cut it into more.
    const Run run{rows, steps, 2, side || m.positions >= LONG ? threads : 1, tokens[side].data(), at[side].data(), made[side].data(), end.data(), logits[side].data(), &done, &stopping};
    REQUIRE(decode(&m, &run) == 0);
    REQUIRE(done.load() >= 1 && done.load() <= steps);
    for (int64_t b = 0; b < rows; b++) REQUIRE(tokens[side][b] >= -1 && tokens[side][b] < m.vocabulary && at[side][b] >= 0 && at[side][b] <= m.positions);
    for (int64_t i = 0; i < steps * rows; i++) REQUIRE(made[side][i] >= -2 && made[side][i] < m.vocabulary);
  }
  REQUIRE(memcmp(made[0].data(), made[1].data(), made[0].size() * 8) == 0);
  for (size_t i = 0; i < logits[0].size(); i++) REQUIRE(logits[0][i] == logits[1][i] || (logits[0][i] != logits[0][i] && logits[1][i] != logits[1][i]));
  held.clear();
  return 0;
}
