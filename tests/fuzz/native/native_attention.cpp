// Attention and norms as kernels of graphs: within their memory, for any sizes, and the same bits in one piece and in many.
#include "text/packed/code/graph.cpp"

#include "fuzz.h"

static int64_t bits_of(double value) { int64_t bits; memcpy(&bits, &value, 8); return bits; }

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

  const int64_t rows = in.from(0, 20), share = in.from(1, 7);
  Exact<float> x(rows * width), weight(width), bias(width), out(rows * width);
  fill(x.data(), x.size(), seed, odd), fill(weight.data(), width, seed + 3, odd);
  void* more[] = {x.data(), in.flag() ? weight.data() : nullptr, in.flag() ? bias.data() : nullptr, out.data()};
  int64_t of_norm[] = {width, in.flag(), bits_of(1e-5), rows, share};
  graph_normalise(more, of_norm, 0, (rows + share - 1) / share);
  return 0;
}
