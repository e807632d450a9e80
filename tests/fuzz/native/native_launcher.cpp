// The launch path over any plans, buffers, tensors and numbers, in any order, with calls of Python's that fail: what is
// recorded is
// what a plain reference packs, every object is freed once, an error is set exactly where nothing is returned.
//
// Python, torch and WebGPU are fakes of the functions that are handed in: objects with counts of references, a pool of
// buffers, a
// pass that notes its calls. Left out: the real ones' own behaviour, threads (native_returned.cpp has those), and fork.
#include "gpu/code/launcher/launcher.cpp"

#include <cstdarg>
#include <functional>
#include <map>
#include <string>

#include "fuzz.h"

namespace {
struct Impl {  // of a tensor
  uint64_t address;
  std::vector<int64_t> sizes, strides;
  int32_t dtype;
  DLManagedTensor* managed;  // null: Python made it
};
struct Obj {
  int64_t refs;
  Obj* type;
  Impl* impl;
  long long whole;
  double real;
  bool large;  // an int beyond 64 bits
  std::vector<Obj*> items;
  std::string text;
  void* pointer;
  const char* name;
  void (*destroy)(Object*);
  std::function<Obj*(const std::vector<Obj*>&)> run;
};
Obj int_type, float_type, bool_type, tuple_type, list_type, bytes_type, none_type, capsule_type, function_type,
    tensor_type_, parameter_type_, plain_type;
Obj none{1, &none_type}, type_error{1, &plain_type}, too_large{1, &plain_type}, other_error{1, &plain_type},
    dtype_a{1, &plain_type}, dtype_b{1, &plain_type};
constexpr double BEYOND = 1e30;  // what an int beyond 64 bits is as a double
Obj* pending;       // the error that is set
int64_t alive;      // objects
int64_t trouble;    // so many calls until one fails; below 0: none does
int locked;

Obj* of(Object* one) { return static_cast<Obj*>(one); }
Obj* fresh(Obj& type) { alive++; return new Obj{1, &type}; }
Obj* raise(Obj& kind) { pending = &kind; return nullptr; }
bool fails() { return trouble >= 0 && trouble-- == 0 ? (raise(other_error), true) : false; }
void inc(Object* one) {
  if (!one) return;
  REQUIRE(of(one)->refs > 0);
  of(one)->refs++;
}
void lost(Impl* impl);
void dec(Object* given) {
  if (!given) return;
  Obj* one = of(given);
  REQUIRE(one->refs > 0);
  if (--one->refs) return;
  if (one->destroy) one->refs = 1, one->destroy(one);
  for (Obj* item : one->items) dec(item);
  if (one->impl) lost(one->impl);
  delete one;
  alive--;
}
Obj* whole(long long value) { Obj* made = fresh(int_type); made->whole = value; return made; }
Obj* real(double value) { Obj* made = fresh(float_type); made->real = value; return made; }
Obj* text(const std::string& value) { Obj* made = fresh(bytes_type); made->text = value; return made; }
Obj* sequence(Obj& type, const std::vector<Obj*>& items) { Obj* made = fresh(type); made->items = items; return made; }
Obj* function(std::function<Obj*(const std::vector<Obj*>&)> run) { Obj* made = fresh(function_type);
    made->run = std::move(run); return made; }

// --- Python's C interface ---
Object* long_from(long long value) { return fails() ? nullptr : whole(value); }
long long long_as(Object* one) {
  if (of(one)->type == &int_type && !of(one)->large) return of(one)->whole;
  raise(type_error);
  return -1;
}
double long_as_double(Object* one) { return of(one)->large ? BEYOND : double(of(one)->whole); }
double float_as(Object* one) {
  if (of(one)->type == &float_type) return of(one)->real;
  raise(type_error);
  return -1;
}
Object* tuple_new(Count count) { return fails() ? nullptr : sequence(tuple_type, std::vector<Obj*>(count)); }
int tuple_set(Object* tuple, Count at, Object* item) { of(tuple)->items.at(at) = of(item); return 0; }
template <Obj* TYPE> Object* get(Object* one, Count at) {
  if (of(one)->type != TYPE || at < 0 || at >= Count(of(one)->items.size())) return raise(type_error);
  return of(one)->items[at];
}
template <Obj* TYPE> Count size_of(Object* one) {
    return of(one)->type == TYPE ? Count(of(one)->items.size()) : (raise(type_error), -1); }
Object* list_new(Count) { return fails() ? nullptr : fresh(list_type); }
int list_append(Object* list, Object* item) { inc(item); of(list)->items.push_back(of(item)); return 0; }
Object* bytes_from(const char* data, Count size) { return fails() ? nullptr : text(std::string(data, size)); }
char* bytes_as(Object* one) { return of(one)->text.data(); }
Count bytes_size(Object* one) { return of(one)->type == &bytes_type ? Count(of(one)->text.size()) : (raise(type_error),
    -1); }
Object* capsule_new(void* pointer, const char* name, void (*destroy)(Object*)) {
  if (fails()) return nullptr;
  Obj* made = fresh(capsule_type);
  made->pointer = pointer, made->name = name, made->destroy = destroy;
  return made;
}
void* capsule_get(Object* one, const char* name) {
  if (of(one)->type != &capsule_type || (name && (!of(one)->name || strcmp(name, of(one)->name)))) return raise(type_error);
  return of(one)->pointer;
}
Obj* called(Object* what, const std::vector<Obj*>& args) {
  REQUIRE(!pending);  // nothing may be called while an error is set
  if (!what) return raise(other_error);
  if (!of(what)->name && fails()) return nullptr;  // a named one does not fail
  inc(what);
  Obj* made = of(what)->run(args);
  dec(what);
  REQUIRE(!made == (pending != nullptr));
  return made;
}
Object* call(Object* what, Object* args, Object*) { return called(what, of(args)->items); }
Object* call_with(Object* what, ...) {
  std::vector<Obj*> args;
  va_list list;
  va_start(list, what);
  while (Object* one = va_arg(list, Object*)) args.push_back(of(one));
  va_end(list);
  return called(what, args);
}
Object* call_plain(Object* what) { REQUIRE(what); return called(what, {}); }
Object* error_now() { return pending; }
void clear_error() { pending = nullptr; }
void set_error(Object* kind, const char*) { pending = of(kind); }
void fetch_error(Object** kind, Object** value, Object** trace) { *kind = pending, *value = *trace = nullptr,
    pending = nullptr; }
void restore_error(Object* kind, Object*, Object*) { pending = of(kind); }
Count dict_size(Object* one) { return Count(of(one)->items.size()); }
int is_error(Object* kind) { REQUIRE(pending); return pending == kind; }

// --- torch ---
Impl* impl_of(void* handle) { return *static_cast<Impl**>(handle); }
int32_t data_of(void* one, void** to) { return *to = reinterpret_cast<void*>(impl_of(one)->address), 0; }
int32_t rank_of(void* one, int64_t* to) { return *to = int64_t(impl_of(one)->sizes.size()), 0; }
int32_t sizes_of(void* one, int64_t** to) { return *to = impl_of(one)->sizes.data(), 0; }
int32_t strides_of(void* one, int64_t** to) { return *to = impl_of(one)->strides.data(), 0; }
int32_t kind_of(void* one, int32_t* to) { return *to = impl_of(one)->dtype, 0; }
Obj* tensor_of_impl(Impl* impl, bool parameter) { Obj* made = fresh(parameter ? parameter_type_ : tensor_type_);
    made->impl = impl; return made; }

// --- the runtime in Python: a pool of buffers, by key, and what was launched ---
struct Launched {
  Obj* program;
  std::vector<uint64_t> keys;
  std::string bytes;
  uint32_t x, y;
  bool operator==(const Launched& o) const { return program == o.program && keys == o.keys && bytes == o.bytes &&
      x == o.x && y == o.y; }
};
struct Made { Obj *capsule, *program; uint32_t x, y, head; std::string at_starts, codes, shifts; uint32_t buffers;
    bool makes; };
std::map<uint64_t, Obj*> pool;         // of the open runtime; `whole` has the key, `large` says: nobody has it
std::map<uint64_t, uint64_t> nbytes_of_key;
uint64_t number;
std::vector<Launched> log_of;
std::map<std::pair<Obj*, std::vector<uint64_t>>, int64_t> groups_of;
std::map<int64_t, std::pair<Obj*, std::vector<uint64_t>>> by_group;
std::map<void*, Obj*> by_pipeline;
int64_t numbered;
void *open_pass, *set_now;
std::pair<Obj*, std::vector<uint64_t>> bound;
std::string immediates;
bool bind_ends_pass, bind_too_large, bind_forgets, acquire_resets;
Op* ops[3];
std::vector<Obj*> plans_for_ops;  // what plan_of gives next; one for all

Object* method(const char* name, std::vector<Obj*> args) {
  for (Method* one = methods; one->name; one++) {
    if (strcmp(one->name, name)) continue;
    auto run = reinterpret_cast<Object* (*)(Object*, Object* const*, Count)>(one->function);
    std::vector<Object*> given(args.begin(), args.end());
    Exact<Object*> exact(given.size());
    for (size_t i = 0; i < given.size(); i++) exact[i] = given[i];
    Object* made = run(nullptr, exact.data(), Count(given.size()));
    REQUIRE(!made == (pending != nullptr));
    return made;
  }
  std::abort();
}
// One that must answer whatever happens, called from within Python's own code: with no trouble of its own.
Obj* quiet(const char* name, std::vector<Obj*> args) {
  const int64_t later = trouble;
  Obj* error = pending;
  trouble = -1, pending = nullptr;
  Obj* made = of(method(name, args));
  trouble = later, pending = error;
  for (Obj* one : args) dec(one);
  return made;
}
void plainly(const char* name, std::vector<Obj*> args) { dec(quiet(name, args)); }

void drained() {
  Obj* list = quiet("returned", {});
  for (Obj* one : list->items) {
    REQUIRE(pool.count(uint64_t(one->whole)) && pool[uint64_t(one->whole)] == one && !one->large);
     // of this runtime, and not twice
    one->large = true;
  }
  dec(list);
}
uint64_t taken(uint64_t nbytes) {  // the address of a buffer, as Pool.take
  drained();
  for (auto& [key, one] : pool)
    if (one->large && nbytes_of_key[key] == bucket(nbytes) && !one->real) return one->large = false, key << SHIFT;
  const uint64_t key = (TAG >> SHIFT) | number++;
  Obj* made = fresh(plain_type);
  made->whole = (long long)key;
  pool[key] = made, nbytes_of_key[key] = bucket(nbytes);
  return key << SHIFT;
}
void lost(Impl* impl) {
  if (impl->managed) impl->managed->deleter(impl->managed);
  else if (pool.count(impl->address >> SHIFT)) pool[impl->address >> SHIFT]->large = true;
  delete impl;
}
void close_runtime(bool again);

Obj* none_again() { inc(&none); return &none; }
Obj* bind(const std::vector<Obj*>& args) {
  std::vector<uint64_t> keys;
  for (Obj* one : args[1]->items) keys.push_back(uint64_t(one->whole));
  if (bind_too_large) return bind_too_large = false, raise(too_large);
  if (bind_ends_pass) bind_ends_pass = false, plainly("use_pass", {whole(0)}), open_pass = nullptr;
  if (bind_forgets) bind_forgets = false, plainly("forget_groups", {});
  int64_t& handle = groups_of[{args[0], keys}];
  if (!handle) handle = ++numbered, by_group[handle] = {args[0], keys};
  return whole(handle);
}
Obj* dispatch_from_python(const std::vector<Obj*>& args) {
  std::vector<uint64_t> keys;
  for (Obj* one : args[1]->items) keys.push_back(uint64_t(one->whole));
  log_of.push_back({args[0], keys, args[2]->text, uint32_t(args[3]->whole), uint32_t(args[4]->whole)});
  return none_again();
}
Obj* missing(const std::vector<Obj*>& args) {
  const uint64_t key = uint64_t(args[0]->whole);
  if (!pool.count(key)) return raise(other_error);
  Obj* buffer = pool[key];
  inc(buffer);
  plainly("add", {buffer, whole((long long)key), whole(77), whole((long long)nbytes_of_key[key])});
  plainly("pin", {whole((long long)key), whole((long long)buffer->real)});
  return none_again();
}
void attach_now() {
  std::vector<Obj*> given = {
      function([](auto&) { if (acquire_resets) acquire_resets = false, close_runtime(true); locked++;
          return none_again(); }),
      function([](auto&) { locked--; return none_again(); }), function(dispatch_from_python), function(bind),
      function([](auto&) { plainly("refill", {whole(3)}); return none_again(); }), function(missing)};
  given[1]->name = "release";  // of a lock that is held
  const int64_t later = trouble;
  trouble = -1;
  Exact<Object*> exact(6);
  for (int i = 0; i < 6; i++) exact[i] = given[i];
  dec(attach(nullptr, exact.data(), 6));
  for (Obj* one : given) dec(one);
  trouble = later;
}
void close_runtime(bool again) {
  auto gone = std::move(pool);
  pool.clear(), nbytes_of_key.clear(), groups_of.clear();
  open_pass = nullptr;
  plainly("attach", {});
  for (auto& [key, one] : gone) dec(one);
  if (again) attach_now();
}

void set_pipeline(void* on, void* one) { REQUIRE(on == open_pass && on); set_now = one; }
void set_bind_group(void* on, uint32_t at, void* group, size_t count, const uint32_t*) {
  REQUIRE(on == open_pass && !at && !count && by_group.count(reinterpret_cast<int64_t>(group)));
  bound = by_group[reinterpret_cast<int64_t>(group)];
}
void set_immediates(void* on, uint32_t at, const void* data, size_t size) {
  REQUIRE(on == open_pass && !at);
  immediates.assign(static_cast<const char*>(data), size);
}
void dispatch(void* on, uint32_t x, uint32_t y, uint32_t z) {
  REQUIRE(on == open_pass && z == 1 && by_pipeline.count(set_now) && by_pipeline[set_now] == bound.first && locked == 1);
  log_of.push_back({bound.first, bound.second, immediates, x, y});
}

Obj* from_dlpack_(const std::vector<Obj*>& args) {
  auto managed = static_cast<DLManagedTensor*>(capsule_get(args[0], "dltensor"));
  const DLTensor& is = managed->tensor;
  REQUIRE(is.device_type == DL_OTHER_DEVICE && is.rank >= 0 && is.rank <= MOST_RANK && !is.byte_offset);
  return tensor_of_impl(new Impl{reinterpret_cast<uint64_t>(is.data), {is.sizes, is.sizes + is.rank},
      {is.strides, is.strides + is.rank}, is.bits, managed}, false);
}
Obj* python_tensor(uint64_t nbytes, int rank) {
  return tensor_of_impl(new Impl{taken(nbytes), std::vector<int64_t>(rank, 2), std::vector<int64_t>(rank, 1), 6,
      nullptr}, false);
}

void hand_in() {
  static bool done = false;
  if (done) return;
  done = true;
  decltype(py) functions = {inc, dec, long_from, long_as, long_as_double, float_as, tuple_new, tuple_set,
      get<&tuple_type>, size_of<&tuple_type>, list_new,
                            list_append, get<&list_type>, size_of<&list_type>, bytes_from, bytes_as, bytes_size,
                                capsule_new, capsule_get, call, call_with,
                            call_plain, error_now, clear_error, set_error, fetch_error, restore_error, dict_size, is_error};
  decltype(is) objects = {&none, &int_type, &float_type, &bool_type, &tuple_type, &list_type, &type_error, &too_large};
  decltype(gpu) webgpu = {set_pipeline, set_bind_group, set_immediates, dispatch};
  use_python(reinterpret_cast<void**>(&functions), reinterpret_cast<Object**>(&objects), reinterpret_cast<void**>(&webgpu));
  decltype(tensor_of) readers = {data_of, rank_of, sizes_of, strides_of, kind_of};
  tensor_type_.refs = parameter_type_.refs = 1;
  Object* held[] = {&tensor_type_, &parameter_type_, function(from_dlpack_),
      function([](auto& args) { return whole((long long)taken(uint64_t(args[0]->whole))); }),
                    function([](auto&) { return python_tensor(64, 1); })};
  const Dtype all[] = {{&dtype_a, 2, 32}, {&dtype_b, 0, 64}};
  use_tensors(reinterpret_cast<void**>(&readers), offsetof(Obj, impl), held, all, 2);
  for (int i = 0; i < 3; i++) {
    Method* which;
    Obj* otherwise = function([i](auto& args) -> Obj* {
      if (i != 2) return python_tensor(128, 2);
      inc(args[0]);
      return args[0];
    });
    Obj* plan_of = function([](auto&) { Obj* one = plans_for_ops.empty() ? &none : plans_for_ops.back(); inc(one);
        return one; });
    ops[i] = static_cast<Op*>(kernel_of(otherwise, plan_of, i ? 1 : 2, i == 1 ? 4 : 2, i == 2, &which));
  }
}

// What a plan packs for these addresses and numbers, byte by byte.
std::string packed(const Made& plan, const std::vector<uint64_t>& addresses, const std::vector<Obj*>& numbers) {
  std::string made;
  auto add = [&](auto value) { made.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (size_t i = 0; i < numbers.size(); i++) {
    const Obj* one = numbers[i];
    const char code = plan.codes[i];
    const double value = one->large ? BEYOND : one->type == &int_type ? double(one->whole) : one->real;
    if (code == 'd') add(value);
    else if (code == 'f') add(float(value));
    else if (code == 'q' || code == 'Q') add(one->whole);
    else add(uint32_t(one->whole));
  }
  for (size_t i = 0; i < plan.shifts.size() && i < addresses.size();
      i++) add(uint32_t((addresses[i] & OFFSET) >> plan.shifts[i]));
  std::string all = plan.at_starts;
  bool changed = !numbers.empty();
  for (uint64_t one : addresses) changed |= (one & OFFSET) != 0;
  if (changed) all.replace(plan.head, made.size(), made);
  return all;
}
void check(const Made& plan, size_t before, const std::vector<uint64_t>& addresses, const std::vector<Obj*>& numbers) {
  std::vector<uint64_t> keys;
  for (uint64_t one : addresses) keys.push_back(one >> SHIFT);
  REQUIRE(log_of.size() == before + 1);
  REQUIRE((log_of.back() == Launched{plan.program, keys, packed(plan, addresses, numbers), plan.x, plan.y}));
}

long long odd_number(Input& in) {
  static const long long all[] = {0, 1, -1, 4, 8, 9, 10, 11, 63, 64, 256, 257, 1ll << 31, 1ll << 32, (1ll << 32) - 8,
      -8, INT64_MAX, INT64_MIN};
  return all[in.from(0, 17)];
}
Obj* scalar(Input& in) {
  const int kind = in.byte() % 8;
  if (kind < 3) return real(kind == 0 ? 1e300 : kind == 1 ? 0.5 : double(NAN));
  Obj* made = whole(kind < 6 ? in.byte() : odd_number(in));
  made->large = kind == 7;
  return made;
}

// A plan of any parts; None, or nothing with an error, where they do not fit. `wanted`: buffers and numbers of a call of
// an op.
bool new_plan(Input& in, std::vector<Made>& plans, int buffers, int numbers) {
  Made made{};
  made.program = fresh(plain_type);
  const bool wild = buffers < 0;
  long long many = wild ? in.from(0, 3) : buffers, head = 4 * in.from(0, 2);
  for (int64_t n = wild ? in.from(0, 4) : numbers; n > 0; n--) made.codes += "fdiqQI"[in.from(0, 5)];
  if (in.byte() == 255) made.codes += char(in.byte());
  for (long long i = 0; i < many; i++) made.shifts += char(in.byte() == 255 ? in.byte() : in.from(0, 3));
  size_t size = size_t(head) + 4 * made.shifts.size();
  for (char code : made.codes) size += code == 'd' || code == 'q' || code == 'Q' ? 8 : 4;
  for (size_t i = 0; i < size; i++) made.at_starts += char(i);
  const int wrong = in.byte();
  if (wrong == 255) many = odd_number(in);
  if (wrong == 254) head = odd_number(in);
  if (wrong == 253) made.at_starts.resize(size_t(in.from(0, 300)));
  if (wrong == 252) made.codes.resize(size_t(in.from(0, 20)), 'f');
  if (wrong == 251) made.shifts.resize(size_t(in.from(0, 12)));
  made.x = uint32_t(in.word()), made.y = in.byte(), made.head = uint32_t(head), made.buffers = uint32_t(many);
  Obj* result = &none;
  inc(result);
  if (in.byte() % 4) {
    dec(result);
    auto numbers_in = [&](int64_t count) {
      std::vector<Obj*> items;
      for (; count > 0; count--) items.push_back(in.byte() == 255 ? scalar(in) : whole(in.from(0, 9)));
      return sequence(in.flag() ? list_type : tuple_type, items);
    };
    const int64_t rank = in.from(0, 13);
    Obj *sizes = numbers_in(rank), *strides = numbers_in(in.byte() == 255 ? in.from(0, 13) : rank);
    inc(&dtype_a);
    result = sequence(tuple_type, {sizes, strides, &dtype_a, in.byte() == 255 ? scalar(in) : whole(in.from(1, 2000))});
  }
  const int64_t pipeline_now = ++numbered;
  std::vector<Obj*> args = {made.program, whole(pipeline_now), whole(pipeline_now), whole(made.x), whole(made.y),
      whole(many), text(made.at_starts),
                            whole(head), text(made.codes), text(made.shifts), result};
  if (in.byte() == 255) dec(args[6]), args[6] = whole(3);  // not bytes
  inc(made.program);
  Obj* capsule = of(method("plan", args));
  for (Obj* one : args) dec(one);
  bool kept = capsule && capsule != &none;
  if (!kept) {
    if (capsule) dec(capsule);
    clear_error();
    dec(made.program);
    return false;
  }
  size_t all = made.head + 4 * made.shifts.size();
  for (char code : made.codes) all += code == 'd' || code == 'q' || code == 'Q' ? 8 : 4;
  REQUIRE(many >= 0 && many <= MOST_BUFFERS && head >= 0 && all <= made.at_starts.size() &&
      made.at_starts.size() <= MOST_BYTES);
  made.capsule = capsule;
  by_pipeline[reinterpret_cast<void*>(pipeline_now)] = made.program;
  plans.push_back(made);
  return true;
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  hand_in();
  Input in(data, size);
  const int64_t at_first = alive;
  trouble = -1, number = in.flag() ? 1 : in.flag() ? PAGE - 3 : uint64_t(PAGE) * PAGES - 4;
  std::vector<Obj*> tensors;
  std::vector<Made> plans;
  attach_now();
  while (!in.ended()) {
    const int kind = int(in.from(0, 11));
    const int odd = in.byte();
    trouble = odd >= 192 ? odd % 16 : -1;
    const size_t before = log_of.size();
    auto some_tensor = [&] { return tensors.empty() ? nullptr : tensors[in.from(0, int64_t(tensors.size()) - 1)]; };
    if (kind == 0) {  // a tensor by C++, or by Python where it is too odd
      const int64_t rank = in.from(0, 3);
      std::vector<Obj*> sizes, strides;
      for (int64_t i = 0; i < rank; i++) sizes.push_back(whole(in.from(0, 4))), strides.push_back(whole(1));
      Obj* nbytes = in.byte() == 255 ? scalar(in) : whole(in.from(0, 5000));
      std::vector<Obj*> args = {sequence(tuple_type, sizes), sequence(list_type, strides), &dtype_b, nbytes};
      inc(&dtype_b);
      Obj* made = of(method("tensor", args));
      for (Obj* one : args) dec(one);
      if (made) tensors.push_back(made);
    } else if (kind == 1 && !tensors.empty()) {
      const size_t at = size_t(in.from(0, int64_t(tensors.size()) - 1));
      dec(tensors[at]);
      tensors.erase(tensors.begin() + at);
    } else if (kind == 2) {
      new_plan(in, plans, -1, 0);
    } else if (kind == 3 && !plans.empty()) {
      const Made& plan = plans[in.from(0, int64_t(plans.size()) - 1)];
      std::vector<uint64_t> addresses;
      std::vector<Obj*> numbers, items;
      for (uint32_t i = 0; i < plan.buffers + (in.byte() == 255); i++) {
        Obj* tensor = some_tensor();
        addresses.push_back(tensor && in.byte() != 255 ? tensor->impl->address : uint64_t(in.word()));
        if (in.byte() % 4 == 3) addresses.back() += in.byte();
        if (in.byte() == 255) addresses.back() |= OFFSET;
        items.push_back(whole((long long)addresses.back()));
      }
      bool fit = true;
      for (char code : plan.codes) {
        numbers.push_back(scalar(in));
        fit = fit && (code == 'f' || code == 'd' || (numbers.back()->type == &int_type && !numbers.back()->large));
      }
      if (in.byte() == 255) numbers.push_back(whole(1));
      std::vector<Obj*> args = {plan.capsule, sequence(in.flag() ? list_type : tuple_type, items)};
      args.insert(args.end(), numbers.begin(), numbers.end());
      Obj* made = of(method("launch", args));
      if (made) {
        REQUIRE(fit);
        check(plan, before, addresses, numbers);
      }
      for (size_t i = 1; i < args.size(); i++) dec(args[i]);
      if (made) dec(made);
    } else if (kind == 4 || kind == 5) {  // an op: the first call teaches it, the second of the same kind is made by C++
      const int which = int(in.from(0, 2));
      std::vector<Obj*> operands, numbers;
      std::vector<uint64_t> addresses;
      for (int64_t n = in.from(which == 0 ? 1 : 0, which == 1 ? 5 : 2); n >= 0; n--) {
        Obj* tensor = some_tensor();
        if (tensor && in.byte() % 4) inc(tensor), addresses.push_back(tensor->impl->address), operands.push_back(tensor);
        else if (in.byte() == 255) inc(&none), operands.push_back(&none);
        else operands.push_back(scalar(in)), numbers.push_back(operands.back());
      }
      if (new_plan(in, plans, int(addresses.size()) + 1, int(numbers.size()))) plans_for_ops = {plans.back().capsule};
      Obj* args = sequence(tuple_type, operands);
      Obj* self = fresh(capsule_type);
      self->pointer = ops[which];
      for (int again = 0; again < 2; again++) {
        const size_t noted = log_of.size();
        if (again) plans_for_ops.clear();
        Obj* made = of(kernel(self, args, nullptr));
        REQUIRE(!made == (pending != nullptr));
        if (made && log_of.size() > noted) {  // by C++
          const Made* plan = nullptr;
          for (const Made& one : plans) if (one.program == log_of.back().program) plan = &one;
          std::vector<uint64_t> all = addresses;
          all.push_back(made->impl->address);
          REQUIRE(plan && (which != 2 || made == operands[0]));
          check(*plan, noted, all, numbers);
        }
        if (made) dec(made);
        clear_error();
      }
      dec(args), dec(self);
    } else if (kind == 6) {
      trouble = -1;
      drained();
      for (auto at = pool.begin(); at != pool.end();) {
        if (!at->second->large || at->second->real || in.flag()) { ++at; continue; }
        plainly("remove", {whole((long long)at->first)});
        dec(at->second);
        at = pool.erase(at);
      }
    } else if (kind == 7 && !pool.empty()) {
      auto at = std::next(pool.begin(), in.from(0, int64_t(pool.size()) - 1));
      at->second->real = double(in.from(0, 1));
      plainly("pin", {whole((long long)at->first), whole((long long)at->second->real)});
    } else if (kind == 8) {
      open_pass = in.flag() ? &open_pass : nullptr, set_now = nullptr;
      plainly("use_pass", {whole(reinterpret_cast<long long>(open_pass))});
      plainly("watch", {whole(in.byte() % 4 == 3)});
      if (in.flag()) plainly("refill", {whole(in.from(0, 3))});
    } else if (kind == 9) {
      const int what = in.byte();
      if (what & 1) plainly("forget_groups", {}), groups_of.clear();
      if (what & 2) plainly("forget_plans", {});
      bind_ends_pass = what & 4, bind_too_large = what & 8, bind_forgets = what & 16;
      acquire_resets = (what & 0xe0) == 0xe0;
    } else if (kind == 10 && in.flag()) {
      close_runtime(in.byte() % 4 != 0);
      if (!runtime.bind && in.flag()) attach_now();
    } else if (kind == 11) {
      trouble = -1;
      if (Obj* made = of(method("reused", {}))) dec(made);
      tensors.push_back(python_tensor(in.from(1, 600), int(in.from(0, 3))));
    }
    clear_error();
    REQUIRE(locked == 0 && !recording);
    if (!runtime.bind && kind == 11) attach_now();
  }
  trouble = -1, bind_ends_pass = bind_too_large = bind_forgets = acquire_resets = false;
  plans_for_ops.clear();
  close_runtime(false);
  int64_t still = 0;  // buffers of a runtime that is gone are kept by tensors alone
  for (Obj* one : tensors) still += one->impl->managed != nullptr;
  for (const Made& plan : plans) dec(plan.capsule), dec(plan.program);
  REQUIRE(alive == at_first + int64_t(tensors.size()) + still);
  for (Obj* one : tensors) dec(one);
  dec(quiet("returned", {}));
  REQUIRE(alive == at_first && !pending);
  log_of.clear(), by_group.clear(), by_pipeline.clear(), groups_of.clear(), numbered = 0;
  return 0;
}
