// A text encoder over packed tokens: no padding, all families that EncoderSpec describes, one pass per group of sequences.
//
// Sequences lie one behind the other in `ids`; `starts` says where each begins. They are cut into groups of about `budget`
// tokens. A thread takes a group through the whole network, so that threads never wait for each other; where there are
// fewer groups than threads, all of them work on one group together, on blocks of rows and on heads.
#include <time.h>

#include <cmath>
#include <memory>

#include "attention.h"
#include "linear.h"
#include "memory.h"
#include "norm.h"
#include "pool.h"

#define API extern "C" __attribute__((visibility("default")))

enum Pooling { CLS = 0, MEAN = 1, MAX = 2, LAST = 3, WEIGHTED_MEAN = 4, MEAN_SQRT_LENGTH = 5 };
enum Answer { OK = 0, BAD_TOKEN = 1, TOO_LONG = 2, NO_MEMORY = 3, BAD_STARTS = 4, BAD_PART = 5 };

// Kept the same as `Shape` in binding.py.
struct Shape {
  int32_t vocabulary, width, layers, heads, kv_heads, head_width, inner, max_positions, position_offset;
  int32_t activation, gated, pre_norm, rms_norm, embed_norm, final_norm, qk_norm, causal;
  float eps;
  int32_t budget, block;
};

struct Norm {
  Block<float> weight, bias;
  bool there() const { return weight.size() != 0; }
};
struct Layer {
  Linear qkv, out, up, down;
  Norm attn_norm, mlp_norm;
  Block<float> q_norm, k_norm;
  float theta = 0;
  int window = 0;
};

// cos and sin for every position and half of the features, for one base.
struct Rotation {
  float theta = 0;
  int positions = 0;
  Block<float> cosine, sine;
};

enum Part { EMBED, QKV, TURN, ATTENTION, OUT, UP, DOWN, NORM, PARTS };  // kept the same as PARTS in binding.py

inline double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);  // what other processes take is not ours
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

struct Scratch {  // of one thread
  bool timed = false;
  double seconds[PARTS] = {};
  Block<float> normal, inner;
  Whole whole;
  float* watch[4] = {};  // while calibrating, of qkv, out, up and down: each input's greatest size, then its mean square
  AttentionScratch attention;
};
// Adds the time of its life to a part, when somebody asked for a profile.
struct Timer {
  Scratch& scratch;
  int part;
  double begin;
  Timer(Scratch& s, int p) : scratch(s), part(p), begin(s.timed ? thread_seconds() : 0) {}
  ~Timer() {
    if (scratch.timed) scratch.seconds[part] += thread_seconds() - begin;
  }
};

struct Arena {  // of one group
  Block<float> x, qkv, context;
};

struct Encoder {
  Shape s;
  const float* words = nullptr;  // [vocabulary][width], the caller's memory
  Block<float> added;            // [rows][width]: positions and the type of token; one row when there are no positions
  int added_rows = 0;
  Norm embed_norm, final_norm;
  std::vector<Layer> layers;
  Block<float> relative;  // [heads][relative_stride]
  long relative_stride = 0, relative_zero = 0;
  std::vector<Rotation> rotations;
  int longest_row = 0;  // inputs of the widest layer that computes with whole numbers
  std::unique_ptr<Pool> pool;
  std::mutex running;
  std::vector<Scratch> scratch;
  std::vector<Arena> arenas;

  // In a child of fork the pool's threads are gone while its condition variables still count them as waiting: destroying
  // those would wait for ever, so that the child leaves the few bytes alone.
  ~Encoder() {
    if (pool && !pool->alive()) pool.release();
  }
  long stride(int n) const { return round_up(n, NR) + 16; }  // never a power of two: rows spread over the cache's sets
  long x_stride() const { return stride(s.width); }
  long qkv_stride() const { return stride((s.heads + 2 * s.kv_heads) * s.head_width); }
  long context_stride() const { return stride(s.heads * s.head_width); }
  long inner_stride() const { return stride(s.inner); }
};

struct Call {  // one group of sequences of one run
  const int32_t* ids;
  const int32_t* starts;  // of the sequences of this group, one more than there are
  int sequences;
  float* pooled;  // of the first sequence; may be null
  float* tokens;  // of the first token; may be null
  int pooling;
  bool normalise;
};

// --- rows ----------------------------------------------------------------------------------------------------------

static void normalise_rows(const Encoder& e, const Norm& norm, const float* x, float* y, int rows) {
  const float *weight = norm.weight.data(), *bias = norm.bias.data();
  for (int r = 0; r < rows; r++)
    normalise_row(x + r * e.x_stride(), y + r * e.x_stride(), e.s.width, weight, bias, e.s.eps, e.s.rms_norm);
}

static void embed(const Encoder& e, const Call& call, int sequence, Arena& arena) {
  int begin = call.starts[sequence], length = call.starts[sequence + 1] - begin, offset = begin - call.starts[0];
  int width = e.s.width;
  for (int t = 0; t < length; t++) {
    float* x = arena.x.data() + (offset + t) * e.x_stride();
    const float* word = e.words + size_t(call.ids[begin + t]) * width;
    const float* more = e.added_rows == 0 ? nullptr
                        : e.added_rows == 1 ? e.added.data()
                                            : e.added.data() + size_t(e.s.position_offset + t) * width;
    for (int i = 0; i < width; i++) x[i] = more ? word[i] + more[i] : word[i];
    if (e.embed_norm.there()) normalise_row(x, x, width, e.embed_norm.weight.data(), e.embed_norm.bias.data(), e.s.eps, e.s.rms_norm);
  }
}

static void rotate(const Encoder& e, const Rotation& r, float* head, int position) {
  int half = e.s.head_width / 2;
  const float* c = r.cosine.data() + size_t(position) * half;
  const float* s = r.sine.data() + size_t(position) * half;
  for (int i = 0; i < half; i++) {
    float a = head[i], b = head[i + half];
    head[i] = a * c[i] - b * s[i];
    head[i + half] = b * c[i] + a * s[i];
  }
}

static const Rotation* rotation_of(const Encoder& e, float theta) {
  for (const Rotation& r : e.rotations)
    if (r.theta == theta) return &r;
  return nullptr;
}

static void watch_inputs(float* top, const float* x, long stride, int rows, int width) {
  if (!top) return;
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < width; i++) {
      float size = std::fabs(x[r * stride + i]);
      top[i] = size > top[i] ? size : top[i];
      top[width + i] += size * size;
    }
}

// q, k and v of rows [first, first + rows) of the group.
static void project(const Encoder& e, const Layer& layer, Arena& arena, Scratch& scratch, int first, int rows) {
  const float* x = arena.x.data() + first * e.x_stride();
  if (e.s.pre_norm && layer.attn_norm.there()) {
    Timer timer(scratch, NORM);
    normalise_rows(e, layer.attn_norm, x, scratch.normal.data(), rows);
    x = scratch.normal.data();
  }
  Timer timer(scratch, QKV);
  watch_inputs(scratch.watch[0], x, e.x_stride(), rows, e.s.width);
  Finish f{arena.qkv.data() + first * e.qkv_stride(), e.qkv_stride()};
  apply(layer.qkv, x, e.x_stride(), rows, f, scratch.whole);
}

// Positions enter q and k here: a sequence at a time, because a row's position is counted from its sequence's start.
static void turn(const Encoder& e, const Layer& layer, Arena& arena, int offset, int length, int head) {
  const Rotation* r = layer.theta != 0 ? rotation_of(e, layer.theta) : nullptr;
  if (!r && !e.s.qk_norm) return;
  bool query = head < e.s.heads;
  Norm none;
  for (int t = 0; t < length; t++) {
    float* h = arena.qkv.data() + (offset + t) * e.qkv_stride() + long(head) * e.s.head_width;
    if (e.s.qk_norm) {
      const Block<float>& weight = query ? layer.q_norm : layer.k_norm;
      float squares = 0.0f;
      for (int i = 0; i < e.s.head_width; i++) squares += h[i] * h[i];
      float scale = 1.0f / std::sqrt(squares / e.s.head_width + e.s.eps);
      for (int i = 0; i < e.s.head_width; i++) h[i] = h[i] * scale * weight[i];
    }
    if (r) rotate(e, *r, h, t);
  }
}

static void attend_head(const Encoder& e, const Layer& layer, const Call& call, Arena& arena, Scratch& scratch, int sequence,
                        int head) {
  int offset = call.starts[sequence] - call.starts[0], length = call.starts[sequence + 1] - call.starts[sequence];
  if (length == 0) return;
  int d = e.s.head_width, shared = head / (e.s.heads / e.s.kv_heads);
  const float* row = arena.qkv.data() + offset * e.qkv_stride();
  Head h;
  h.q = row + long(head) * d;
  h.k = row + long(e.s.heads + shared) * d;
  h.v = row + long(e.s.heads + e.s.kv_heads + shared) * d;
  h.stride = e.qkv_stride();
  h.length = length, h.width = d;
  h.out = arena.context.data() + offset * e.context_stride() + long(head) * d;
  h.out_stride = e.context_stride();
  h.scale = 1.0f / std::sqrt(float(d));
  h.causal = e.s.causal, h.window = layer.window;
  h.bias = e.relative_stride ? e.relative.data() + head * e.relative_stride + e.relative_zero : nullptr;
  scratch.attention.reserve(length, d);
  attend(h, scratch.attention);
}

// Everything of a layer that follows attention, for rows [first, first + rows).
static void feed_forward(const Encoder& e, const Layer& layer, Arena& arena, Scratch& scratch, int first, int rows) {
  float* x = arena.x.data() + first * e.x_stride();
  long stride = e.x_stride();
  Finish add{x, stride, x, stride};
  const float* context = arena.context.data() + first * e.context_stride();
  watch_inputs(scratch.watch[1], context, e.context_stride(), rows, e.s.heads * e.s.head_width);
  {
    Timer timer(scratch, OUT);
    apply(layer.out, context, e.context_stride(), rows, add, scratch.whole);
  }
  const float* input = x;
  {
    Timer timer(scratch, NORM);
    if (e.s.pre_norm) {
      normalise_rows(e, layer.mlp_norm, x, scratch.normal.data(), rows);
      input = scratch.normal.data();
    } else {
      normalise_rows(e, layer.attn_norm, x, x, rows);
    }
  }
  watch_inputs(scratch.watch[2], input, stride, rows, e.s.width);
  Finish up{scratch.inner.data(), e.inner_stride()};
  up.activation = e.s.activation;
  {
    Timer timer(scratch, UP);
    apply(layer.up, input, stride, rows, up, scratch.whole);
  }
  watch_inputs(scratch.watch[3], scratch.inner.data(), e.inner_stride(), rows, e.s.inner);
  {
    Timer timer(scratch, DOWN);
    apply(layer.down, scratch.inner.data(), e.inner_stride(), rows, add, scratch.whole);
  }
  Timer timer(scratch, NORM);
  if (!e.s.pre_norm) normalise_rows(e, layer.mlp_norm, x, x, rows);
}

// --- pooling -------------------------------------------------------------------------------------------------------

static void pool_rows(const float* x, long stride, int length, int width, int pooling, bool normalise, float* out) {
  for (int i = 0; i < width; i++) out[i] = 0.0f;
  if (length == 0) return;
  if (pooling == CLS || pooling == LAST) {
    memcpy(out, x + (pooling == CLS ? 0 : length - 1) * stride, width * sizeof(float));
  } else if (pooling == MAX) {
    memcpy(out, x, width * sizeof(float));
    for (int t = 1; t < length; t++)
      for (int i = 0; i < width; i++) out[i] = x[t * stride + i] > out[i] ? x[t * stride + i] : out[i];
  } else {
    float weights = 0.0f;
    for (int t = 0; t < length; t++) {
      float w = pooling == WEIGHTED_MEAN ? float(t + 1) : 1.0f;
      weights += w;
      for (int i = 0; i < width; i++) out[i] += x[t * stride + i] * w;
    }
    float scale = 1.0f / (pooling == MEAN_SQRT_LENGTH ? std::sqrt(weights) : weights);
    for (int i = 0; i < width; i++) out[i] *= scale;
  }
  if (normalise) {
    float squares = 0.0f;
    for (int i = 0; i < width; i++) squares += out[i] * out[i];
    float length_ = std::sqrt(squares);
    float scale = 1.0f / (length_ > 1e-12f ? length_ : 1e-12f);
    for (int i = 0; i < width; i++) out[i] *= scale;
  }
}

// --- a group through the network -----------------------------------------------------------------------------------

// each(items, task): task(item, thread) for every item, on one thread or on all.
template <class Each>
static void begin_group(Encoder& e, const Call& call, Arena& arena, const Each& each) {
  size_t tokens = call.starts[call.sequences] - call.starts[0];
  arena.x.at_least(tokens * e.x_stride());
  arena.qkv.at_least(tokens * e.qkv_stride() + NR);  // attention reads whole tiles
  arena.context.at_least(tokens * e.context_stride());
  each(call.sequences, [&](int i, int thread) {
    Timer timer(e.scratch[thread], EMBED);
    embed(e, call, i, arena);
  });
}

template <class Each>
static void run_layer(Encoder& e, const Layer& layer, const Call& call, Arena& arena, int block, const Each& each) {
  int tokens = call.starts[call.sequences] - call.starts[0];
  int blocks = (tokens + block - 1) / block;
  auto rows_of = [&](int b) { return tokens - b * block < block ? tokens - b * block : block; };
  each(blocks, [&](int b, int thread) { project(e, layer, arena, e.scratch[thread], b * block, rows_of(b)); });
  if (layer.theta != 0 || e.s.qk_norm)
    each(call.sequences * (e.s.heads + e.s.kv_heads), [&](int item, int thread) {
      Timer timer(e.scratch[thread], TURN);
      int i = item / (e.s.heads + e.s.kv_heads), head = item % (e.s.heads + e.s.kv_heads);
      turn(e, layer, arena, call.starts[i] - call.starts[0], call.starts[i + 1] - call.starts[i], head);
    });
  // A text at a time, or a head of it where there are fewer texts than threads.
  int split = call.sequences < e.pool->threads() ? e.s.heads : 1;
  each(call.sequences * split, [&](int item, int thread) {
    Timer timer(e.scratch[thread], ATTENTION);
    int sequence = item / split, heads = e.s.heads / split, first = item % split * heads;
    for (int head = first; head < first + heads; head++) attend_head(e, layer, call, arena, e.scratch[thread], sequence, head);
  });
  each(blocks, [&](int b, int thread) { feed_forward(e, layer, arena, e.scratch[thread], b * block, rows_of(b)); });
}

template <class Each>
static void run_group(Encoder& e, const Call& call, Arena& arena, int block, const Each& each) {
  begin_group(e, call, arena, each);
  for (const Layer& layer : e.layers) run_layer(e, layer, call, arena, block, each);
  each(call.sequences, [&](int i, int thread) {
    Timer timer(e.scratch[thread], EMBED);
    int offset = call.starts[i] - call.starts[0], length = call.starts[i + 1] - call.starts[i];
    float* x = arena.x.data() + offset * e.x_stride();
    if (e.final_norm.there()) normalise_rows(e, e.final_norm, x, x, length);
    int width = e.s.width;
    if (call.tokens)
      for (int t = 0; t < length; t++) memcpy(call.tokens + size_t(offset + t) * width, x + t * e.x_stride(), width * sizeof(float));
    if (call.pooled) pool_rows(x, e.x_stride(), length, width, call.pooling, call.normalise, call.pooled + size_t(i) * width);
  });
}

static void prepare_rotations(Encoder& e, int longest) {
  for (Rotation& r : e.rotations) {
    if (r.positions >= longest) continue;
    int half = e.s.head_width / 2;
    int positions = longest + longest / 2 < e.s.max_positions ? longest + longest / 2 : e.s.max_positions;
    if (positions < longest) positions = longest;
    r.cosine.resize(size_t(positions) * half);
    r.sine.resize(size_t(positions) * half);
    for (int i = 0; i < half; i++) {
      float frequency = 1.0f / std::pow(r.theta, float(2 * i) / float(e.s.head_width));
      for (int p = 0; p < positions; p++) {
        float angle = float(p) * frequency;  // in float32, as the reference does
        r.cosine[size_t(p) * half + i] = float(std::cos(double(angle)));
        r.sine[size_t(p) * half + i] = float(std::sin(double(angle)));
      }
    }
    r.positions = positions;
  }
}

static int check(const Encoder& e, const int32_t* ids, const int32_t* starts, int sequences, int* where, int* longest) {
  *longest = 0;
  if (starts[0] != 0) return *where = 0, BAD_STARTS;
  for (int i = 0; i < sequences; i++) {
    if (starts[i + 1] < starts[i]) return *where = i + 1, BAD_STARTS;
    int length = starts[i + 1] - starts[i];
    if (length > e.s.max_positions) return *where = i, TOO_LONG;
    if (length > *longest) *longest = length;
  }
  for (int t = 0; t < starts[sequences]; t++)
    if (ids[t] < 0 || ids[t] >= e.s.vocabulary) return *where = t, BAD_TOKEN;
  return OK;
}

static std::vector<int> cut(const int32_t* starts, int sequences, int budget) {
  std::vector<int> groups{0};  // the first sequence of each group, and the end
  for (int i = 1; i < sequences; i++)
    if (starts[i + 1] - starts[groups.back()] > budget) groups.push_back(i);
  groups.push_back(sequences);
  return groups;
}

static int run(Encoder& e, const int32_t* ids, const int32_t* starts, int sequences, int pooling, bool normalise, float* pooled,
               float* tokens, int* where) {
  std::lock_guard<std::mutex> guard(e.running);
  int longest = 0;
  if (int wrong = check(e, ids, starts, sequences, where, &longest)) return wrong;
  if (sequences == 0) return OK;
  int threads = e.pool->threads();
  if (!e.pool->alive()) {
    e.pool.release();  // see ~Encoder
    e.pool.reset(new Pool(threads));
  }
  prepare_rotations(e, longest);
  int total = starts[sequences], share = (total + threads - 1) / threads;
  int budget = share < e.s.budget ? (share > MR ? share : MR) : e.s.budget;
  std::vector<int> groups = cut(starts, sequences, budget);
  int count = int(groups.size()) - 1, largest_group = 0;
  for (int g = 0; g < count; g++) {
    int size = starts[groups[g + 1]] - starts[groups[g]];
    if (size > largest_group) largest_group = size;
  }
  // One long text among short ones would leave the other threads idle: then all work on each group together.
  bool together = threads > 1 && largest_group > share + share / 4;
  if (together) groups = cut(starts, sequences, e.s.budget), count = int(groups.size()) - 1;
  int block = e.s.block;
  if (together) {
    int even = round_up((total < e.s.budget ? total : e.s.budget) / threads + 1, MR);
    if (even < block) block = even;
  }
  for (Scratch& scratch : e.scratch) {
    scratch.normal.at_least(size_t(block) * e.x_stride());
    scratch.inner.at_least(size_t(block) * e.inner_stride());
    if (e.longest_row) scratch.whole.reserve(block, e.longest_row);
  }
  auto call_of = [&](int g) {
    int first = groups[g];
    return Call{ids, starts + first, groups[g + 1] - first, pooled ? pooled + size_t(first) * e.s.width : nullptr,
                tokens ? tokens + size_t(starts[first]) * e.s.width : nullptr, pooling, normalise};
  };
  if (together) {
    for (int g = 0; g < count; g++)
      run_group(e, call_of(g), e.arenas[0], block, [&](int items, auto task) { e.pool->run(items, task); });
  } else {
    e.pool->run(count, [&](int g, int thread) {
      run_group(e, call_of(g), e.arenas[thread], block, [&](int items, auto task) {
        for (int i = 0; i < items; i++) task(i, thread);
      });
    });
  }
  return OK;
}

// --- what Python calls ---------------------------------------------------------------------------------------------

// Whether memory can be indexed by these numbers. Python has checked them; a config.json from elsewhere is behind them.
static bool valid(const Shape& s) {
  const int64_t most = INT32_MAX / 2;  // rows are padded, and counted in 32 bits
  const int32_t sizes[] = {s.vocabulary, s.width, s.layers, s.heads, s.kv_heads, s.head_width, s.inner, s.max_positions,
                           s.budget, s.block};
  for (int32_t size : sizes)
    if (size < 1) return false;
  return s.heads % s.kv_heads == 0 && s.position_offset >= 0 && int64_t(s.max_positions) + s.position_offset <= most &&
         s.width <= most && s.inner <= most / 2 && (s.heads + 2 * int64_t(s.kv_heads)) * s.head_width <= most &&
         s.activation >= 0 && s.activation <= 4 && s.eps >= 0;
}
API int encoder_shape_is_valid(const Shape* shape) { return valid(*shape); }

API void* encoder_new(const Shape* shape, int threads) {
  if (!valid(*shape) || threads < 1) return nullptr;
  try {
    std::unique_ptr<Encoder> e(new Encoder);
    e->s = *shape;
    e->layers.resize(shape->layers);
    e->pool.reset(new Pool(threads));
    e->scratch.resize(threads);
    e->arenas.resize(threads);
    return e.release();
  } catch (...) {
    return nullptr;
  }
}
API int encoder_shape_nbytes() { return sizeof(Shape); }
API void encoder_free(void* handle) { delete static_cast<Encoder*>(handle); }

API void encoder_set_words(void* handle, const float* words) { static_cast<Encoder*>(handle)->words = words; }

static void copy(Block<float>& to, const float* from, size_t count) {
  to.resize(count);
  memcpy(to.data(), from, count * sizeof(float));
}

API int encoder_set_added(void* handle, const float* rows, int count) {
  Encoder& e = *static_cast<Encoder*>(handle);
  // One row for every position, or one for all.
  if (count != 1 && count < e.s.position_offset + e.s.max_positions) return BAD_PART;
  try {
    copy(e.added, rows, size_t(count) * e.s.width);
    e.added_rows = count;
  } catch (...) {
    return NO_MEMORY;
  }
  return OK;
}

static bool has_layer(const Encoder& e, int layer) { return layer >= 0 && layer < e.s.layers; }

// which: 0 embed_norm, 1 final_norm, 2 attn_norm, 3 mlp_norm, 4 q_norm, 5 k_norm
API int encoder_set_norm(void* handle, int layer, int which, const float* weight, const float* bias) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (which < 0 || which > 5 || !has_layer(e, layer)) return BAD_PART;
  try {
    if (which >= 4) {
      copy(which == 4 ? e.layers[layer].q_norm : e.layers[layer].k_norm, weight, e.s.head_width);
      return OK;
    }
    Norm& norm = which == 0 ? e.embed_norm : which == 1 ? e.final_norm : which == 2 ? e.layers[layer].attn_norm : e.layers[layer].mlp_norm;
    copy(norm.weight, weight, e.s.width);
    if (bias) copy(norm.bias, bias, e.s.width);
  } catch (...) {
    return NO_MEMORY;
  }
  return OK;
}

API int encoder_set_relative(void* handle, const float* table, int64_t stride, int64_t zero) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (zero < e.s.max_positions - 1 || stride < zero + e.s.max_positions) return BAD_PART;  // both ways, to the last token
  try {
    copy(e.relative, table, size_t(e.s.heads) * stride);
  } catch (...) {
    return NO_MEMORY;
  }
  e.relative_stride = stride, e.relative_zero = zero;
  return OK;
}

API int encoder_set_attention(void* handle, int layer, float theta, int window) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (!has_layer(e, layer) || window < 0) return BAD_PART;
  e.layers[layer].theta = theta, e.layers[layer].window = window;
  if (theta != 0 && !rotation_of(e, theta)) {
    e.rotations.emplace_back();
    e.rotations.back().theta = theta;
  }
  return OK;
}

static Linear& linear_of(Encoder& e, int layer, int which) {
  Layer& l = e.layers[layer];
  return which == 0 ? l.qkv : which == 1 ? l.out : which == 2 ? l.up : l.down;
}
// which: 0 q, k and v; 1 the output of attention; 2 up (and gate); 3 down
API int encoder_linear_new(void* handle, int layer, int which, int outputs, int inputs, int gated, int format, int bytes) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (!has_layer(e, layer) || which < 0 || which > 3 || format < F32 || format > FP4) return BAD_PART;
  if (bytes && format != INT8) return BAD_PART;  // the other formats are multiplied as 16-bit numbers
  // What the run computes with: every row of an arena is as wide as the shape says.
  const int heads = e.s.heads * e.s.head_width, both = (e.s.heads + 2 * e.s.kv_heads) * e.s.head_width;
  const int wanted_outputs[] = {both, e.s.width, e.s.gated ? 2 * e.s.inner : e.s.inner, e.s.width};
  const int wanted_inputs[] = {e.s.width, heads, e.s.width, e.s.inner};
  const bool wanted_gate = which == 2 && e.s.gated;
  if (outputs != wanted_outputs[which] || inputs != wanted_inputs[which] || (gated != 0) != wanted_gate) return BAD_PART;
  try {
    Linear& linear = linear_of(e, layer, which);
    linear.prepare(outputs, inputs, gated, format, bytes && HAS_FOURS);
    if (format != F32 && linear.padded > e.longest_row) e.longest_row = linear.padded;
  } catch (...) {
    return NO_MEMORY;
  }
  return OK;
}
// Before any rows: what inputs are multiplied by before they are rounded, and how much errors of their weights matter.
API int encoder_linear_smooth(void* handle, int layer, int which, const float* less, const float* importance) {
  if (!has_layer(*static_cast<Encoder*>(handle), layer)) return BAD_PART;
  Linear& linear = linear_of(*static_cast<Encoder*>(handle), layer, which);
  try {
    copy(linear.less, less, linear.inputs);
    copy(linear.importance, importance, linear.inputs);
  } catch (...) {
    return NO_MEMORY;
  }
  return OK;
}
// Calibration takes a few sequences through the network, layer by layer, while only that layer's weights are in float32.
// The first call of a calibration embeds them (layer -1); each further one runs a layer and gives, for every input of
// its four products, its greatest size and (after those) the sum of its squares. Nothing else may run meanwhile.
API int encoder_calibrate(void* handle, int layer, const int32_t* ids, const int32_t* starts, int sequences, float* qkv, float* out,
                          float* up, float* down, int* where) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (layer >= e.s.layers) return BAD_PART;
  std::lock_guard<std::mutex> guard(e.running);
  try {
    int longest = 0;
    if (int wrong = check(e, ids, starts, sequences, where, &longest)) return wrong;
    Call call{ids, starts, sequences, nullptr, nullptr, MEAN, false};
    Scratch& scratch = e.scratch[0];
    auto each = [&](int items, auto task) {
      for (int i = 0; i < items; i++) task(i, 0);
    };
    if (layer < 0) {
      begin_group(e, call, e.arenas[0], each);
      return OK;
    }
    prepare_rotations(e, longest);
    scratch.normal.at_least(size_t(e.s.block) * e.x_stride());
    scratch.inner.at_least(size_t(e.s.block) * e.inner_stride());
    scratch.watch[0] = qkv, scratch.watch[1] = out, scratch.watch[2] = up, scratch.watch[3] = down;
    run_layer(e, e.layers[layer], call, e.arenas[0], e.s.block, each);
    for (float*& one : scratch.watch) one = nullptr;
  } catch (...) {
    for (float*& one : e.scratch[0].watch) one = nullptr;  // they are the caller's, for this call
    return NO_MEMORY;
  }
  return OK;
}
API int encoder_has_bytes() { return HAS_FOURS; }
API int encoder_linear_rows(void* handle, int layer, int which, const float* weight, const float* bias, int rows, int first) {
  Encoder& e = *static_cast<Encoder*>(handle);
  if (!has_layer(e, layer) || rows < 1 || first < 0 || first > linear_of(e, layer, which).outputs - rows) return BAD_PART;
  try {
    linear_of(e, layer, which).fill_rows(weight, bias, rows, first);
  } catch (...) {
    return NO_MEMORY;
  }
  return OK;
}
API void encoder_linear_done(void* handle, int layer, int which) {
  if (has_layer(*static_cast<Encoder*>(handle), layer)) linear_of(*static_cast<Encoder*>(handle), layer, which).importance = Block<float>();
}
API long long encoder_linear_nbytes(void* handle) {
  long long total = 0;
  for (const Layer& l : static_cast<Encoder*>(handle)->layers)
    total += l.qkv.nbytes() + l.out.nbytes() + l.up.nbytes() + l.down.nbytes();
  return total;
}

// From now on (or no longer) add up the time of each part; gives what was added up so far, and begins again.
API void encoder_profile(void* handle, int on, double* seconds) {
  Encoder& e = *static_cast<Encoder*>(handle);
  std::lock_guard<std::mutex> guard(e.running);
  for (int p = 0; p < PARTS; p++) seconds[p] = 0;
  for (Scratch& scratch : e.scratch) {
    scratch.timed = on;
    for (int p = 0; p < PARTS; p++) seconds[p] += scratch.seconds[p], scratch.seconds[p] = 0;
  }
}

// How fast this core multiplies when all it needs is in its nearest cache: operations per second, two to a multiply-add.
// kind: 0 float32, 1 pairs of 16 bits, 2 fours of 8 bits (0 where there is no such instruction).
API double encoder_peak(int kind, int repeats) {
  if (kind == 2 && !HAS_FOURS) return 0;
  const int depth = 64;
  Block<float> a(MR * depth), b(NR * depth), c(MR * NR), scale(NR);
  int32_t zero[MR] = {}, sums[NR] = {};
  float rows[MR] = {};
  double begin = thread_seconds();
  for (int i = 0; i < repeats; i++) {
    if (kind == 0)
      TILES[MR](a.data(), depth, b.data(), NR, depth, c.data(), NR, false);
    else
      (kind == 2 ? FOUR_TILES : PAIR_TILES)[MR](reinterpret_cast<int32_t*>(a.data()), depth, reinterpret_cast<int32_t*>(b.data()), depth,
                                               rows,
                                               zero, scale.data(), sums, c.data());
  }
  double seconds = thread_seconds() - begin;
  return 2.0 * MR * NR * depth * repeats * (kind == 0 ? 1 : kind == 1 ? 2 : 4) / seconds;
}

API int encoder_run(void* handle, const int32_t* ids, const int32_t* starts, int sequences, int pooling, int normalise,
                    float* pooled, float* tokens, int* where) {
  try {
    return run(*static_cast<Encoder*>(handle), ids, starts, sequences, pooling, normalise != 0, pooled, tokens, where);
  } catch (...) {
    return NO_MEMORY;
  }
}
