// A decoder's workers with all that `Run` may ask for: draws, a trace, many tokens of one text at once, a stop from
// outside. Built
// twice: native_rows.cpp looks for memory, native_workers.cpp for data races.
#pragma once
#include "decoder.h"

namespace {
struct Small {  // a model, and how large what it keeps must be
  Model m{};
  int64_t q, kv;
  std::vector<Layer> layers;
};

Small small_model(Input& in, uint32_t seed, bool odd) {
  Small made;
  Model& m = made.m;
  const int32_t format = int32_t(in.from(0, 2)), bits = int32_t((in.from(0, 2) * 4) % 12);
  m.vocabulary = in.from(1, 40), m.width = in.from(1, 40), m.layers = in.from(1, 2), m.kv_heads = in.from(1, 2);
  m.heads = m.kv_heads * in.from(1, 2), m.head = 2 * in.from(1, 9), m.inner = in.from(1, 40), m.positions = in.from(1, 12);
  m.eps = 1e-6f, m.format = format, m.bits = bits;
  made.q = m.heads * m.head, made.kv = m.kv_heads * m.head;
  m.words = numbers(m.vocabulary * m.width, format, seed, odd), m.norm = floats(m.width, seed + 1, odd);
  m.logits = matrix(m.vocabulary, m.width, format, bits, seed + 2, odd, false);
  m.cos = floats(m.positions * m.head / 2, seed + 3, false), m.sin = floats(m.positions * m.head / 2, seed + 4, false);
  for (int64_t l = 0; l < m.layers; l++) {
    const uint32_t own = seed + 100 * uint32_t(l + 1);
    auto by = [&](int64_t r, int64_t c, uint32_t n) { return matrix(r, c, format, bits, own + n, odd, n % 2); };
    Layer layer{by(made.q, m.width, 1), by(made.kv, m.width, 2), by(made.kv, m.width, 3), by(m.width, made.q, 4),
        by(m.inner, m.width, 5), by(m.inner, m.width, 6), by(m.width, m.inner, 7)};
    layer.norm = floats(m.width, own + 8, odd), layer.after = floats(m.width, own + 9, odd);
    layer.window = in.flag() ? in.from(1, 5) : 0;
    made.layers.push_back(layer);
  }
  return made;
}
// Room for keys and values of so many texts, all zeros.
void clear_kept(Small& made, int64_t texts) {
  const int64_t nbytes = texts * made.kv * made.m.positions * (made.m.format ? 2 : 4);
  for (Layer& layer : made.layers)
    for (void** one : {&layer.keys, &layer.values}) held.emplace_back(size_t(nbytes)), *one = held.back().at;
  made.m.layer = made.layers.data();
}
bool same(const float* a, const float* b, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (a[i] != b[i] && (a[i] == a[i] || b[i] == b[i])) return false;
  return true;
}

// A generation by draws: the same tokens on one worker and on several; somebody else watches it, and may stop it.
void generated(Input& in) {
  const bool odd = in.byte() == 255;
  const uint32_t seed = uint32_t(in.word());
  Small small = small_model(in, seed, odd);
  const Model& m = small.m;
  const int64_t rows = in.from(1, 3), steps = in.from(1, 5), words = in.from(1, 90);
  const bool stops = in.byte() % 8 == 7, drawn = in.flag();
  const double heat = in.flag() ? 0.0 : 0.8, part = in.flag() ? 1.0 : 0.9;
  const int64_t top_k = in.from(0, 5), end = in.from(0, m.vocabulary), threads = in.from(2, 4);
  std::vector<int64_t> made[2];
  std::vector<float> logits[2];
  for (int side = 0; side < 2; side++) {
    clear_kept(small, rows);
    Exact<int64_t> tokens(rows), places(rows), trace(words);
    Exact<double> points(steps);
    Exact<uint8_t> seen(rows * m.vocabulary);
    for (int64_t s = 0; s < steps; s++) points[s] = double(seed >> s % 16 & 255) / 256;
    for (int64_t b = 0; b < rows; b++) tokens[b] = (seed + b) % m.vocabulary, places[b] = (seed >> 8) % m.positions;
    std::vector<Draw> draws;
    for (int64_t b = 0; b < rows; b++) draws.push_back({b ? heat : 0.7, part, 1.3, top_k, points.data(),
        b % 2 ? seen.data() + b * m.vocabulary : nullptr});
    made[side].assign(steps * rows, -5), logits[side].assign(rows * m.vocabulary, 0);
    std::atomic<int64_t> done{0};
    std::atomic<int32_t> stopping{0};
    Run run{rows, steps, 1, side ? threads : 1, tokens.data(), places.data(), made[side].data(), &end,
        logits[side].data(), &done, &stopping};
    run.draws = drawn ? draws.data() : nullptr, run.trace = trace.data(), run.trace_words = words;
    std::thread watcher([&] { while (stops && side && !done.load()) std::this_thread::yield();
        if (stops && side) stopping.store(1); });
    REQUIRE(decode(&m, &run) == 0);
    watcher.join();
    REQUIRE(done.load() >= 1 && done.load() <= steps);
    for (int64_t i = 0; i < done.load() * rows; i++) REQUIRE(made[side][i] >= -2 && made[side][i] < m.vocabulary);
    const int64_t told = (words - 1) / (side ? threads : 1) > 1 ? (side ? threads : 1) : 0;
    REQUIRE(trace[0] == told);
  }
  if (stops) return;
  REQUIRE(made[0] == made[1] && same(logits[0].data(), logits[1].data(), rows * m.vocabulary));
}

// Tokens of some texts read at once: the logits are those of reading them one after the other.
void read_at_once(Input& in) {
  const uint32_t seed = uint32_t(in.word());
  Small small = small_model(in, seed, in.byte() == 255);
  const Model& m = small.m;
  const int64_t texts = in.from(1, 3), threads = in.from(1, 4);
  std::vector<int64_t> homes, places, tokens;
  for (int64_t text = 0; text < texts; text++)
    for (int64_t n = in.from(1, m.positions), place = 0; place < n; place++)
      homes.push_back(text), places.push_back(place), tokens.push_back((seed + homes.size() * 7) % m.vocabulary);
  const int64_t rows = int64_t(homes.size()), first = in.from(0, rows - 1);
  Exact<float> logits((rows - first) * m.vocabulary), one(m.vocabulary);
  Exact<int64_t> made(rows - first);
  std::atomic<int64_t> done{0};
  std::atomic<int32_t> stopping{0};
  clear_kept(small, texts);
  Run run{rows, 1, 0, threads, tokens.data(), places.data(), made.data(), nullptr, logits.data(), &done, &stopping,
      homes.data(), first};
  REQUIRE(decode(&m, &run) == 0 && done.load() == 1);
  clear_kept(small, texts);
  for (int64_t row = 0; row < rows; row++) {
    Run alone{1, 1, 0, 1, &tokens[row], &places[row], made.data(), nullptr, one.data(), &done, &stopping, &homes[row], 0};
    REQUIRE(decode(&m, &alone) == 0);
    if (row >= first) REQUIRE(same(one.data(), logits.data() + (row - first) * m.vocabulary, m.vocabulary));
  }
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  held.clear();
  in.flag() ? generated(in) : read_at_once(in);
  held.clear();
  return 0;
}
