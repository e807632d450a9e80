// A decoder's token loop on a CPU, from the first token to the last in one call.
//
// Every worker computes a fixed part of every phase and waits for the others between phases; what it computes does not depend
// on how many there are. Sums are float32 in a fixed order, whatever the weights' dtype: it is widened in registers.
//
//   norm, q k v | attention by head and part of the context | out + x | norm, silu(gate) · up | down + x     in each layer
//   norm, logits | the largest                                                                              in the end
#include <atomic>
#include <cfloat>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "lanes.h"

struct Matrix {  // [rows, columns], row by row
  const void* data;
  const float* bias;  // or null
  int64_t rows, columns;
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
  int32_t format;  // 0 float32, 1 bfloat16, 2 float16: of all matrices, keys and values
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
  float* logits;        // [rows, vocabulary] of the last step
  std::atomic<int64_t>* done;      // steps that are done, for whoever looks on
  std::atomic<int32_t>* stopping;  // not 0: end after this step
};

namespace {

constexpr int SPINS = 2000;     // looks at a barrier, some 50 microseconds
constexpr int BLOCK = 64;       // positions of a context that are weighed at once
constexpr int LONG = 256;       // positions from which on a head's context is cut into parts
constexpr int TOGETHER = 4;     // rows of weights, and of texts, in registers at once

// Who comes early looks for a while, then sleeps: where others want the cores, looking on takes them from whoever is late.
class Barrier {
 public:
  explicit Barrier(int workers) : workers(workers) {}
  void wait() {
    const int seen = turn.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == workers - 1) {
      arrived.store(0, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> guard(mutex);
        turn.store(seen + 1, std::memory_order_release);
      }
      next.notify_all();
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (turn.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    next.wait(lock, [&] { return turn.load(std::memory_order_acquire) != seen; });
  }
  const int workers;

 private:
  std::atomic<int> arrived{0}, turn{0};
  std::mutex mutex;
  std::condition_variable next;
};

struct Part {
  int64_t begin, end;
};
// What worker `mine` of `workers` does of `count` things, in whole steps of `step`.
Part part(int64_t count, int mine, int workers, int64_t step = 1) {
  int64_t units = (count + step - 1) / step;
  return {std::min(count, units * mine / workers * step), std::min(count, units * (mine + 1) / workers * step)};
}

// R rows of weights by B rows of inputs. Each sum has an order of its own that depends on nothing else.
template <typename T, int R, int B>
INLINE void dots(const T* w, int64_t columns, const float* x, int64_t stride, float (&found)[R][B]) {
  vf sums[R][B] = {};
  int64_t i = 0;
  for (; i + W <= columns; i += W) {
    vf in[B];
    for (int b = 0; b < B; b++) in[b] = load(x + b * stride + i);
    for (int r = 0; r < R; r++) {
      vf weight = lanes(w + r * columns + i);
      for (int b = 0; b < B; b++) sums[r][b] = fma(weight, in[b], sums[r][b]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      float total = sum(sums[r][b]);
      for (int64_t j = i; j < columns; j++) total = plus_product(total, get(w + r * columns + j), x[b * stride + j]);
      found[r][b] = total;
    }
}

// Calls done(row, text, value) for the rows of a matrix from `begin` to `end` and all texts.
template <typename T, int B, typename Done>
void multiply_by(const Matrix& m, Part rows, const float* x, int64_t first, Done done) {
  const T* data = static_cast<const T*>(m.data);
  int64_t r = rows.begin;
  for (; r + TOGETHER <= rows.end; r += TOGETHER) {
    float found[TOGETHER][B];
    dots<T, TOGETHER, B>(data + r * m.columns, m.columns, x + first * m.columns, m.columns, found);
    for (int i = 0; i < TOGETHER; i++)
      for (int b = 0; b < B; b++) done(r + i, first + b, found[i][b] + (m.bias ? m.bias[r + i] : 0.0f));
  }
  for (; r < rows.end; r++) {
    float found[1][B];
    dots<T, 1, B>(data + r * m.columns, m.columns, x + first * m.columns, m.columns, found);
    for (int b = 0; b < B; b++) done(r, first + b, found[0][b] + (m.bias ? m.bias[r] : 0.0f));
  }
}
template <typename T, typename Done>
void multiply(const Matrix& m, Part rows, const float* x, int64_t texts, Done done) {
  int64_t first = 0;
  for (; first + TOGETHER <= texts; first += TOGETHER) multiply_by<T, TOGETHER>(m, rows, x, first, done);
  for (; first < texts; first++) multiply_by<T, 1>(m, rows, x, first, done);
}

void normed(const float* x, const float* weight, int64_t width, float eps, float* out) {
  vf squares = {};
  int64_t i = 0;
  for (; i + W <= width; i += W) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total = plus_product(total, x[i], x[i]);
  float scale = 1.0f / std::sqrt(total / (float)width + eps);
  for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

// A head normed where the family does that, and turned by its position. `kept` has room for it.
void turned(const float* x, const float* norm, const Model& m, int64_t place, float* kept, float* out) {
  if (norm) normed(x, norm, m.head, m.eps, kept);
  else std::copy(x, x + m.head, kept);
  const int64_t half = m.head / 2;
  const float *cos = m.cos + place * half, *sin = m.sin + place * half;
  for (int64_t i = 0; i < half; i++) {
    out[i] = kept[i] * cos[i] - kept[i + half] * sin[i];
    out[i + half] = kept[i + half] * cos[i] + kept[i] * sin[i];
  }
}

// What all workers share. Everything is [rows, …] in float32.
struct Shared {
  Shared(const Model& m, const Run& r, int workers)
      : parts(std::max<int64_t>(1, (workers + r.rows * m.kv_heads - 1) / (r.rows * m.kv_heads))),
        x(r.rows * m.width), qkv(r.rows * (m.heads + 2 * m.kv_heads) * m.head), mixed(r.rows * m.heads * m.head * parts),
        tops(r.rows * m.heads * parts), sums(r.rows * m.heads * parts), hidden(r.rows * m.inner),
        best(workers * r.rows), where(workers * r.rows), barrier(workers) {}
  const int64_t parts;
  std::vector<float> x, qkv, mixed, tops, sums, hidden, best;
  std::vector<int64_t> where;
  Barrier barrier;
  bool ended = false;
};

template <typename T>
class Worker {
 public:
  Worker(const Model& m, const Run& r, Shared& s, int mine)
      : m(m), r(r), s(s), mine(mine), workers(s.barrier.workers),
        wide(r.rows * std::max({m.width, m.heads * m.head, m.inner})), kept(m.head), key(m.head), query(m.head) {}

  void live() {
    for (int64_t step = 0; step < r.steps; step++) {
      begin_token();
      for (int64_t layer = 0; layer < m.layers; layer++) one_layer(m.layer[layer]);
      choose(step);
      s.barrier.wait();
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
    s.barrier.wait();
  }

  // All rows' inputs of a product, in this worker's own memory: the norm is so little work that each does it.
  const float* normed_rows(const float* weight) {
    for (int64_t b = 0; b < r.rows; b++) normed(s.x.data() + b * m.width, weight, m.width, m.eps, wide.data() + b * m.width);
    return wide.data();
  }

  void one_layer(const Layer& l) {
    const int64_t queries = m.heads * m.head, keys = m.kv_heads * m.head, all = queries + 2 * keys;
    const float* in = normed_rows(l.norm);
    int64_t first = 0;
    for (const Matrix* one : {&l.q, &l.k, &l.v}) {
      multiply<T>(*one, part(one->rows, mine, workers, TOGETHER), in, r.rows,
                  [&](int64_t row, int64_t b, float value) { s.qkv[b * all + first + row] = value; });
      first += one->rows;
    }
    s.barrier.wait();
    attend(l);
    s.barrier.wait();
    in = joined();
    multiply<T>(l.out, part(m.width, mine, workers, TOGETHER), in, r.rows,
                [&](int64_t row, int64_t b, float value) { s.x[b * m.width + row] += value; });
    s.barrier.wait();
    in = normed_rows(l.after);
    gated(l, in);
    s.barrier.wait();
    multiply<T>(l.down, part(m.width, mine, workers, TOGETHER), s.hidden.data(), r.rows,
                [&](int64_t row, int64_t b, float value) { s.x[b * m.width + row] += value; });
    s.barrier.wait();
  }

  void gated(const Layer& l, const float* in) {
    Part rows = part(m.inner, mine, workers, TOGETHER);
    multiply<T>(l.gate, rows, in, r.rows, [&](int64_t row, int64_t b, float value) { s.hidden[b * m.inner + row] = g_silu(value); });
    multiply<T>(l.up, rows, in, r.rows, [&](int64_t row, int64_t b, float value) { s.hidden[b * m.inner + row] *= value; });
  }

  // Heads that share keys are weighed together, over one part of the context.
  void attend(const Layer& l) {
    const int64_t group = m.heads / m.kv_heads, all = (m.heads + 2 * m.kv_heads) * m.head;
    Part tasks = part(r.rows * m.kv_heads * s.parts, mine, workers);
    for (int64_t task = tasks.begin; task < tasks.end; task++) {
      const int64_t piece = task % s.parts, kv = task / s.parts % m.kv_heads, b = task / s.parts / m.kv_heads;
      if (r.tokens[b] < 0) continue;
      const int64_t place = r.places[b], from = l.window && place >= l.window ? place - l.window + 1 : 0;
      const int64_t length = place + 1 - from, cut = length < LONG ? 1 : s.parts;
      const float* own = s.qkv.data() + b * all;
      T* keys = static_cast<T*>(l.keys) + (b * m.kv_heads + kv) * m.positions * m.head;
      T* values = static_cast<T*>(l.values) + (b * m.kv_heads + kv) * m.positions * m.head;
      Part span = piece < cut ? part(length, (int)piece, (int)cut) : Part{0, 0};
      span = {from + span.begin, from + span.end};
      if (span.end == place + 1) {  // the new token's: nobody else reads or writes that place now
        turned(own + (m.heads + kv) * m.head, l.k_norm, m, place, kept.data(), key.data());
        const float* value = own + (m.heads + m.kv_heads + kv) * m.head;
        for (int64_t i = 0; i < m.head; i++) put(keys + place * m.head + i, key[i]), put(values + place * m.head + i, value[i]);
      }
      for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        turned(own + h * m.head, l.q_norm, m, place, kept.data(), query.data());
        const int64_t slot = (b * m.heads + h) * s.parts + piece;
        weigh(query.data(), keys, values, span, s.mixed.data() + slot * m.head, s.tops[slot], s.sums[slot]);
      }
    }
  }

  // The softmax of a query over some positions, in one pass: what was summed is scaled anew when the maximum grows.
  void weigh(const float* query, const T* keys, const T* values, Part span, float* out, float& top, float& total) {
    top = -FLT_MAX, total = 0.0f;
    std::fill(out, out + m.head, 0.0f);
    const float scale = 1.0f / std::sqrt((float)m.head);
    for (int64_t begin = span.begin; begin < span.end; begin += BLOCK) {
      const int64_t count = std::min<int64_t>(BLOCK, span.end - begin);
      float weights[BLOCK], highest = top;
      for (int64_t p = 0; p < count; p++) {
        float found[1][1];
        dots<T, 1, 1>(keys + (begin + p) * m.head, m.head, query, m.head, found);
        weights[p] = found[0][0] * scale;
        highest = std::max(highest, weights[p]);
      }
      for (int64_t p = count; p < BLOCK; p++) weights[p] = -FLT_MAX;
      const float shrink = std::exp(top - highest);
      vf sums = {};
      for (int64_t p = 0; p < BLOCK; p += W) {
        vf grown = vexp(load(weights + p) - highest);
        for (int i = 0; i < W; i++)
          if (p + i >= count) grown[i] = 0.0f;
        store(weights + p, grown);
        sums = sums + grown;
      }
      total = total * shrink + sum(sums);
      for (int64_t i = 0; i < m.head; i += W) {
        const int64_t left = std::min<int64_t>(W, m.head - i);
        vf mixed = left == W ? load(out + i) : lanes(out + i, left);
        mixed = mixed * shrink;
        for (int64_t p = 0; p < count; p++) {
          const T* value = values + (begin + p) * m.head + i;
          mixed = fma(left == W ? lanes(value) : lanes(value, left), fill(weights[p]), mixed);
        }
        if (left == W) store(out + i, mixed);
        else put_lanes(out + i, mixed, left);
      }
      top = highest;
    }
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
    const float* in = normed_rows(m.norm);
    float* best = s.best.data() + mine * r.rows;
    int64_t* where = s.where.data() + mine * r.rows;
    std::fill(best, best + r.rows, -FLT_MAX);
    std::fill(where, where + r.rows, INT64_MAX);
    multiply<T>(m.logits, part(m.vocabulary, mine, workers, TOGETHER), in, r.rows, [&](int64_t row, int64_t b, float value) {
      r.logits[b * m.vocabulary + row] = value;
      if (value > best[b]) best[b] = value, where[b] = row;
    });
    s.barrier.wait();
    if (mine) return;
    bool open = false;
    for (int64_t b = 0; b < r.rows; b++) {
      int64_t& made = r.made[step * r.rows + b];
      made = -1;
      if (r.tokens[b] < 0) continue;
      int winner = 0;  // of equals the first, as torch has it
      for (int w = 1; w < workers; w++)
        if (s.best[w * r.rows + b] > s.best[winner * r.rows + b]) winner = w;
      made = s.where[winner * r.rows + b];
      if (made == INT64_MAX) made = -2;  // no number: nothing can be chosen
      const bool over = made < 0 || std::find(r.end, r.end + r.ends, made) != r.end + r.ends || r.places[b] + 1 >= m.positions;
      r.tokens[b] = over ? -1 : made;
      r.places[b]++;
      open = open || !over;
    }
    s.ended = !open || r.stopping->load();
    r.done->store(step + 1);
  }

  const Model& m;
  const Run& r;
  Shared& s;
  const int mine, workers;
  std::vector<float> wide, kept, key, query;
};

template <typename T>
void decode_as(const Model& m, const Run& r) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Worker<T>>> workers;
  std::unique_ptr<Shared> shared;
  std::atomic<int> gate{0};  // 0: wait, 1: begin, 2: go home
  // A barrier waits for all. Threads are started, and all memory is taken, before anything begins: whoever cannot be started is
  // not counted, and a lack of memory changes nothing.
  auto home = [&] {
    gate.store(2, std::memory_order_release);
    for (auto& one : threads) one.join();
  };
  try {
    threads.reserve(r.threads);
    try {
      for (int i = 1; i < r.threads; i++)
        threads.emplace_back([&gate, &workers, i] {
          while (!gate.load(std::memory_order_acquire)) std::this_thread::yield();
          if (gate.load() == 1) workers[i]->live();
        });
    } catch (const std::system_error&) {  // fewer, then
    }
    const int count = 1 + (int)threads.size();
    shared = std::make_unique<Shared>(m, r, count);
    for (int i = 0; i < count; i++) workers.push_back(std::make_unique<Worker<T>>(m, r, *shared, i));
  } catch (...) {
    home();
    throw;
  }
  gate.store(1, std::memory_order_release);
  workers[0]->live();
  for (auto& one : threads) one.join();
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
