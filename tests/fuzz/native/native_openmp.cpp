// Packed weights by a team of threads, which is all that OpenMP is to linear.cpp: no data race, and the same bits as alone.
//
// The team is ours: TSAN knows nothing of libgomp's barriers, and would call each of them a race. What libgomp itself
// does is left out.
#include "quant/cpp/linear.cpp"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "fuzz.h"

namespace {
int team, most;
thread_local int own;
std::mutex mutex;
std::condition_variable next;
int arrived, turn;

void wait_for_all() {
  std::unique_lock<std::mutex> lock(mutex);
  const int seen = turn;
  if (++arrived == team) {
    arrived = 0, turn++;
    next.notify_all();
    return;
  }
  next.wait(lock, [&] { return turn != seen; });
}
void parallel(void (*body)(void*), void* given, unsigned threads, unsigned) {
  team = int(threads) > most ? most : int(threads);  // as few as OpenMP has
  std::vector<std::thread> others;
  for (int i = 1; i < team; i++) others.emplace_back([=] { own = i; body(given); });
  own = 0;
  body(given);
  for (auto& one : others) one.join();
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  Weight w{};
  w.bits = in.flag() ? 8 : 4, w.group_size = w.group = 32;
  w.columns = 32 * in.from(1, 6), w.rows = in.byte() >= 250 ? 400 : in.from(1, 80);  // 400: enough to be unpacked by several
  w.stored_groups = w.columns / 32, w.row_bytes = w.columns * w.bits / 8;
  const int64_t m = in.from(1, 80), first = in.from(0, w.rows - 1);
  const int threads = int(in.from(2, 5)), kind = in.flag();
  const uint32_t seed = uint32_t(in.word());
  const bool offsets = in.flag();
  most = int(in.from(1, 5));
  Exact<uint8_t> codes(w.rows * w.row_bytes);
  for (size_t i = 0; i < codes.size(); i++) codes[i] = uint8_t(seed * (i + 1) >> 13);
  Exact<float> scale(w.rows * w.stored_groups), offset(scale.size()), x(m * w.columns), values(16), plain(m * w.rows),
      shared(m * w.rows);
  Exact<int16_t> table(16);
  for (int i = 0; i < 16; i++) table[i] = int16_t(i - 8), values[i] = float(i - 8);
  fill(scale.data(), scale.size(), seed, false), fill(offset.data(), offset.size(), seed + 1, false),
      fill(x.data(), x.size(), seed + 2, in.flag());
  w.codes = codes.data(), w.scale = scale.data(), w.offset = offsets ? offset.data() : nullptr, w.table = table.data(),
      w.values = values.data();
  w.x_top = 32767 / 128, w.unit = 1, w.tensor_scale = 1;
  static int count;
  count = threads;
  const OpenMP alone = {}, many = {[] { return count; }, [] { return own; }, [] { return team; }, wait_for_all, parallel};
  quant_use_openmp(&alone);
  const int answer = quant_linear(&w, x.data(), m, nullptr, plain.data(), kind);
  Exact<float> rows((w.rows - first) * w.columns), again(rows.size());
  REQUIRE(quant_unpack(&w, first, w.rows - first, rows.data()) == 0);
  quant_use_openmp(&many);
  REQUIRE(quant_linear(&w, x.data(), m, nullptr, shared.data(), kind) == answer);
  REQUIRE(quant_unpack(&w, first, w.rows - first, again.data()) == 0);
  REQUIRE(answer || memcmp(plain.data(), shared.data(), plain.size() * 4) == 0);
  REQUIRE(memcmp(rows.data(), again.data(), rows.size() * 4) == 0);
  return 0;
}
