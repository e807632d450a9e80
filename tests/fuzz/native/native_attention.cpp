// Attention and norms as kernels of graphs: within their memory, for any sizes, the same bits in one piece and in many,
// and near a
// plain reference in float64.
#include "text/packed/code/graph.cpp"

#include "fuzz.h"

static int64_t bits_of(double value) { int64_t bits; memcpy(&bits, &value, 8); return bits; }

static bool near(float found, double wanted) { return std::fabs(double(found) - wanted) <= 1e-4 * (1 + std::fabs(wanted)); }

// One query by all keys that it may see.
static void check_query(const float* q, const float* k, const float* v, int64_t count, int64_t width, const float* out) {
  std::vector<double> weights(count), wanted(width);
  double top = -INFINITY, total = 0;
  for (int64_t p = 0; p < count; p++) {
    for (int64_t i = 0; i < width; i++) weights[p] += double(q[i]) * k[p * width + i];
    top = std::max(top, weights[p] /= std::sqrt(double(width)));
  }
  for (double& one : weights) total += one = std::exp(one - top);
  for (int64_t p = 0; p < count; p++)
    for (int64_t i = 0; i < width; i++) wanted[i] += weights[p] / total * v[p * width + i];
  for (int64_t i = 0; i < width; i++) REQUIRE(near(out[i], wanted[i]));
}

static void check_row(const float* x, const float* weight, const float* bias, int64_t width, bool rms, const float* out) {
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < width && !rms; i++) mean += double(x[i]) / double(width);
  for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean) / double(width);
  for (int64_t i = 0; i < width; i++)
    REQUIRE(near(out[i], (x[i] - mean) / std::sqrt(squares + 1e-5) * (weight ? weight[i] : 1.0) + (bias ? bias[i] : 0.0)));
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t groups = in.from(1, 3), heads = groups * in.from(1, 3), batch = in.from(1, 2), n = in.from(1, 70), width = 32 * in.from(1, 3);  // whole panels: graph_kernels.py sees to it
  const bool odd = in.flag(), causal = in.flag();
  const uint32_t seed = uint32_t(in.word());
  Exact<float> q(batch * heads * n * width), k(batch * groups * n * width), v(batch * groups * n * width);
  Exact<float> whole(q.size()), parts(q.size());
  fill(q.data(), q.size(), seed, odd), fill(k.data(), k.size(), seed + 1, odd), fill(v.data(), v.size(), seed + 2, odd);
  int32_t wrong = 0;
  int64_t sizes[] = {heads, groups, n, width, causal, bits_of(1.0 / std::sqrt(double(width)))};
  void* buffers[] = {q.data(), k.data(), v.data(), whole.data(), &wrong};
  graph_attend(buffers, sizes, 0, batch * heads);
  buffers[3] = parts.data();
  for (int64_t item = batch * heads; item-- > 0;) graph_attend(buffers, sizes, item, item + 1);
  REQUIRE(wrong == 0 && memcmp(whole.data(), parts.data(), whole.size() * 4) == 0);
  const int64_t row = in.from(0, n - 1), item = in.from(0, batch * heads - 1),
      shared = item / heads * groups + item % heads / (heads / groups);
  if (!odd) check_query(q.data() + (item * n + row) * width, k.data() + shared * n * width,
      v.data() + shared * n * width, causal ? row + 1 : n, width, whole.data() + (item * n + row) * width);

  const int64_t rows = in.from(0, 20), share = in.from(1, 7);
  Exact<float> x(rows * width), weight(width), bias(width), out(rows * width);
  fill(x.data(), x.size(), seed, odd), fill(weight.data(), width, seed + 3, odd);
  const bool weighed = in.flag(), shifted = in.flag() && weighed;  // no bias without a weight: so norm.h has it
  fill(bias.data(), width, seed + 4, odd);
  void* more[] = {x.data(), weighed ? weight.data() : nullptr, shifted ? bias.data() : nullptr, out.data()};
  int64_t of_norm[] = {width, in.flag(), bits_of(1e-5), rows, share};
  graph_normalise(more, of_norm, 0, (rows + share - 1) / share);
  for (int64_t r = 0; r < rows && !odd; r++)
    check_row(x.data() + r * width, weighed ? weight.data() : nullptr, shifted ? bias.data() : nullptr, width,
        of_norm[1], out.data() + r * width);
  return 0;
}
