// A decoder's token loop on a CPU, from the first token to the last in one call.
//
// Every worker computes a fixed part of every phase and waits for the others between phases; what it computes does not depend
// on how many there are. Sums are float32 in a fixed order, whatever the weights' dtype: it is widened in registers. Weights in 8 or
// 4 bits meet inputs in 8 (panels.h).
//
//   norm, q k v | attention by head and part of the context | out + x | norm, silu(gate) · up | down + x     in each layer
//   norm, logits | the largest                                                                              in the end
//
// A row is one token. In a generation each is of a text of its own; where a prompt or a guess is read, many are of one text, and keys
// of all are kept before any looks at them.
#include <atomic>
#include <cfloat>
#include <memory>
#include <vector>

#include "barrier.h"
#include "crew.h"
#include "draw.h"
#include "panels.h"
#include "trace.h"

struct Matrix {  // [rows, columns], row by row; or in panels
  const void* data;
  const float* bias;  // or null
  int64_t rows, columns;
  const f16* scales;  // of panels; the whole matrix has one more, so that these are in range
  float scale;
};

struct Layer {
  Matrix q, k, v, out, gate, up, down;
  const float *norm, *after, *q_norm, *k_norm;  // the last two may be null
  void *keys, *values;                          // [rows, kv_heads, positions, head]
  int64_t window;                               // 0: all
};

struct Model {
  int64_t vocabulary, width, layers, heads, kv_heads, head, inner, positions;
  float eps;
  int32_t format;  // 0 float32, 1 bfloat16, 2 float16: of words, keys and values, and of matrices without
  int32_t bits;    // 8 or 4: these are in panels; else 0
  const void* words;
  const float* norm;
  Matrix logits;
  const float *cos, *sin;  // [positions, head / 2]
  const Layer* layer;
};

struct Run {
  int64_t rows, steps, ends, threads;
  int64_t* tokens;      // [rows]: the next one of each; -1 for a row that is not computed
  int64_t* places;      // [rows]: where it stands
  int64_t* made;        // [steps, rows]: what followed; -1 where a row has ended
  const int64_t* end;   // tokens that end a text
  float* logits;        // [rows - first, vocabulary] of the last step
  std::atomic<int64_t>* done;      // steps that are done, for whoever looks on
  std::atomic<int32_t>* stopping;  // not 0: end after this step
  const int64_t* homes;  // [rows]: the text each row belongs to, where several rows are tokens of one, in one step; or null
  int64_t first;         // of the rows whose logits are asked for
  const Draw* draws;     // [rows]: how the next token is chosen; null: the most likely
  int64_t* trace;        // what each worker did when (trace.h); or null
  int64_t trace_words;
};

namespace {

constexpr int AHEAD = 1 << 18;  // bytes of weights that are fetched while waiting, within the second cache
constexpr int BLOCK = 64;       // positions of a context that are weighed at once
constexpr int KEYS_AHEAD = 16;  // that are fetched, in positions
constexpr int LONG = 256;       // positions from which on a head's context is cut into parts
constexpr int TOGETHER = 4;     // rows of weights, and texts by panels, in registers at once
constexpr int FLOATS = VECTOR_BYTES == 64 ? 4 : 3;  // texts by float weights: 16 registers hold 4 * 3 sums, and what they come from

struct Part {
  int64_t begin, end;
};
// What worker `mine` of `workers` does of `count` things, in whole steps of `step`.
Part part(int64_t count, int mine, int workers, int64_t step = 1) {
  int64_t units = (count + step - 1) / step;
  return {std::min(count, units * mine / workers * step), std::min(count, units * (mine + 1) / workers * step)};
}

// Calls some(count, first) for all texts: so many at a time, then one at a time.
template <int COUNT, typename Some>
INLINE void in_groups(int64_t texts, Some some) {
  int64_t first = 0;
  for (; first + COUNT <= texts; first += COUNT) some(std::integral_constant<int, COUNT>{}, first);
  for (; first < texts; first++) some(std::integral_constant<int, 1>{}, first);
}

// R rows of weights, `apart` from one another, by B rows of inputs. Each sum has an order of its own that depends on nothing else.
template <typename T, int R, int B>  // compiled once, whoever calls it
__attribute__((noinline)) void dots(const T* w, int64_t apart, int64_t columns, const float* x, int64_t stride, float (&found)[R][B]) {
  vf sums[R][B] = {};
  int64_t i = 0;
  for (; i + W <= columns; i += W) {
    vf in[B];
    for (int b = 0; b < B; b++) in[b] = load(x + b * stride + i);
    for (int r = 0; r < R; r++) {
      vf weight = lanes(w + r * apart + i);
      for (int b = 0; b < B; b++) sums[r][b] = fma(weight, in[b], sums[r][b]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      float total = sum(sums[r][b]);
      for (int64_t j = i; j < columns; j++) total = plus_product(total, get(w + r * apart + j), x[b * stride + j]);
      found[r][b] = total;
    }
}

// Calls done(row, text, value) for R rows of a matrix, the first and every `apart`th, and all texts.
template <typename T, int R, typename Done>
INLINE void multiply_rows(const Matrix& m, int64_t row, int64_t apart, const float* x, int64_t texts, Done done) {
  const T* data = static_cast<const T*>(m.data) + row * m.columns;
  auto some = [&](auto few, int64_t first) {
    constexpr int B = decltype(few)::value;
    float found[R][B];
    dots<T, R, B>(data, apart * m.columns, m.columns, x + first * m.columns, m.columns, found);
    for (int i = 0; i < R; i++)
      for (int b = 0; b < B; b++)
        done(row + i * apart, first + b, found[i][b] + (m.bias ? m.bias[row + i * apart] : 0.0f));
  };
  in_groups<FLOATS>(texts, some);
}
// Rows of four places at once: a processor fetches ahead in a few long streams, and loses its way among neighbouring short ones.
template <typename T, typename Done>
void multiply(const Matrix& m, Part rows, const float* x, int64_t texts, Done done) {
  const int64_t apart = (rows.end - rows.begin) / TOGETHER;
  for (int64_t i = 0; i < apart; i++) multiply_rows<T, TOGETHER>(m, rows.begin + i, apart, x, texts, done);
  for (int64_t r = rows.begin + TOGETHER * apart; r < rows.end; r++) multiply_rows<T, 1>(m, r, 1, x, texts, done);
}
// The same with a matrix in panels. `rows` begins with one of them.
template <int BITS, typename Done>
void multiply_panels(const Matrix& m, Part rows, const Rounded& x, int64_t texts, Done done) {
  for (int64_t r = rows.begin; r < rows.end; r += PANEL) {
    const int64_t groups = r / PANEL * x.groups, count = std::min<int64_t>(PANEL, rows.end - r);
    const uint8_t* codes = static_cast<const uint8_t*>(m.data) + groups * (PANEL * GROUP * BITS / 8);
    auto some = [&](auto few, int64_t first) {
      constexpr int B = decltype(few)::value;
      float found[PANEL][B];
      panel_by<BITS, B>(codes, m.scales + groups * PANEL, x, first, found);
      for (int64_t i = 0; i < count; i++)
        for (int b = 0; b < B; b++)
          done(r + i, first + b, plus_product(m.bias ? m.bias[r + i] : 0.0f, found[i][b], m.scale));
    };
    in_groups<TOGETHER>(texts, some);
  }
}

void normed(const float* x, const float* weight, int64_t width, float eps, float* out) {
  vf squares = {};
  int64_t i = 0;
  for (; i + W <= width; i += W) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total = plus_product(total, x[i], x[i]);
  float scale = 1.0f / std::sqrt(total / (float)width + eps);
  for (i = 0; i + W <= width; i += W) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < width; i++) out[i] = x[i] * scale * weight[i];
}

// A head normed where the family does that, and turned by its position. `kept` has room for it.
void turned(const float* x, const float* norm, const Model& m, int64_t place, float* kept, float* out) {
  if (norm) normed(x, norm, m.head, m.eps, kept);
  else std::copy(x, x + m.head, kept);
  const int64_t half = m.head / 2;
  const float *cos = m.cos + place * half, *sin = m.sin + place * half;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const vf low = load(kept + i), high = load(kept + i + half), by = load(cos + i), across = load(sin + i);
    store(out + i, low * by - high * across);
    store(out + i + half, high * by + low * across);
  }
  for (; i < half; i++) {
    out[i] = kept[i] * cos[i] - kept[i + half] * sin[i];
    out[i + half] = kept[i + half] * cos[i] + kept[i] * sin[i];
  }
}

// What all workers share. Everything is [rows, …] in float32.
struct Shared {
  Shared(const Model& m, const Run& r, int workers)
      : parts(std::max<int64_t>(1, (workers + r.rows * m.kv_heads - 1) / (r.rows * m.kv_heads))),
        x(r.rows * m.width), qkv(r.rows * (m.heads + 2 * m.kv_heads) * m.head), mixed(r.rows * m.heads * m.head * parts),
        tops(r.rows * m.heads * parts), sums(r.rows * m.heads * parts), hidden(r.rows * m.inner), up(r.rows * m.inner),
        best(workers * r.rows), where(workers * r.rows), barrier(workers) {}
  const int64_t parts;
  std::vector<float> x, qkv, mixed, tops, sums, hidden, up, best;
  std::vector<int64_t> where;
  Barrier barrier;
  bool ended = false;
};

constexpr int64_t NOWHERE = INT64_MAX, NO_NUMBER = INT64_MAX - 1;  // in place of a token

template <typename T>
class Worker {
 public:
  Worker(const Model& m, const Run& r, Shared& s, int mine)
      : m(m), r(r), s(s), mine(mine), workers(s.barrier.workers),
        wide(r.rows * std::max(m.width, m.heads * m.head)), kept(m.head), key(m.head), query(m.heads / m.kv_heads * m.head) {
    if (m.bits) rounded.make_room(r.rows, std::max({m.width, m.heads * m.head, m.inner}));
    if (r.draws && !mine) drawn.make_room(m.vocabulary);  // a lack of memory is told before anybody waits for anybody
    if (r.trace) trace = Trace(r.trace, r.trace_words, mine, workers);
  }

  void live() {
    for (int64_t step = 0; step < r.steps; step++) {
      trace.begin(step);
      begin_token();
      for (int64_t layer = 0; layer < m.layers; layer++)
        one_layer(m.layer[layer], layer + 1 < m.layers ? m.layer[layer + 1].q : m.logits);
      choose(step);
      wait();
      if (s.ended) return;
    }
  }

 private:
  void begin_token() {
    Part mine_of = part(r.rows * m.width, mine, workers);
    const T* words = static_cast<const T*>(m.words);
    for (int64_t i = mine_of.begin; i < mine_of.end; i++) {
      int64_t token = std::max<int64_t>(0, r.tokens[i / m.width]);
      s.x[i] = get(words + token * m.width + i % m.width);
    }
    trace.did(WORDS);
    wait();
  }
  void wait(Memory ahead = {nullptr, 0}) {
    s.barrier.wait(ahead);
    trace.did(WAITING);
  }

  // The next products' inputs, [rows, columns]. Rounding them, and the norm, is so little work that each worker does all of it.
  void take(const float* x, int64_t columns, int64_t texts) {
    in = x;
    if (m.bits) round_inputs(x, texts, columns, rounded);
  }
  void take_normed(const float* weight, int64_t first = 0) {
    for (int64_t b = first; b < r.rows; b++)
      normed(s.x.data() + b * m.width, weight, m.width, m.eps, wide.data() + (b - first) * m.width);
    take(wide.data(), m.width, r.rows - first);
  }

  // The first weights that this worker reads of a matrix.
  Memory begin_of(const Matrix& by) {
    const Part rows = own_rows(by.rows);
    const int64_t columns = m.bits ? (by.columns + GROUP - 1) / GROUP * GROUP : by.columns;
    const int64_t row_bits = columns * (m.bits ? m.bits : 8 * (int64_t)sizeof(T));
    return {static_cast<const char*>(by.data) + rows.begin * row_bits / 8,
            std::min<int64_t>(AHEAD, (rows.end - rows.begin) * row_bits / 8 / (m.bits ? 1 : TOGETHER))};
  }
  Part own_rows(int64_t rows) { return part(rows, mine, workers, m.bits ? PANEL : TOGETHER); }
  // Calls done(row, text, value) for this worker's rows of a matrix.
  template <typename Done>
  void product(const Matrix& by, int64_t texts, Done done) {
    const Part rows = own_rows(by.rows);
    if (m.bits == 8) multiply_panels<8>(by, rows, rounded, texts, done);
    else if (m.bits == 4) multiply_panels<4>(by, rows, rounded, texts, done);
    else multiply<T>(by, rows, in, texts, done);
  }
  void add_product(const Matrix& by) {
    product(by, r.rows, [&](int64_t row, int64_t b, float value) { s.x[b * m.width + row] += value; });
  }

  void one_layer(const Layer& l, const Matrix& next) {
    const int64_t queries = m.heads * m.head, keys = m.kv_heads * m.head, all = queries + 2 * keys;
    take_normed(l.norm);
    int64_t first = 0;
    for (const Matrix* one : {&l.q, &l.k, &l.v}) {
      product(*one, r.rows, [&](int64_t row, int64_t b, float value) { s.qkv[b * all + first + row] = value; });
      first += one->rows;
    }
    trace.did(QUERIES);
    wait();
    if (r.homes) {
      for (int64_t task = mine; task < r.rows * m.kv_heads; task += workers) keep(l, task / m.kv_heads, task % m.kv_heads);
      wait();
    }
    attend(l);
    trace.did(ATTENTION);
    wait(begin_of(l.out));
    take(joined(), queries, r.rows);
    add_product(l.out);
    trace.did(OUT);
    wait(begin_of(l.gate));
    take_normed(l.after);
    gated(l);
    trace.did(GATED);
    wait(begin_of(l.down));
    take(s.hidden.data(), m.inner, r.rows);
    add_product(l.down);
    trace.did(DOWN);
    wait(begin_of(next));
  }

  void gated(const Layer& l) {
    product(l.gate, r.rows, [&](int64_t row, int64_t b, float value) { s.hidden[b * m.inner + row] = value; });
    product(l.up, r.rows, [&](int64_t row, int64_t b, float value) { s.up[b * m.inner + row] = value; });
    const Part rows = own_rows(m.inner);
    for (int64_t b = 0; b < r.rows; b++) {
      float *gate = s.hidden.data() + b * m.inner, *up = s.up.data() + b * m.inner;
      int64_t i = rows.begin;
      for (; i + W <= rows.end; i += W) store(gate + i, g_silu(load(gate + i)) * load(up + i));
      if (i < rows.end) put_lanes(gate + i, g_silu(lanes(gate + i, rows.end - i)) * lanes(up + i, rows.end - i), rows.end - i);
    }
  }

  // Where the keys (or values) of a row's text begin.
  T* kept_of(void* all, int64_t b, int64_t kv) {
    const int64_t home = r.homes ? r.homes[b] : b;
    return static_cast<T*>(all) + (home * m.kv_heads + kv) * m.positions * m.head;
  }
  // A row's new key and value, to where they stay.
  void keep(const Layer& l, int64_t b, int64_t kv) {
    const int64_t place = r.places[b];
    const float* own = s.qkv.data() + b * (m.heads + 2 * m.kv_heads) * m.head;
    const float* value = own + (m.heads + m.kv_heads + kv) * m.head;
    turned(own + (m.heads + kv) * m.head, l.k_norm, m, place, kept.data(), key.data());
    T *keys = kept_of(l.keys, b, kv) + place * m.head, *values = kept_of(l.values, b, kv) + place * m.head;
    int64_t i = 0;
    for (; i + W <= m.head; i += W) put_lanes(keys + i, load(key.data() + i)), put_lanes(values + i, load(value + i));
    for (; i < m.head; i++) put(keys + i, key[i]), put(values + i, value[i]);
  }

  // Heads that share keys are weighed together, over one part of the context.
  void attend(const Layer& l) {
    const int64_t group = m.heads / m.kv_heads, all = (m.heads + 2 * m.kv_heads) * m.head;
    Part tasks = part(r.rows * m.kv_heads * s.parts, mine, workers);
    int64_t every = 1;
    if (r.homes) tasks = {mine, r.rows * m.kv_heads * s.parts}, every = workers;  // later tokens look at more: in turns
    for (int64_t task = tasks.begin; task < tasks.end; task += every) {
      const int64_t piece = task % s.parts, kv = task / s.parts % m.kv_heads, b = task / s.parts / m.kv_heads;
      if (r.tokens[b] < 0) continue;
      const int64_t place = r.places[b], from = l.window && place >= l.window ? place - l.window + 1 : 0;
      const int64_t length = place + 1 - from, cut = length < LONG ? 1 : s.parts;
      const float* own = s.qkv.data() + b * all;
      const T *keys = kept_of(l.keys, b, kv), *values = kept_of(l.values, b, kv);
      Part span = piece < cut ? part(length, (int)piece, (int)cut) : Part{0, 0};
      span = {from + span.begin, from + span.end};
      if (!r.homes && span.end == place + 1) keep(l, b, kv);  // nobody else reads or writes that place now
      const int64_t slot = (b * m.heads + kv * group) * s.parts + piece;
      for (int64_t h = 0; h < group; h++) {
        turned(own + (kv * group + h) * m.head, l.q_norm, m, place, kept.data(), query.data() + h * m.head);
        std::fill_n(mixed_of(slot, h), m.head, 0.0f);
        s.tops[slot + h * s.parts] = -FLT_MAX, s.sums[slot + h * s.parts] = 0.0f;
      }
      // Two heads share what is read of a key, and all of them a block while it is in the nearest cache.
      for (int64_t begin = span.begin; begin < span.end; begin += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, span.end - begin);
        int64_t h = 0;
        for (; h + 2 <= group; h += 2) weigh<2>(slot, h, keys + begin * m.head, values + begin * m.head, count);
        if (h < group) weigh<1>(slot, h, keys + begin * m.head, values + begin * m.head, count);
      }
    }
  }
  float* mixed_of(int64_t slot, int64_t h) { return s.mixed.data() + (slot + h * s.parts) * m.head; }

  // Products of G queries with `count` keys. A score's order of sums does not depend on the keys beside it.
  //
  // A head's keys and values are a short stream each, which a processor finds late: the first who needs them asks for keys some way
  // ahead and for the values that come next, a few lines at a time. Many at once would hold up what is being computed.
  template <int G>
  void score(const float* queries, const T* keys, const T* values, bool first_heads, int64_t count, float (&found)[G][BLOCK]) {
    constexpr int KEYS = W / G;  // so that all sums become one vector
    for (int64_t first = 0; first < count; first += KEYS) {
      const T* key[KEYS];
      for (int k = 0; k < KEYS; k++) {
        const int64_t offset = std::min(first + k, count - 1) * m.head;
        key[k] = keys + offset;
        if (first_heads)
          for (int64_t i = 0; i < m.head; i += LINE / sizeof(T))
            __builtin_prefetch(keys + offset + KEYS_AHEAD * m.head + i), __builtin_prefetch(values + offset + i);
      }
      vf sums[W] = {};
      int64_t i = 0;
      for (; i + W <= m.head; i += W) {
        vf in[G];
        for (int g = 0; g < G; g++) in[g] = load(queries + g * m.head + i);
        for (int k = 0; k < KEYS; k++) {
          const vf part = lanes(key[k] + i);
          for (int g = 0; g < G; g++) sums[g * KEYS + k] = fma(part, in[g], sums[g * KEYS + k]);
        }
      }
      vf totals = sums_of(sums);
      for (; i < m.head; i++)
        for (int k = 0; k < KEYS; k++)
          for (int g = 0; g < G; g++)
            totals[g * KEYS + k] = plus_product(totals[g * KEYS + k], get(key[k] + i), queries[g * m.head + i]);
      for (int g = 0; g < G; g++) memcpy(found[g] + first, reinterpret_cast<const float*>(&totals) + g * KEYS, KEYS * sizeof(float));
    }
  }
  // R vectors of what G heads have summed, scaled anew, and `count` values by their weights.
  template <int G, int R>
  void mix(int64_t slot, int64_t h, int64_t i, const T* values, const float (&weights)[G][BLOCK], int64_t count, const float (&shrink)[G]) {
    vf mixed[G][R];
    for (int g = 0; g < G; g++)
      for (int n = 0; n < R; n++) mixed[g][n] = load(mixed_of(slot, h + g) + i + n * W) * shrink[g];
    for (int64_t p = 0; p < count; p++)
      for (int n = 0; n < R; n++) {
        const vf value = lanes(values + p * m.head + i + n * W);
        for (int g = 0; g < G; g++) mixed[g][n] = fma(value, fill(weights[g][p]), mixed[g][n]);
      }
    for (int g = 0; g < G; g++)
      for (int n = 0; n < R; n++) store(mixed_of(slot, h + g) + i + n * W, mixed[g][n]);
  }

  // The softmax of G heads' queries over one more block of positions: what was summed is scaled anew when the maximum grows.
  template <int G>
  void weigh(int64_t slot, int64_t h, const T* keys, const T* values, int64_t count) {
    float weights[G][BLOCK], shrink[G];
    score<G>(query.data() + h * m.head, keys, values, h == 0, count, weights);
    for (int g = 0; g < G; g++) shrink[g] = grow(weights[g], count, s.tops[slot + (h + g) * s.parts], s.sums[slot + (h + g) * s.parts]);
    int64_t i = 0;
    for (; i + TOGETHER * W <= m.head; i += TOGETHER * W) mix<G, TOGETHER>(slot, h, i, values, weights, count, shrink);
    for (; i + W <= m.head; i += W) mix<G, 1>(slot, h, i, values, weights, count, shrink);
    for (; i < m.head; i++)
      for (int g = 0; g < G; g++) {
        float& out = mixed_of(slot, h + g)[i];
        out *= shrink[g];
        for (int64_t p = 0; p < count; p++) out = plus_product(out, get(values + p * m.head + i), weights[g][p]);
      }
  }
  // A block's scores become weights; gives what earlier ones are to be multiplied with.
  float grow(float (&weights)[BLOCK], int64_t count, float& top, float& total) {
    const float scale = 1.0f / std::sqrt((float)m.head);
    vf tops = fill(top), sums = {};
    for (int64_t p = 0; p < count; p += W) {
      const vf scores = keep_first(load(weights + p) * scale, (int)(count - p), fill(-FLT_MAX));
      store(weights + p, scores);
      tops = vmax(scores, tops);
    }
    const float highest = largest(tops), shrink = std::exp(top - highest);
    for (int64_t p = 0; p < count; p += W) {
      const vf apart = load(weights + p) - highest;
      const vf grown = keep_first(::choose(apart != apart, apart, vexp(apart)), (int)(count - p), vf{});
      store(weights + p, grown);
      sums = sums + grown;
    }
    total = total * shrink + sum(sums), top = highest;
    return shrink;
  }

  // The parts of every head as one, in this worker's own memory.
  const float* joined() {
    for (int64_t slot = 0; slot < r.rows * m.heads; slot++) {
      float* out = wide.data() + slot * m.head;
      std::fill(out, out + m.head, 0.0f);
      if (r.tokens[slot / m.heads] < 0) continue;
      const float *tops = s.tops.data() + slot * s.parts, *sums = s.sums.data() + slot * s.parts;
      float top = *std::max_element(tops, tops + s.parts), total = 0.0f;
      for (int64_t p = 0; p < s.parts; p++) total += sums[p] * std::exp(tops[p] - top);
      for (int64_t p = 0; p < s.parts; p++) {
        const float share = std::exp(tops[p] - top) / total;
        const float* mixed = s.mixed.data() + (slot * s.parts + p) * m.head;
        for (int64_t i = 0; i < m.head; i++) out[i] = plus_product(out[i], mixed[i], share);
      }
    }
    return wide.data();
  }

  void choose(int64_t step) {
    const int64_t asked = r.rows - r.first;
    take_normed(m.norm, r.first);
    float* best = s.best.data() + mine * r.rows;
    int64_t* where = s.where.data() + mine * r.rows;
    std::fill(best, best + asked, -FLT_MAX);
    std::fill(where, where + asked, NOWHERE);
    product(m.logits, asked, [&](int64_t row, int64_t b, float value) {
      r.logits[b * m.vocabulary + row] = value;
      if (!(value <= FLT_MAX)) where[b] = NO_NUMBER;  // nothing can be chosen of these
      else if (where[b] != NO_NUMBER && (value > best[b] || (value == best[b] && row < where[b]))) best[b] = value, where[b] = row;
    });
    trace.did(LOGITS);
    wait();
    if (mine) return;
    bool open = false;
    for (int64_t b = 0; b < asked; b++) {
      const int64_t row = r.first + b;
      int64_t& made = r.made[step * asked + b];
      made = -1;
      if (r.tokens[row] < 0) continue;
      made = chosen(step, b);
      if (r.homes) continue;  // whoever asked goes on
      const bool over = made < 0 || std::find(r.end, r.end + r.ends, made) != r.end + r.ends || r.places[row] + 1 >= m.positions;
      r.tokens[row] = over ? -1 : made;
      r.places[row]++;
      open = open || !over;
    }
    s.ended = !open || r.stopping->load();
    r.done->store(step + 1);
    trace.did(CHOICE);
  }

  // The next token of a row, or -2 where the model has computed no numbers.
  int64_t chosen(int64_t step, int64_t b) {
    int winner = 0;  // of equals the first, as torch has it
    for (int w = 0; w < workers; w++) {
      if (s.where[w * r.rows + b] == NO_NUMBER) return -2;
      if (s.best[w * r.rows + b] > s.best[winner * r.rows + b]) winner = w;
    }
    const int64_t likely = s.where[winner * r.rows + b];
    if (likely == NOWHERE) return -2;
    if (!r.draws) return likely;
    const Draw& how = r.draws[r.first + b];
    return how.plain() ? likely : how.token(r.logits + b * m.vocabulary, m.vocabulary, step, drawn);
  }

  const Model& m;
  const Run& r;
  Shared& s;
  const int mine, workers;
  std::vector<float> wide, kept, key, query;
  const float* in = nullptr;
  Rounded rounded;
  Drawn drawn;
  Trace trace;
};

// A barrier waits for all, so threads are there and all memory is taken before anything begins: whoever cannot be started is not
// counted, and a lack of memory changes nothing.
template <typename T>
void decode_as(const Model& m, const Run& r) {
  std::unique_ptr<Crew> crew = Crew::take((int)r.threads);
  const int count = std::min((int)r.threads, crew->members());
  Shared shared(m, r, count);
  std::vector<std::unique_ptr<Worker<T>>> workers;
  for (int i = 0; i < count; i++) workers.push_back(std::make_unique<Worker<T>>(m, r, shared, i));
  crew->run(count, [&](int mine) { workers[mine]->live(); });
  Crew::give_back(std::move(crew));
}

}  // namespace

// 0, or 1 where memory ran out before anything was changed.
EXPORT int decode(const Model* m, const Run* r) {
  try {
    if (m->format == 0) decode_as<float>(*m, *r);
    else if (m->format == 1) decode_as<bf16>(*m, *r);
    else decode_as<f16>(*m, *r);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// x [texts, columns] by a matrix in panels, [texts, rows]: one product as `decode` computes it. Returns 0, or 1 without memory.
EXPORT int panel_product(const Matrix* by, int32_t bits, const float* x, int64_t texts, float* out) {
  try {
    Rounded rounded;
    rounded.make_room(texts, by->columns);
    round_inputs(x, texts, by->columns, rounded);
    auto done = [&](int64_t row, int64_t b, float value) { out[b * by->rows + row] = value; };
    if (bits == 8) multiply_panels<8>(*by, {0, by->rows}, rounded, texts, done);
    else multiply_panels<4>(*by, {0, by->rows}, rounded, texts, done);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
