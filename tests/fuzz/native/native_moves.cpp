// Small native entries: tokens and rows moved, launches encoded, torch's random numbers drawn.
#include "recorded/moves/moves.cpp"

#include "fuzz.h"

extern "C" void encode_launches(void*, const void*, size_t, void (*)(void*, void*), void (*)(void*, uint32_t, void*, size_t, const uint32_t*),
                                void (*)(void*, uint32_t, const void*, size_t), void (*)(void*, uint32_t, uint32_t, uint32_t));
extern "C" void uniform(uint32_t* state, int32_t* next, double* out, int64_t count);

struct Launch {  // as in gpu/code/tape.cpp
  void *pipeline, *group;
  const void* immediates;
  uint32_t size, x, y, z;
};
struct Pass { size_t pipelines = 0, groups = 0, dispatches = 0; uint64_t bytes = 0, groups_of_work = 0; };

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
  Pass pass;
  uint64_t bytes = 0, work = 0;
  size_t pipelines = 0;
  for (size_t i = 0; i < count; i++) {
    launches[i] = {in.flag() ? &pass : nullptr, &pass, immediates.data(), uint32_t(in.from(0, 64)), uint32_t(in.word()), in.byte(), in.byte()};
    bytes += launches[i].size, work += uint64_t(launches[i].x) + launches[i].y + launches[i].z, pipelines += launches[i].pipeline != nullptr;
  }
  encode_launches(
      &pass, launches.data(), count, [](void* p, void*) { static_cast<Pass*>(p)->pipelines++; },
      [](void* p, uint32_t, void*, size_t, const uint32_t*) { static_cast<Pass*>(p)->groups++; },
      [](void* p, uint32_t, const void* data, size_t size) {
        for (size_t i = 0; i < size; i++) static_cast<Pass*>(p)->bytes += 1 + static_cast<const uint8_t*>(data)[i];
      },
      [](void* p, uint32_t x, uint32_t y, uint32_t z) { static_cast<Pass*>(p)->dispatches++, static_cast<Pass*>(p)->groups_of_work += uint64_t(x) + y + z; });
  REQUIRE(pass.groups == count && pass.dispatches == count && pass.pipelines == pipelines && pass.bytes == bytes && pass.groups_of_work == work);
}

static void drawn(Input& in) {
  Exact<uint32_t> state(624), again(624);
  for (size_t i = 0; i < 624; i++) state[i] = again[i] = uint32_t(i * 2654435769u) ^ uint32_t(in.word());
  int32_t next = int32_t(in.from(0, 624)), other = next;
  const int64_t count = in.from(0, 1500), first = in.from(0, count);
  Exact<double> whole(count), parts(count);
  uniform(state.data(), &next, whole.data(), count);
  uniform(again.data(), &other, parts.data(), first);
  uniform(again.data(), &other, parts.data() + first, count - first);
  REQUIRE(next == other && next >= 0 && next <= 624 && memcmp(state.data(), again.data(), 624 * 4) == 0);
  REQUIRE(!count || memcmp(whole.data(), parts.data(), count * sizeof(double)) == 0);
  for (int64_t i = 0; i < count; i++) REQUIRE(whole[i] >= 0 && whole[i] < 1);
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int kind = int(in.from(0, 2));
  kind == 0 ? moved(in) : kind == 1 ? encoded(in) : drawn(in);
  return 0;
}
