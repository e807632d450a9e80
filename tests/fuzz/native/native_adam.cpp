// Adam over spans of any length and type: within its memory, and the same bits on one thread and on several.
#include "memory/code/adam.cpp"

#include "fuzz.h"

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int count = int(in.from(0, 5)), threads = int(in.from(1, 4));
  std::vector<Exact<uint8_t>> held;
  std::vector<AdamSpan> first, second;
  for (int i = 0; i < count; i++) {
    const bool large = in.byte() >= 250;
    const int64_t n = large ? (1 << 16) + in.from(-3, 3) : in.from(0, 70);
    const int32_t half = in.flag();
    AdamSpan span{nullptr, nullptr, nullptr, nullptr, n, half, in.flag(), in.flag() ? 0.0f : 0.01f, 0.1f, 0.999f, 0.001f, -0.01f, 0.5f, 1e-8f, 0.5f, in.flag()};
    const uint32_t seed = uint32_t(in.word());
    const bool odd = in.flag();
    for (std::vector<AdamSpan>* spans : {&first, &second}) {
      void* parts[4];
      for (int p = 0; p < 4; p++) {
        held.emplace_back(size_t(n) * (half ? 2 : 4));
        Exact<float> values(n);
        fill(values.data(), n, seed + p, odd);
        for (int64_t k = 0; k < n; k++) {
          if (p == 3 && values[k] < 0) values[k] = -values[k];
          if (half) reinterpret_cast<uint16_t*>(held.back().data())[k] = narrow(values[k]);
          else reinterpret_cast<float*>(held.back().data())[k] = values[k];
        }
        parts[p] = held.back().data();
      }
      span.weight = parts[0], span.gradient = parts[1], span.mean = parts[2], span.square = parts[3];
      spans->push_back(span);
    }
  }
  REQUIRE(anytorch_adam(first.data(), count, 1) == 0 && anytorch_adam(second.data(), count, threads) == 0);
  for (int i = 0; i < count; i++)
    for (auto part : {&AdamSpan::weight, &AdamSpan::mean, &AdamSpan::square})
      REQUIRE(memcmp(first[i].*part, second[i].*part, size_t(first[i].count) * (first[i].bfloat16 ? 2 : 4)) == 0);
  return 0;
}
