// Drawing a token by any temperature, top_k, top_p, penalty and point: the one that a plain reference in float64 draws,
// but for
// points within rounding of a border. And the workers' trace: in its own words, and no others.
#include "text/persistent/code/draw.h"

#include "fuzz.h"
#include "text/persistent/code/trace.h"

namespace {
constexpr double NEAR = 1e-5;  // of a share: float32 exponentials, some hundred of them

// May `found` be drawn? Shares in float64, in order of their values, cut by top_k and top_p.
bool may_be(const std::vector<float>& logits, const Draw& how, const std::vector<uint8_t>& seen, double point,
    int64_t found) {
  const int64_t count = int64_t(logits.size());
  std::vector<float> values = logits;
  for (int64_t i = 0; i < count; i++)
    if (how.seen && seen[i]) values[i] = values[i] < 0 ? values[i] * float(how.penalty) : values[i] / float(how.penalty);
  int64_t first = 0;
  for (int64_t i = 1; i < count; i++) if (values[i] > values[first]) first = i;
  const float top = values[first] / float(how.temperature);
  if (how.temperature == 0.0 || !std::isfinite(top)) return found == first;
  std::vector<int64_t> order(count);
  for (int64_t i = 0; i < count; i++) order[i] = i, values[i] /= float(how.temperature);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  if (how.top_k && how.top_k < count) order.resize(how.top_k);
  std::vector<double> reached;
  double total = 0;
  for (int64_t t : order) reached.push_back(total += std::exp(double(values[t]) - double(top)));
  for (double& one : reached) one /= total;
  const size_t at = size_t(std::find(order.begin(), order.end(), found) - order.begin());
  if (at == order.size()) return false;
  for (size_t kept = 1; kept <= order.size(); kept++) {  // the fewest that reach top_p, or all
    const bool enough = kept == order.size() || (how.top_p < 1.0 && reached[kept - 1] >= how.top_p - NEAR);
    const bool fewest = how.top_p < 1.0 ? kept == 1 || reached[kept - 2] < how.top_p + NEAR : kept == order.size();
    if (!enough || !fewest || at >= kept) continue;
    const double bound = point * reached[kept - 1];
    if ((at == 0 || reached[at - 1] <= bound + NEAR) && (at + 1 == kept || reached[at] >= bound - NEAR)) return true;
  }
  return false;
}

void draws(Input& in) {
  static const double heats[] = {0.0, 0.7, 1.0, 1e-3, 100.0, 1e-30, 1e-38, 1e-44, 1e-60},
      penalties[] = {1.1, 1.0, 0.5, 100.0, 1e-6, 1e-37};
  static const float large[] = {FLT_MAX, -FLT_MAX, -INFINITY, 0.0f, -0.0f, 1e30f, 88.0f, -1e-40f};
  const int64_t count = in.from(1, 150), steps = in.from(1, 3);
  Draw how{heats[in.from(0, 8)], in.flag() ? 1.0 : (1 + in.byte()) / 256.0, penalties[in.from(0, 5)],
      in.flag() ? 0 : in.from(0, 200)};
  const uint32_t seed = uint32_t(in.word());
  const float spread = float(in.from(0, 40));
  std::vector<float> logits(count);
  fill(logits.data(), count, seed, false);
  for (float& one : logits) one *= spread;
  for (int64_t n = in.from(0, 6); n > 0; n--) logits[in.from(0, count - 1)] = in.flag() ? large[in.from(0,
      7)] : float(in.from(-9, 9));
  if (in.byte() == 255) std::fill(logits.begin(), logits.end(), large[in.from(0, 7)]);  // all alike
  if (!std::any_of(logits.begin(), logits.end(), [](float one) { return one > -INFINITY; })) logits[0] = 0;
   // decode.cpp draws of none of these
  Exact<double> points(steps);
  for (int64_t s = 0; s < steps;
      s++) points[s] = in.byte() == 255 ? 1.0 - 0x1p-53 : double(uint32_t(in.word())) / 4294967296.0;
  Exact<uint8_t> seen(count);
  for (int64_t i = 0; i < count; i++) seen[i] = uint8_t(seed >> (i % 29) & 1);
  how.points = points.data(), how.seen = in.flag() ? seen.data() : nullptr;
  Exact<float> exact(count);
  std::copy(logits.begin(), logits.end(), exact.data());
  Drawn room;  // used again, as a worker does
  for (int64_t s = 0; s < steps; s++) {
    const std::vector<uint8_t> before(seen.data(), seen.data() + count);
    const int64_t found = how.token(exact.data(), count, s, room);
    REQUIRE(found >= 0 && found < count && may_be(logits, how, before, points[s], found));
    if (how.plain()) REQUIRE(found == std::max_element(logits.begin(), logits.end()) - logits.begin());
    for (int64_t i = 0; i < count; i++) REQUIRE(seen[i] == (how.seen && i == found ? 1 : before[i]));
  }
}

void traces(Input& in) {
  const int workers = int(in.from(1, 5));
  const int64_t words = in.from(1, 60), share = (words - 1) / workers;
  Exact<int64_t> all(words);
  for (int64_t i = 0; i < words; i++) all[i] = -7;
  std::vector<Trace> each;
  std::vector<std::vector<int64_t>> noted(workers);
  std::vector<int64_t> step(workers), layer(workers);
  for (int w = 0; w < workers; w++) each.emplace_back(all.data(), words, w, workers);
  while (!in.ended()) {
    const int w = int(in.from(0, workers - 1));
    const Phase phase = Phase(in.from(0, 9));
    if (phase == BEGIN) each[w].begin(step[w] = in.byte()), layer[w] = 0;
    else each[w].did(phase);
    noted[w].push_back(step[w] << 16 | (layer[w] & 255) << 8 | phase);
    if (phase == DOWN) layer[w]++;
  }
  REQUIRE(all[0] == (share > 1 ? workers : 0));
  for (int w = 0; w < workers && share > 1; w++) {
    const int64_t* own = all.data() + 1 + w * share;
    const int64_t fits = std::min<int64_t>((share - 1) / 2, int64_t(noted[w].size()));
    REQUIRE(own[0] == fits);
    for (int64_t i = 0; i < fits; i++) REQUIRE(own[1 + 2 * i] == noted[w][i] && (i == 0 || own[2 + 2 * i] >= own[2 * i]));
    for (int64_t i = 1 + 2 * fits; i < share; i++) REQUIRE(own[i] == -7);
  }
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  in.byte() % 8 == 7 ? traces(in) : draws(in);
  return 0;
}
