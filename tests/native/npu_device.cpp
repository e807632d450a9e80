// A PrivateUse1 device with everything a vendor's has except the hardware: an honest fake for the stock CPU wheel.
//
// What is real here: the allocator (a cache over "device" memory with a capacity, and torch's own statistics), the
// out-of-memory error torch raises from C++, the device guard, streams and events, the generators, copies. What is not:
// speed (every operator runs on the CPU through torch's own fallback) and any quirk of a vendor.
//
// Loaded with torch.ops.load_library; the extern "C" functions at the end are the controls, called through ctypes.
// The includes are picked one by one: <torch/extension.h> would treble the time to compile.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/random_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/uniform_ops.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMaxDevices = 8;

std::atomic<int> device_count{2};
std::atomic<bool> initialised{false};  // the "context": set by the first allocation, as a driver's is
thread_local DeviceIndex current_device = 0;

struct Counters {
  std::atomic<int64_t> synchronized_devices{0}, synchronized_streams{0}, emptied_caches{0}, copies{0}, fallbacks{0};
} counters;

void check_ordinal(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count, "invalid device ordinal: ", static_cast<int>(index), ", there are ",
              device_count.load(), " devices");
}

// ---- memory -------------------------------------------------------------------------------------------------------

// As in torch's CUDA allocator (c10/cuda/CUDACachingAllocator.h): blocks are multiples of 512 bytes, segments of 2 MiB.
constexpr size_t kBlock = 512, kSegment = 2 << 20;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Segment {  // one piece of device memory; holds one block at a time
  void* data;
  size_t nbytes, used, requested;
  DeviceIndex device;
};

std::string format_size(size_t n) {
  char text[32];
  if (n < 1024) snprintf(text, sizeof text, "%zu bytes", n);
  else if (n < 1048576) snprintf(text, sizeof text, "%.2f KiB", n / 1024.0);
  else if (n < 1073741824) snprintf(text, sizeof text, "%.2f MiB", n / 1048576.0);
  else snprintf(text, sizeof text, "%.2f GiB", n / 1073741824.0);
  return text;
}

struct NpuAllocator final : c10::DeviceAllocator {
  struct Memory {
    size_t capacity = size_t{1} << 30;
    std::multimap<size_t, Segment*> cached;
    c10::CachingDeviceAllocator::DeviceStats stats;
  };
  std::array<Memory, kMaxDevices> memories;
  std::mutex mutex;

  static c10::CachingAllocator::Stat& sum(c10::CachingAllocator::StatArray& stats) { return stats[0]; }  // AGGREGATE

  c10::DataPtr allocate(size_t requested) override {
    const DeviceIndex index = current_device;
    check_ordinal(index);
    initialised = true;
    const Device device(kType, index);
    if (requested == 0) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> guard(mutex);
    Memory& memory = memories[index];
    const size_t used = round_up(requested, kBlock);
    Segment* segment = take_cached(memory, used);
    if (segment == nullptr) segment = new_segment(memory, index, used, requested);
    segment->used = used;
    segment->requested = requested;
    auto& stats = memory.stats;
    for (auto* count : {&stats.allocation, &stats.active}) sum(*count).increase(1);
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) sum(*bytes).increase(used);
    sum(stats.requested_bytes).increase(requested);
    return {segment->data, segment, &release, device};
  }

  Segment* take_cached(Memory& memory, size_t used) {
    auto found = memory.cached.lower_bound(used);
    if (found == memory.cached.end() || found->first > std::max(2 * used, kSegment)) return nullptr;
    Segment* segment = found->second;
    memory.cached.erase(found);
    return segment;
  }

  Segment* new_segment(Memory& memory, DeviceIndex index, size_t used, size_t requested) {
    const size_t nbytes = round_up(used, kSegment);
    auto& stats = memory.stats;
    auto reserved = [&] { return static_cast<size_t>(sum(stats.reserved_bytes).current); };
    if (reserved() + nbytes > memory.capacity) {
      stats.num_alloc_retries += 1;
      free_cached(memory);
    }
    void* data = nullptr;
    if (reserved() + nbytes > memory.capacity || posix_memalign(&data, kBlock, nbytes) != 0) {
      stats.num_ooms += 1;
      // The words torch_npu raises, with the same exception type: Ascend/pytorch,
      // torch_npu/csrc/core/npu/NPUCachingAllocator.cpp, TORCH_CHECK_WITH(OutOfMemoryError, …).
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", format_size(requested), " (NPU ",
          static_cast<int>(index), "; ", format_size(memory.capacity), " total capacity; ",
          format_size(sum(stats.allocated_bytes).current), " already allocated; ",
          format_size(sum(stats.active_bytes).current), " current active; ",
          format_size(memory.capacity - std::min(memory.capacity, reserved())), " free; ", format_size(reserved()),
          " reserved in total by PyTorch).If reserved memory is >> allocated memory try setting max_split_size_mb to "
          "avoid fragmentation.");
    }
    sum(stats.segment).increase(1);
    sum(stats.reserved_bytes).increase(nbytes);
    stats.num_device_alloc += 1;
    return new Segment{data, nbytes, 0, 0, index};
  }

  void free_cached(Memory& memory) {
    for (auto& [nbytes, segment] : memory.cached) {
      sum(memory.stats.segment).decrease(1);
      sum(memory.stats.reserved_bytes).decrease(nbytes);
      memory.stats.num_device_free += 1;
      free(segment->data);
      delete segment;
    }
    memory.cached.clear();
  }

  static void release(void* context);

  bool initialized() override { return initialised; }
  void emptyCache(c10::MempoolId_t) override {
    counters.emptied_caches += 1;
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& memory : memories) free_cached(memory);
  }
  void recordStream(const c10::DataPtr&, Stream) override {}  // every operator has finished when it returns
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    check_ordinal(index);
    std::lock_guard<std::mutex> guard(mutex);
    return memories[index].stats;
  }
  template <typename Reset>
  void reset(DeviceIndex index, Reset reset_one) {
    check_ordinal(index);
    std::lock_guard<std::mutex> guard(mutex);
    auto& s = memories[index].stats;
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes,
                        &s.requested_bytes})
      reset_one(sum(*stats));
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    reset(index, [](auto& stat) { stat.reset_accumulated(); });
    auto& s = memories[index].stats;
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex index) override {
    reset(index, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    check_ordinal(index);
    std::lock_guard<std::mutex> guard(mutex);
    auto& memory = memories[index];
    const size_t reserved = sum(memory.stats.reserved_bytes).current;
    return {memory.capacity - std::min(memory.capacity, reserved), memory.capacity};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

// Never destroyed: tensors may outlive static destructors at exit.
NpuAllocator& allocator = *new NpuAllocator;
C10_UNUSED const bool allocator_set = (c10::SetAllocator(kType, &allocator), true);

void NpuAllocator::release(void* context) {
  if (context == nullptr) return;
  auto* segment = static_cast<Segment*>(context);
  std::lock_guard<std::mutex> guard(allocator.mutex);
  auto& memory = allocator.memories[segment->device];
  auto& stats = memory.stats;
  for (auto* count : {&stats.allocation, &stats.active}) sum(*count).decrease(1);
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) sum(*bytes).decrease(segment->used);
  sum(stats.requested_bytes).decrease(segment->requested);
  memory.cached.emplace(segment->nbytes, segment);
}

// Host memory that the device "can reach": torch only asks whether a pointer is one of ours.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::set<const void*> live;
  c10::DataPtr allocate(size_t n) override;
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
PinnedAllocator& pinned = *new PinnedAllocator;

c10::DataPtr PinnedAllocator::allocate(size_t n) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(n, 1)) == 0, "cannot pin ", n, " bytes");
  std::lock_guard<std::mutex> guard(mutex);
  live.insert(data);
  auto unpin = [](void* pointer) {
    std::lock_guard<std::mutex> unpin_guard(pinned.mutex);
    pinned.live.erase(pointer);
    free(pointer);
  };
  return {data, data, unpin, c10::DeviceType::CPU};
}

// ---- device, streams, events --------------------------------------------------------------------------------------

struct Event {
  std::chrono::steady_clock::time_point at;
};

thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
std::atomic<c10::StreamId> last_stream{0};

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    check_ordinal(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count.load()); }

  Stream getStream(Device device) const override {
    const DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kType, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, device, ++last_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { counters.synchronized_streams += 1; }
  void synchronizeDevice(DeviceIndex index) const override {
    check_ordinal(index);
    counters.synchronized_devices += 1;
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.capability_bits = 0;
    auto& has = capability.capability_data.supported_scalar_types;
    has.has_Float = has.has_Half = has.has_BFloat16 = has.has_Int = has.has_Long = has.has_Bool = has.has_Byte = 1;
    return capability;
  }

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    const auto passed = static_cast<Event*>(to)->at - static_cast<Event*>(from)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard)

// ---- random numbers: one generator per device, each with a state of its own ---------------------------------------

struct NpuGenerator final : c10::GeneratorImpl {
  at::Generator host;  // does the work; torch's CPU kernels accept only a CPU generator
  explicit NpuGenerator(DeviceIndex index, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device_.index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kMaxDevices; ++i) made.push_back(at::make_generator<NpuGenerator>(i));
    return made;
  }());
  if (index < 0) index = current_device;
  check_ordinal(index);
  return generators[index];
}

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return initialised; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count.load()); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override {
    check_ordinal(index);
    current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = current_device;
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<NpuGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned.mutex);
    return pinned.live.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(nbytes);
    if (storage.data() != nullptr) std::memcpy(data.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};
C10_UNUSED const bool hooks_set = (at::RegisterPrivateUse1HooksInterface(new NpuHooks), true);

// ---- operators ----------------------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard guard_for(std::optional<at::Device> device) {
  const auto wanted = device.value_or(at::Device(kType, current_device));
  return c10::DeviceGuard(wanted.has_index() ? wanted : at::Device(kType, current_device));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_for(device);
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto guard = guard_for(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory seen as a CPU tensor: what a vendor's copy engine would do is done by the CPU's copy kernel.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  counters.copies += 1;
  auto target = host_view(to);
  target.copy_(host_view(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const c10::DeviceGuard guard(to.device());  // torch's resize allocates on the current device
  if (!to.sizes().equals(from.sizes())) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Generator host_generator(const at::Tensor& self, const std::optional<at::Generator>& generator) {
  const at::Generator& used = generator.has_value() ? *generator : default_generator(self.device().index());
  TORCH_CHECK(used.device().type() == kType, "Expected a '", kType, "' device type for generator but found '",
              used.device(), "'");
  return static_cast<NpuGenerator*>(used.unsafeGetGeneratorImpl())->host;
}

using Seed = std::optional<at::Generator>;
at::Tensor& normal_(at::Tensor& self, double mean, double std, Seed generator) {
  auto target = host_view(self);
  at::_ops::normal_::call(target, mean, std, host_generator(self, generator));
  return self;
}
at::Tensor& uniform_(at::Tensor& self, double from, double to, Seed generator) {
  auto target = host_view(self);
  at::_ops::uniform_::call(target, from, to, host_generator(self, generator));
  return self;
}
at::Tensor& bernoulli_(at::Tensor& self, double p, Seed generator) {
  auto target = host_view(self);
  at::_ops::bernoulli__float::call(target, p, host_generator(self, generator));
  return self;
}
at::Tensor& random_from_(at::Tensor& self, int64_t from, std::optional<int64_t> to, Seed generator) {
  auto target = host_view(self);
  at::_ops::random__from::call(target, from, to, host_generator(self, generator));
  return self;
}
at::Tensor& random_to_(at::Tensor& self, int64_t to, Seed generator) {
  return random_from_(self, 0, to, std::move(generator));
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  counters.fallbacks += 1;
  at::native::cpu_fallback(op, stack);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
at::Tensor& set_storage_(at::Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }
at::Tensor& set_storage_offset_(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                                at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("normal_", TORCH_FN(normal_));
  m.impl("uniform_", TORCH_FN(uniform_));
  m.impl("bernoulli_.float", TORCH_FN(bernoulli_));
  m.impl("random_.from", TORCH_FN(random_from_));
  m.impl("random_.to", TORCH_FN(random_to_));
  // Without this torch decomposes it to mse_loss.out with an output of no size, and warns on resizing that output.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

at::Generator generator_of(int64_t index) { return default_generator(static_cast<DeviceIndex>(index)); }

TORCH_LIBRARY(anytorch_test_device, m) { m.def("default_generator(int index) -> Generator?", TORCH_FN(generator_of)); }

}  // namespace

// ---- the controls, for ctypes: none of them may throw -------------------------------------------------------------

extern "C" {
int npu_set_device_count(int count) {
  if (count < 0 || count > kMaxDevices) return 1;
  device_count = count;
  return 0;
}
int npu_set_capacity(int index, uint64_t nbytes) {
  if (index < 0 || index >= kMaxDevices) return 1;
  std::lock_guard<std::mutex> guard(allocator.mutex);
  allocator.memories[index].capacity = nbytes;
  return 0;
}
int npu_is_initialized() { return initialised; }
int64_t npu_counter(const char* name) {
  const std::map<std::string, std::atomic<int64_t>*> all{{"synchronized_devices", &counters.synchronized_devices},
                                                         {"synchronized_streams", &counters.synchronized_streams},
                                                         {"emptied_caches", &counters.emptied_caches},
                                                         {"copies", &counters.copies},
                                                         {"fallbacks", &counters.fallbacks}};
  const auto found = all.find(name);
  return found == all.end() ? -1 : found->second->load();
}
}
