// Drawing a token: by temperature, top_k, top_p and a penalty on what was there already, as `next_token` in Python does it.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

// Room for a draw, used again and again.
struct Drawn {
  std::vector<float> values, weights;
  std::vector<int32_t> order;
  void make_room(int64_t vocabulary) { values.reserve(vocabulary), weights.reserve(vocabulary), order.reserve(vocabulary); }
};

// How one row chooses. `points`: a number from 0 to 1 for every step.
struct Draw {
  double temperature, top_p, penalty;
  int64_t top_k;
  const double* points;
  uint8_t* seen;  // [vocabulary]: was the token there already? null without a penalty

  bool plain() const { return temperature == 0.0 && !seen; }

  int64_t token(const float* logits, int64_t count, int64_t step, Drawn& room) const {
    std::vector<float>& values = room.values;
    values.assign(logits, logits + count);
    const float by = std::max((float)penalty, FLT_MIN);  // 0 divided by 0 is not a number
    if (seen)
      for (int64_t i = 0; i < count; i++)
        if (seen[i]) values[i] = values[i] < 0 ? values[i] * by : values[i] / by;
    const int64_t likeliest = std::max_element(values.begin(), values.end()) - values.begin();
    const int64_t found = temperature == 0.0 ? likeliest : drawn(values, count, likeliest, step, room);
    if (seen) seen[found] = 1;
    return found;
  }

 private:
  // By the inverse of the distribution, from the likeliest token down. They are put in order in portions, the likeliest first:
  // most draws end in the first.
  int64_t drawn(std::vector<float>& values, int64_t count, int64_t likeliest, int64_t step, Drawn& room) const {
    for (int64_t i = 0; i < count; i++) values[i] /= (float)temperature;
    const float top = values[likeliest];
    if (!(std::fabs(top) <= FLT_MAX)) return likeliest;  // so little heat that the quotient has no float32: as good as none
    room.weights.resize(count);
    double total = 0.0;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(room.weights.data() + i, vexp(load(values.data() + i) - top));
    for (; i < count; i++) room.weights[i] = std::exp(values[i] - top);
    for (int64_t t = 0; t < count; t++) total += room.weights[t];
    std::vector<int32_t>& order = room.order;
    order.clear();
    double reached = 0.0;
    const int64_t most = top_k > 0 ? std::min(top_k, count) : count;
    // How far the order is needed: to the last of top_k, else to where top_p is reached, else to the point itself.
    const double point = points[step];
    double limit = top_k > 0 ? INF : top_p < 1.0 ? top_p * total : point * total;
    float above = INF;  // tokens with larger values are in order
    for (float depth = 3.0f; (int64_t)order.size() < most; depth *= 2) {
      const float least = depth > 100.0f ? -INF : top - depth;
      const size_t begin = order.size();
      for (int64_t t = 0; t < count; t++)
        if (values[t] >= least && values[t] < above) order.push_back((int32_t)t);
      std::sort(order.begin() + begin, order.end(), [&](int32_t a, int32_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
      });
      above = least;
      for (size_t o = begin; o < order.size(); o++) reached += room.weights[order[o]];
      if (reached > limit || least == -INF) break;
    }
    if ((int64_t)order.size() > most) order.resize(most);
    if (top_k > 0) {
      total = 0.0;
      for (int32_t t : order) total += room.weights[t];
    }
    double whole = total;
    if (top_p < 1.0) {  // the fewest whose share reaches top_p
      double sum = 0.0;
      size_t kept = 0;
      while (kept < order.size() && sum < top_p * total) sum += room.weights[order[kept++]];
      order.resize(std::max<size_t>(kept, 1));
      whole = std::max<double>(sum, room.weights[order[0]]);
    }
    double sum = 0.0;
    for (int32_t t : order) {
      sum += room.weights[t];
      if (sum > point * whole) return t;
    }
    return order.back();
  }
};
