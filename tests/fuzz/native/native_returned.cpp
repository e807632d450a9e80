// Buffers that tensors give back from any thread, while one that has the GIL hands them out, pins them, drains them and
// changes the
// runtime: no data race, none is lost and none is in two hands.
//
// Of Python there are only references to count: the launch path itself is native_launcher.cpp's.
#include "gpu/code/launcher/launcher.cpp"

#include <thread>

#include "fuzz.h"

namespace {
struct Obj { int64_t refs, key; std::atomic<int> out; std::vector<Object*> items; };  // `out`: in a tensor's hands
Obj* of(Object* one) { return static_cast<Obj*>(one); }
Obj none{1};
std::atomic<int64_t> alive;
void dec(Object* one) {
  if (--of(one)->refs) return;
  for (Object* item : of(one)->items) dec(item);
  delete of(one), alive--;
}
Object* whole(long long value) { alive++; return new Obj{1, value}; }

void hand_in() {
  decltype(py) functions = {};
  functions.inc_ref = [](Object* one) { of(one)->refs++; };
  functions.dec_ref = dec;
  functions.long_from = whole;
  functions.long_as = [](Object* one) -> long long { return of(one)->key; };
  functions.error = []() -> Object* { return nullptr; };
  functions.list_new = [](Count) { return whole(0); };
  functions.list_append = [](Object* list, Object* item) { of(item)->refs++, of(list)->items.push_back(item); return 0; };
  decltype(is) objects = {&none};
  decltype(gpu) webgpu = {};
  use_python(reinterpret_cast<void**>(&functions), reinterpret_cast<Object**>(&objects), reinterpret_cast<void**>(&webgpu));
}
void call(Object* (*what)(Object*, Object* const*, Count), std::vector<Object*> args) {
  dec(what(nullptr, args.data(), Count(args.size())));
  for (Object* one : args) dec(one);
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  static bool ready = (hand_in(), true);
  (void)ready;
  const int64_t at_first = alive;
  const int dying = int(in.from(1, 3));
  std::vector<std::vector<Buffer*>> hands(dying);  // what each thread's tensors have
  uint64_t key = TAG >> SHIFT | 1;
  for (int64_t n = in.from(1, 24); n > 0; n--, key++) {
    Object* made = whole((long long)key);
    call(add, {made, whole((long long)key), whole(1), whole((long long)bucket(uint64_t(in.from(1, 2000))))});
    hands[n % dying].push_back(known(key));
    of(known(key)->object)->out = 1;
    known(key)->place.store(IN_TENSOR);
    known(key)->managed.context = known(key);
  }
  const uint64_t keys = key;
  std::vector<std::thread> threads;
  for (auto& some : hands)
    threads.emplace_back([&some] {
      for (Buffer* one : some) {
        REQUIRE(of(one->object)->out.exchange(0) == 1);
        deleted(&one->managed);
      }
    });
  int64_t kept = 0;
  for (int64_t n = in.from(0, 40); n > 0; n--) {
    const int kind = int(in.from(0, 4));
    if (kind < 2) {
      const uint64_t wanted = uint64_t(in.from(1, 2000));
      if (Buffer* one = take_returned(wanted)) {
        REQUIRE(one->nbytes == bucket(wanted) && !one->pins.load() && of(one->object)->out.exchange(1) == 0);
        if (in.flag()) {
          one->place.store(IN_TENSOR);
          of(one->object)->out = 0;
          give_back(one);
        } else {
          kept++;  // Python has it from now on
        }
      }
    } else if (kind == 2) {
      Object* list = drain(nullptr, nullptr, 0);
      for (Object* one : of(list)->items) REQUIRE(of(one)->out.exchange(1) == 0);
      kept += int64_t(of(list)->items.size());
      dec(list);
    } else if (kind == 3) {
      call(pin, {whole((long long)(TAG >> SHIFT | uint64_t(in.from(1, 24)))), whole(in.from(0, 1))});
    } else if (in.byte() == 255) {
      call(attach, {});
    }
  }
  for (auto& one : threads) one.join();
  Object* list = drain(nullptr, nullptr, 0);
  for (Object* one : of(list)->items) REQUIRE(of(one)->out.exchange(1) == 0);
  dec(list);
  call(attach, {});  // the runtime goes, and all that is left of it
  call([](Object* a, Object* const* b, Count c) { return drain(a, b, c); }, {});
  for (uint64_t each = TAG >> SHIFT | 1; each < keys; each++) REQUIRE(!*place_of(each, false));
  REQUIRE(alive == at_first);
  return 0;
}
