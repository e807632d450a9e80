// Our pools of threads under TSAN: one encoder that several threads call, tokenizers, the graphs' kernels, Adam; all at once.
#include "text/packed/code/encoder.cpp"

#include <array>

#include "fuzz.h"

typedef void (*Kernel)(void**, const int64_t*, int64_t, int64_t);
extern "C" void run_kernel(Kernel kernel, void** buffers, const int64_t* sizes, int64_t items, int threads);
extern "C" void* wordpiece_new(const uint8_t*, const int64_t*, const uint8_t*, const int32_t*, int64_t, const uint8_t*, int64_t, const char*, int64_t,
                               const int32_t*, int64_t, const int32_t*, int64_t, int32_t, int64_t);
extern "C" void wordpiece_delete(void*);
extern "C" int64_t wordpiece_encode(const void*, const char* const*, const int64_t*, int64_t, int64_t, int64_t, int32_t*, int32_t*, uint8_t*);

static void* small_encoder(int threads, Exact<float>& words) {
  Shape s{8, 8, 1, 2, 2, 4, 8, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1e-5f, 8, 4};
  void* e = encoder_new(&s, threads);
  REQUIRE(e);
  fill(words.data(), words.size(), 1, false);
  encoder_set_words(e, words.data());
  Exact<float> some(512);
  fill(some.data(), some.size(), 2, false);
  const int outputs[] = {24, 8, 8, 8}, inputs[] = {8, 8, 8, 8};
  REQUIRE(!encoder_set_attention(e, 0, 10000.0f, 0) && !encoder_set_norm(e, 0, 2, some.data(), nullptr) && !encoder_set_norm(e, 0, 3, some.data(), nullptr));
  for (int which = 0; which < 4; which++) {
    REQUIRE(!encoder_linear_new(e, 0, which, outputs[which], inputs[which], 0, which % 2, 0));
    REQUIRE(!encoder_linear_rows(e, 0, which, some.data(), nullptr, outputs[which], 0));
    encoder_linear_done(e, 0, which);
  }
  return e;
}

static void encode(void* e, int texts, int length) {
  Exact<int32_t> ids(texts * length), starts(texts + 1);
  for (int i = 0; i < texts; i++) starts[i + 1] = starts[i] + length;
  for (size_t t = 0; t < ids.size(); t++) ids[t] = int32_t(t % 8);
  Exact<float> pooled(texts * 8);
  int where;
  REQUIRE(encoder_run(e, ids.data(), starts.data(), texts, MEAN, 1, pooled.data(), nullptr, &where) == OK);
  for (int i = 1; i < texts && length % 8 == 0; i++) REQUIRE(memcmp(pooled.data(), pooled.data() + 8 * i, 32) == 0);  // the same ids
}

static void doubled(void** b, const int64_t*, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) static_cast<int64_t*>(b[0])[i] = 2 * i;
}

static void kernel(int64_t items, int threads) {
  Exact<int64_t> out(items);
  void* buffers[] = {out.data()};
  run_kernel(doubled, buffers, nullptr, items, threads);
  for (int64_t i = 0; i < items; i++) REQUIRE(out[i] == 2 * i);
}

static void tokenize(void* tokenizer, int texts) {
  const std::vector<char> text(30000, 'a');
  Exact<const char*> begins(texts);
  Exact<int64_t> sizes(texts);
  for (int i = 0; i < texts; i++) begins[i] = text.data(), sizes[i] = int64_t(text.size());
  Exact<int32_t> ids(texts * 16), starts(texts + 1);
  Exact<uint8_t> flags(texts);
  REQUIRE(wordpiece_encode(tokenizer, begins.data(), sizes.data(), texts, 16, 3, ids.data(), starts.data(), flags.data()) == starts[texts]);
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  Exact<float> words(64);
  void* e = small_encoder(int(in.from(1, 4)), words);
  uint8_t table[256 * 16] = {};
  table['a' * 16] = 1, table['a' * 16 + 1] = 1, table['a' * 16 + 2] = 1, table['a' * 16 + 3] = 'a';
  const int64_t offsets[] = {0, 1};
  const uint8_t piece[] = {'a'}, root[] = {0};
  const int32_t id[] = {5};
  void* tokenizer = wordpiece_new(piece, offsets, root, id, 1, table, 128, "", 0, nullptr, 0, nullptr, 0, 1, 100);
  const int callers = int(in.from(1, 4));
  std::vector<std::thread> threads;
  for (int c = 0; c < callers; c++) {
    std::vector<std::array<int, 3>> steps;
    for (int64_t n = in.from(1, 6); n > 0; n--) steps.push_back({int(in.from(0, 3)), int(in.from(1, 9)), int(in.from(1, 4))});
    threads.emplace_back([=] {
      for (const auto& [kind, many, few] : steps) {
        if (kind == 0) encode(e, many, 8 * few);
        if (kind == 1) kernel(many * 40, few);
        if (kind == 2) tokenize(tokenizer, many);
        if (kind == 3) {
          double seconds[PARTS];
          encoder_profile(e, few % 2, seconds);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  wordpiece_delete(tokenizer);
  encoder_free(e);
  return 0;
}
