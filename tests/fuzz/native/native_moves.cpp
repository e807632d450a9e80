// Small native entries: tokens and rows moved, launches encoded, torch's random numbers drawn, the processor asked.
#include "recorded/moves/moves.cpp"

#include "fuzz.h"

extern "C" void encode_launches(void*, const void*, size_t, void (*)(void*, void*), void (*)(void*, uint32_t, void*, size_t, const uint32_t*),
                                void (*)(void*, uint32_t, const void*, size_t), void (*)(void*, uint32_t, uint32_t, uint32_t));
extern "C" uint32_t processor_features();
extern "C" void uniform(uint32_t* state, int32_t* next, double* out, int64_t count);

struct Launch {  // as in gpu/code/tape.cpp
  void *pipeline, *group;
  const void* immediates;
  uint32_t size, x, y, z;
};
struct Call {  // of WebGPU's, with what it was given
  int kind;
  const void* given;
  uint32_t x, y, z;
  bool operator==(const Call& o) const { return kind == o.kind && given == o.given && x == o.x && y == o.y && z == o.z; }
};
typedef std::vector<Call> Pass;

static void moved(Input& in) {
  const int64_t texts = in.from(0, 12), count = texts ? in.from(0, 20) : 0;
  Exact<int32_t> starts(texts + 1);
  for (int64_t i = 0; i < texts; i++) starts[i + 1] = starts[i] + int32_t(in.from(0, 9));
  Exact<int32_t> ids(starts[texts]);
  for (size_t i = 0; i < ids.size(); i++) ids[i] = int32_t(i);
  Exact<int64_t> places(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) places[i] = in.from(0, texts - 1), total += starts[places[i] + 1] - starts[places[i]];
  Exact<int32_t> out(total), out_starts(count + 1);
  moves_gather(ids.data(), starts.data(), places.data(), count, out.data(), out_starts.data());
  REQUIRE(out_starts[0] == 0 && out_starts[count] == total);
  for (int64_t i = 0; i < count; i++)
    for (int32_t t = 0; t < out_starts[i + 1] - out_starts[i]; t++) REQUIRE(out[out_starts[i] + t] == starts[places[i]] + t);
  const int64_t width = in.from(0, 33);
  Exact<char> rows(width * count), target(width * texts);
  for (size_t i = 0; i < rows.size(); i++) rows[i] = char(i);
  moves_scatter(rows.data(), width, places.data(), count, target.data());
  if (count && width) REQUIRE(memcmp(target.data() + places[count - 1] * width, rows.data() + (count - 1) * width, width) == 0);
}

static void encoded(Input& in) {
  const size_t count = size_t(in.from(0, 20));
  Exact<Launch> launches(count);
  Exact<uint8_t> immediates(64);
  Pass pass, wanted;
  for (size_t i = 0; i < count; i++) {
    launches[i] = {in.flag() ? &immediates : nullptr, &launches, immediates.data() + i % 8, uint32_t(in.from(0, 56)),
        uint32_t(in.word()), in.byte(), in.byte()};
    const Launch& one = launches[i];
    if (one.pipeline) wanted.push_back({0, one.pipeline});
    wanted.insert(wanted.end(), {{1, one.group}, {2, one.immediates, one.size}, {3, nullptr, one.x, one.y, one.z}});
  }
  encode_launches(
      &pass, launches.data(), count, [](void* p, void* pipeline) { static_cast<Pass*>(p)->push_back({0, pipeline}); },
      [](void* p, uint32_t at, void* group, size_t offsets, const uint32_t*) {
          static_cast<Pass*>(p)->push_back({1, group, at, uint32_t(offsets)}); },
      [](void* p, uint32_t at, const void* data, size_t size) {
          static_cast<Pass*>(p)->push_back({2, data, uint32_t(size), at}); },
      [](void* p, uint32_t x, uint32_t y, uint32_t z) { static_cast<Pass*>(p)->push_back({3, nullptr, x, y, z}); });
  REQUIRE(pass == wanted);
}

// MT19937 by its definition: word after word, each tempered by itself.
static double next_number(std::vector<uint32_t>& words, size_t& at) {
  uint64_t both = 0;
  for (int half = 0; half < 2; half++, at++) {
    while (at >= words.size()) {
      const size_t n = words.size() - 624;
      const uint32_t y = (words[n] & 0x80000000u) | (words[n + 1] & 0x7fffffffu);
      words.push_back(words[n + 397] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0));
    }
    uint32_t y = words[at];
    y ^= y >> 11, y ^= y << 7 & 0x9d2c5680u, y ^= y << 15 & 0xefc60000u, y ^= y >> 18;
    both = both << 32 | y;
  }
  return double(both & ((1ull << 53) - 1)) / 9007199254740992.0;
}

static void drawn(Input& in) {
  Exact<uint32_t> state(624), again(624);
  for (size_t i = 0; i < 624; i++) state[i] = again[i] = uint32_t(i * 2654435769u) ^ uint32_t(in.word());
  int32_t next = int32_t(in.from(0, 624)), other = next;
  std::vector<uint32_t> words(state.data(), state.data() + 624);
  size_t at = size_t(next);
  const int64_t count = in.from(0, 1500), first = in.from(0, count);
  Exact<double> whole(count), parts(count);
  uniform(state.data(), &next, whole.data(), count);
  uniform(again.data(), &other, parts.data(), first);
  uniform(again.data(), &other, parts.data() + first, count - first);
  REQUIRE(next == other && next >= 0 && next <= 624 && memcmp(state.data(), again.data(), 624 * 4) == 0);
  REQUIRE(!count || memcmp(whole.data(), parts.data(), count * sizeof(double)) == 0);
  for (int64_t i = 0; i < count; i++) REQUIRE(whole[i] >= 0 && whole[i] < 1 && whole[i] == next_number(words, at));
}

// As the compiler's own library has it. Nothing is handed in, so once is enough.
static bool asked() {
#if defined(__x86_64__)
  const uint32_t found = processor_features();
  const bool wanted[] = {bool(__builtin_cpu_supports("fma")), bool(__builtin_cpu_supports("f16c")),
      bool(__builtin_cpu_supports("avx2")),
                         bool(__builtin_cpu_supports("avx512f")), bool(__builtin_cpu_supports("avx512dq")),
                             bool(__builtin_cpu_supports("avx512bw")),
                         bool(__builtin_cpu_supports("avx512vl")), bool(__builtin_cpu_supports("avx512vnni"))};
  for (int i = 0; i < 8; i++) REQUIRE((found >> i & 1) == wanted[i]);
  REQUIRE(found < 1 << 9);
#else
  REQUIRE(processor_features() == 0);
#endif
  return true;
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  static const bool once = asked();
  (void)once;
  const int kind = int(in.from(0, 2));
  kind == 0 ? moved(in) : kind == 1 ? encoded(in) : drawn(in);
  return 0;
}
