// The Vulkan layer between any request of wgpu's and any driver: what the driver is asked, what is reported of it, which
// modules
// and pipelines are replaced, all as a plain reference has it; and wgpu's own structures are as before.
//
// The driver is a fake of the dozen functions that the layer calls. It keeps Vulkan's rules for counts and chains, as
// drivers do:
// what a broken driver writes beyond its room is not looked for. Left out: the real loader, and threads.
#include "gpu/code/vulkan_layer.cpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "fuzz.h"

namespace {
const char* const NAMES[] = {"VK_KHR_cooperative_matrix", "VK_NV_cooperative_matrix2", "VK_KHR_shader_bfloat16",
    "VK_KHR_swapchain", ""};

struct Handle {  // as the loader makes them: its table is first, and alike for all handles of one owner
  void* table;
};
struct Driver {
  std::vector<std::string> extensions;
  int32_t first_answer, second_answer;  // of the list of extensions
  uint32_t model[3], sizes[2], matrix[2], second[7], brain[3], smallest, largest, stages;
  uint32_t shapes, flexible;
  bool lists, asks_features, asks_properties, has_shapes, has_flexible, refuses, fails;
} driver;
Link lower;             // what is below the layer, as the loader links it
LoaderInfo* loader;     // of the request under way
std::vector<std::string> asked_names;
bool expect_on;
int made_devices, made_instances, creations;
ModuleInfo seen_module;
uint64_t next_module;
int32_t module_answer;
PipelineInfo seen_pipeline;
uint32_t seen_count;
const PipelineInfo* seen_infos;

// Does the driver, as it answers, list an extension?
bool listed(const char* name) {
  if (!driver.lists || driver.first_answer != SUCCESS || driver.second_answer < 0) return false;
  const size_t count = driver.extensions.size() - (driver.second_answer == INCOMPLETE && !driver.extensions.empty());
  for (size_t i = 0; i < count; i++)
    if (driver.extensions[i] == name) return true;
  return false;
}
int32_t fake_extensions(void*, const char*, uint32_t* count, Extension* out) {
  const uint32_t all = uint32_t(driver.extensions.size());
  if (!out) { *count = all; return driver.first_answer; }
  if (driver.second_answer == INCOMPLETE && *count) --*count;
  *count = *count < all ? *count : all;
  for (uint32_t i = 0; i < *count; i++) strcpy(out[i].name, driver.extensions[i].c_str());
  return driver.second_answer;
}
template <class Structure> void answer(void* one, const uint32_t* from) {
    memcpy(static_cast<Structure*>(one)->on, from, sizeof(Structure::on)); }
void fake_features(void*, void* head) {
  for (auto one = static_cast<Header*>(head); one; one = one->next) {
    if (one->type == MEMORY_MODEL_FEATURES) answer<MemoryModelFeatures>(one, driver.model);
    if (one->type == SUBGROUP_SIZE_FEATURES) answer<SubgroupSizeFeatures>(one, driver.sizes);
    if (one->type == MATRIX_FEATURES) answer<MatrixFeatures>(one, driver.matrix);
    if (one->type == MATRIX_2_FEATURES) answer<Matrix2Features>(one, driver.second);
    if (one->type == BFLOAT16_FEATURES) answer<Bfloat16Features>(one, driver.brain);
    if (one->type == FEATURES_2) memset(static_cast<void*>(reinterpret_cast<Features2*>(one)->on), 1, 55 * 4);
  }
}
void fake_properties(void*, void* head) {
  for (auto one = static_cast<Header*>(head); one; one = one->next) {
    if (one->type == PROPERTIES_2) memset(reinterpret_cast<Properties2*>(one)->properties, 7, 824);
    if (one->type != SUBGROUP_SIZE_PROPERTIES) continue;
    auto limits = reinterpret_cast<SubgroupSizeProperties*>(one);
    limits->smallest = driver.smallest, limits->largest = driver.largest, limits->most_subgroups = 64,
        limits->stages = driver.stages;
  }
}
template <class Properties, int WORDS, uint32_t Driver::*ALL,
    uint32_t TYPE> int32_t fake_list(void*, uint32_t* count, void* out) {
  const uint32_t all = driver.*ALL, room = *count;
  if (!out) { *count = all; return SUCCESS; }
  *count = room < all ? room : all;
  for (uint32_t i = 0; i < *count; i++) {
    Properties& one = static_cast<Properties*>(out)[i];
    REQUIRE(one.type == TYPE && !one.next);
    for (int w = 0; w < WORDS; w++) (&one.m)[w] = 100 * i + uint32_t(w);
  }
  return room < all ? INCOMPLETE : SUCCESS;
}

// What a device is asked for must be a valid request, of what the driver has; `expect_on`: with matrices.
int32_t fake_create_device(void*, const DeviceInfo* info, const void*, void** device) {
  creations++;
  REQUIRE(loader->link == &lower);  // advanced by one, at a second attempt as well
  loader->link = nullptr;           // as a layer below would
  std::map<uint32_t, Header*> chain;
  for (Header* one = info->next; one; one = one->next) {
    if (one->type == LOADER_DEVICE) continue;  // these may come twice
    REQUIRE(chain.emplace(one->type, one).second);
  }
  REQUIRE(!(chain.count(VULKAN_1_2_FEATURES) && chain.count(MEMORY_MODEL_FEATURES)));
  REQUIRE(!(chain.count(VULKAN_1_3_FEATURES) && chain.count(SUBGROUP_SIZE_FEATURES)));
  std::set<std::string> names;
  for (uint32_t i = 0; i < info->extension_count; i++) {
    if (i < asked_names.size()) REQUIRE(asked_names[i] == info->extensions[i]);
    REQUIRE(names.insert(info->extensions[i]).second);
  }
  REQUIRE(info->extension_count >= asked_names.size());
  const bool first_try = expect_on && creations == 1;
  if (!first_try) REQUIRE(info->extension_count == asked_names.size());
  if (first_try) {
    auto holds = [&](uint32_t type, const uint32_t* wanted, int count) {
      auto found = reinterpret_cast<Features<1>*>(chain.at(type));
      for (int i = 0; i < count; i++) REQUIRE(!wanted[i] || found->on[i]);
    };
    const uint32_t model[3] = {1, 0, 0}, sizes[2] = {1, 1}, matrix[2] = {1, 0};
    REQUIRE(names.count(NAMES[0]) && names.count(NAMES[1]) >= listed(NAMES[1]) &&
        names.count(NAMES[2]) >= listed(NAMES[2]));
    uint32_t in_12[42] = {};
    in_12[41] = 1;  // vulkanMemoryModel
    const uint32_t in_13[9] = {0, 0, 0, 0, 0, 0, 0, 1, 1};
    if (chain.count(VULKAN_1_2_FEATURES)) holds(VULKAN_1_2_FEATURES, in_12, 42);
    else holds(MEMORY_MODEL_FEATURES, model, 3);
    if (driver.sizes[0] && driver.sizes[1] && driver.stages & 0x20) {
      if (chain.count(VULKAN_1_3_FEATURES)) holds(VULKAN_1_3_FEATURES, in_13, 9);
      else holds(SUBGROUP_SIZE_FEATURES, sizes, 2);
    }
    holds(MATRIX_FEATURES, matrix, 2);
    if (listed(NAMES[1])) holds(MATRIX_2_FEATURES, driver.second, 7);
    if (listed(NAMES[2])) holds(BFLOAT16_FEATURES, driver.brain, 3);
    if (driver.refuses) return -8;
  }
  if (driver.fails) return -4;
  auto made = new Handle{};
  made->table = made;  // one of its own
  *device = made, made_devices++;
  return SUCCESS;
}
int32_t fake_create_instance(const void*, const void*, void** instance) {
  REQUIRE(loader->link == &lower);
  auto made = new Handle{};
  made->table = made;
  *instance = made, made_instances++;
  return SUCCESS;
}
void fake_destroy_device(void* device, const void*) { delete static_cast<Handle*>(device), made_devices--; }
void fake_destroy_instance(void* instance, const void*) { delete static_cast<Handle*>(instance), made_instances--; }
int32_t fake_create_module(void*, const ModuleInfo* info, const void*, uint64_t* module) {
  seen_module = *info;
  if (module_answer == SUCCESS) *module = next_module;
  return module_answer;
}
int32_t fake_create_pipelines(void*, uint64_t, uint32_t count, const PipelineInfo* infos, const void*, uint64_t*) {
  seen_count = count, seen_infos = infos, seen_pipeline = *infos;
  const auto extra = static_cast<const RequiredSubgroupSize*>(infos->stage.next);
  if (extra) REQUIRE(extra->type == REQUIRED_SUBGROUP_SIZE && !extra->next);
  seen_pipeline.base = extra ? extra->size : 0;
  return SUCCESS;
}
void other_function() {}
template <class F> Function as(F* function) { return reinterpret_cast<Function>(function); }

Function fake_proc(void*, const char* name) {
  const std::string asked = name;
  if (asked == "vkCreateInstance") return as(fake_create_instance);
  if (asked == "vkCreateDevice") return as(fake_create_device);
  if (asked == "vkDestroyInstance") return as(fake_destroy_instance);
  if (asked == "vkDestroyDevice") return as(fake_destroy_device);
  if (asked == "vkCreateShaderModule") return as(fake_create_module);
  if (asked == "vkCreateComputePipelines") return as(fake_create_pipelines);
  if (asked == "vkEnumerateDeviceExtensionProperties") return driver.lists ? as(fake_extensions) : nullptr;
  if (asked == "vkGetPhysicalDeviceFeatures2") return driver.asks_features ? as(fake_features) : nullptr;
  if (asked == "vkGetPhysicalDeviceProperties2") return driver.asks_properties ? as(fake_properties) : nullptr;
  if (asked == "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR")
    return driver.has_shapes ? as(fake_list<MatrixProperties, 9, &Driver::shapes, MATRIX_PROPERTIES>) : nullptr;
  if (asked == "vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV")
    return driver.has_flexible ? as(fake_list<FlexibleProperties, 10, &Driver::flexible, FLEXIBLE_PROPERTIES>) : nullptr;
  return asked == "vkQueueSubmit" ? as(other_function) : nullptr;
}

void read_driver(Input& in) {
  driver = Driver{};
  for (const char* name : NAMES) if (in.byte() % 4) driver.extensions.push_back(name);
  const int odd = in.byte();
  driver.first_answer = odd == 255 ? -1 : SUCCESS,
      driver.second_answer = odd == 254 ? -1 : odd == 253 ? INCOMPLETE : SUCCESS;
  auto bits = [&](uint32_t* to, int count) { for (int i = 0; i < count; i++) to[i] = in.byte() % 4 != 0; };
  bits(driver.model, 3), bits(driver.sizes, 2), bits(driver.matrix, 2), bits(driver.second, 7), bits(driver.brain, 3);
  driver.smallest = 1u << in.from(0, 6), driver.largest = 1u << in.from(0, 7),
      driver.stages = in.byte() % 4 ? 0x20 : in.byte();
  driver.shapes = uint32_t(in.from(0, 200)), driver.flexible = uint32_t(in.from(0, 200));
  const int missing = in.byte();
  driver.lists = missing != 255, driver.asks_features = missing != 254, driver.asks_properties = missing != 253;
  driver.has_shapes = missing != 252, driver.has_flexible = missing != 251, driver.refuses = in.byte() % 8 == 7,
      driver.fails = in.byte() % 16 == 15;
}

// The report that this driver should get.
Report expected_report() {
  Report wanted{};
  const bool second = listed(NAMES[1]), bfloat16 = listed(NAMES[2]);
  wanted.state = -1;
  if (!listed(NAMES[0]) || !driver.asks_features || !driver.asks_properties) return wanted;
  wanted.subgroup_smallest = driver.smallest, wanted.subgroup_largest = driver.largest;
  wanted.state = -2;
  if (!driver.matrix[0] || !driver.model[0]) return wanted;
  wanted.state = -3;
  if (driver.refuses || driver.fails) return wanted;
  wanted.state = 1;
  wanted.subgroup_can_be_required = driver.sizes[0] && driver.sizes[1] && driver.stages & 0x20;
  wanted.bfloat16 = bfloat16 && driver.brain[0] && driver.brain[2];
  if (second) memcpy(wanted.second, driver.second, sizeof wanted.second);
  auto fill_list = [](auto& to, uint32_t& count, uint32_t all) {
    count = all < MOST_SHAPES ? all : MOST_SHAPES;
    for (uint32_t i = 0; i < count; i++)
      for (uint32_t w = 0; w < sizeof to[0] / 4; w++) to[i][w] = 100 * i + w;
  };
  if (driver.has_shapes) fill_list(wanted.shapes, wanted.shape_count, driver.shapes);
  if (second && driver.second[1] && driver.has_flexible) fill_list(wanted.flexible, wanted.flexible_count, driver.flexible);
  return wanted;
}

struct Chain {  // wgpu's own, each structure of exactly its size, with the loader's among them
  std::vector<Exact<uint8_t>> held;
  std::vector<std::vector<uint8_t>> before;
  Header* head = nullptr;
  LoaderInfo info{LOADER_DEVICE, nullptr, 0, nullptr}, callback{LOADER_DEVICE, nullptr, 1, nullptr};
  Link top{&lower, fake_proc, fake_proc};
  void add(uint32_t type, size_t words, Input& in) {
    held.emplace_back(16 + 4 * words + 4 * (words % 2));
    auto one = reinterpret_cast<Features<1>*>(held.back().data());
    one->type = type;
    for (size_t i = 0; i < words; i++) one->on[i] = in.flag();
    link(reinterpret_cast<Header*>(one));
  }
  void link(Header* one) { one->next = head, head = one; }
  void note() { for (auto& one : held) before.emplace_back(one.data(), one.data() + one.size()); }
  bool unchanged() { for (size_t i = 0; i < held.size();
      i++) if (memcmp(held[i].data(), before[i].data(), held[i].size())) return false; return true; }
};
void read_chain(Chain& chain, Input& in, uint32_t loader_type) {
  chain.info.type = chain.callback.type = loader_type, chain.info.link = &chain.top;
  const int kinds = in.byte();
  if (kinds & 1) chain.add(VULKAN_1_2_FEATURES, 47, in);
  else if (kinds & 2) chain.add(MEMORY_MODEL_FEATURES, 3, in);
  if (kinds & 4) chain.link(reinterpret_cast<Header*>(&chain.callback));
  if (kinds & 8) chain.add(VULKAN_1_3_FEATURES, 15, in);
  else if (kinds & 16) chain.add(SUBGROUP_SIZE_FEATURES, 2, in);
  chain.link(reinterpret_cast<Header*>(&chain.info));
  if (kinds & 32) chain.add(MATRIX_FEATURES, 2, in);
  if (kinds & 64) chain.add(in.flag() ? MATRIX_2_FEATURES : FEATURES_2, 55, in);
  if (kinds & 128) chain.add(in.flag() ? BFLOAT16_FEATURES : 12345, 3, in);
  chain.note();
}

struct Made { void* device; bool ours; };
struct Registered { Exact<uint32_t>* code; uint32_t mark[2], subgroup; };
Negotiation table{};
template <class F> F call(void* handle, const char* name) {
    return reinterpret_cast<F>((handle ? table.device_proc : table.instance_proc)(handle, name)); }

void* new_instance(Input& in) {
  Chain chain;
  read_chain(chain, in, LOADER_INSTANCE);
  DeviceInfo info{1, chain.head};
  loader = &chain.info;
  void* made = nullptr;
  const int before = made_instances;
  const int32_t answer = call<CreateInstance>(nullptr, "vkCreateInstance")(&info, nullptr, &made);
  REQUIRE(chain.unchanged() && (before < MOST_INSTANCES ? answer == SUCCESS : answer == TOO_MANY_OBJECTS));
  REQUIRE(made_instances == before + (answer == SUCCESS));
  return answer == SUCCESS ? made : nullptr;
}

bool new_device(Input& in, void* instance, Made& made) {
  read_driver(in);
  Chain chain;
  read_chain(chain, in, LOADER_DEVICE);
  asked_names.clear();
  for (const char* name : NAMES) if (*name && in.byte() % 3 == 0) asked_names.push_back(name);
  Exact<const char*> names(asked_names.size());
  for (size_t i = 0; i < names.size(); i++) names[i] = asked_names[i].c_str();
  const bool arm = in.byte() % 4 != 0;
  REQUIRE(layer_arm(arm) == made_instances);
  const Report wanted = arm ? expected_report() : *layer_report();
  expect_on = arm && (wanted.state == 1 || wanted.state == -3), creations = 0, loader = &chain.info;
  DeviceInfo info{3, chain.head, 0, 0, nullptr, 0, nullptr, uint32_t(names.size()),
      names.size() ? names.data() : nullptr, nullptr};
  Handle physical{static_cast<Handle*>(instance)->table};
  void* device = nullptr;
  const int before = made_devices;
  const int32_t answer = call<CreateDevice>(nullptr, "vkCreateDevice")(&physical, &info, nullptr, &device);
  layer_arm(0);
  REQUIRE(chain.unchanged() && info.next == chain.head);
  REQUIRE(answer == (driver.fails ? -4 : before < MOST_DEVICES ? SUCCESS : TOO_MANY_OBJECTS));
  REQUIRE(made_devices == before + (answer == SUCCESS) && creations == 1 + (wanted.state == -3 && arm));
  REQUIRE(memcmp(&wanted, layer_report(), sizeof wanted) == 0);
  made = {device, arm && wanted.state == 1};
  return answer == SUCCESS;
}

// Instructions, some of them constants of 32 bits that matter; now and then a length that leads beyond the end, or nowhere.
std::vector<uint32_t> read_code(Input& in, const uint32_t (*marks)[2]) {
  std::vector<uint32_t> code(in.byte() % 8 == 7 ? size_t(in.from(0, 5)) : 5, 0x07230203);
  for (int64_t n = in.from(0, 12); n > 0; n--) {
    const int kind = in.byte() % 16;
    const uint32_t* mark = marks[in.from(0, 3)];
    if (kind < 12) code.insert(code.end(), {4u << 16 | 43, 6, 7, kind < 5 ? MAGIC : mark[kind % 2]});
    else if (kind == 12) code.insert(code.end(), {3u << 16 | 43, 6, MAGIC});
    else if (kind == 13) code.push_back(uint32_t(in.word()));
    else if (kind == 14) code.insert(code.end(), {5u << 16 | 44, 1, 2, mark[0], mark[1]});
    else code.push_back(uint32_t(in.from(0, 3)));  // no length: nothing can follow
  }
  return code;
}
const Registered* expected_kernel(const std::vector<uint32_t>& code, size_t nbytes, const Registered* all) {
  std::set<uint32_t> constants;
  const size_t count = nbytes / 4;
  for (size_t at = 5; at + 4 <= count;) {
    const uint32_t length = code[at] >> 16;
    if (!length) break;
    if (length == 4 && (code[at] & 0xffff) == 43) constants.insert(code[at + 3]);
    at += length;
  }
  if (!constants.count(MAGIC)) return nullptr;
  for (int i = 0; i < MOST_KERNELS; i++)
    if (all[i].code && constants.count(all[i].mark[0]) && constants.count(all[i].mark[1])) return all + i;
  return nullptr;
}
}  // namespace

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  memset(static_cast<void*>(modules), 0, sizeof modules), module_count = replaced = 0, report = Report();
  table.version = uint32_t(in.from(0, 3));
  const bool old = table.version < 2;
  REQUIRE(vkNegotiateLoaderLayerInterfaceVersion(&table) == (old ? INITIALIZATION_FAILED : SUCCESS));
  if (old) return 0;
  std::vector<void*> all_instances;
  std::vector<Made> all;
  Registered registered[MOST_KERNELS] = {};
  const uint32_t marks[4][2] = {{11, 12}, {21, 22}, {12, 21}, {31, 31}};
  std::vector<std::unique_ptr<Exact<uint32_t>>> codes;
  std::map<std::pair<void*, uint64_t>, uint32_t> sizes;  // of modules that need one
  uint32_t count_replaced = 0;
  for (int64_t n = in.byte() == 255 ? 40 : in.from(1, 2); n > 0; n--)
    if (void* made = new_instance(in)) all_instances.push_back(made);
  REQUIRE(table.instance_proc(all_instances[0], "vkQueueSubmit") == other_function &&
      !table.instance_proc(nullptr, "vkQueueSubmit"));
  while (!in.ended()) {
    const int kind = int(in.from(0, 6));
    const auto device = all.empty() ? nullptr : &all[in.from(0, int64_t(all.size()) - 1)];
    if (kind == 0) {
      for (int64_t n = in.byte() == 255 ? 70 : 1; n > 0; n--) {
        Made made;
        if (new_device(in, all_instances[0], made)) all.push_back(made);
      }
    } else if (kind == 1) {
      const uint32_t* mark = marks[in.from(0, 3)];
      const uint32_t subgroup = in.flag() ? 1u << in.from(0, 6) : 0;
      codes.push_back(std::make_unique<Exact<uint32_t>>(size_t(in.from(1, 9))));
      const int32_t answer = layer_register(mark[0], mark[1], codes.back()->data(), codes.back()->size() * 4, subgroup);
      int slot = 0;
      while (slot < MOST_KERNELS && registered[slot].code) slot++;
      REQUIRE(answer == (slot < MOST_KERNELS));
      if (answer) registered[slot] = {codes.back().get(), {mark[0], mark[1]}, subgroup};
    } else if (kind == 2 && !codes.empty()) {
      auto& gone = codes[in.from(0, int64_t(codes.size()) - 1)];
      if (!gone) continue;
      REQUIRE(layer_forget(gone->data()) == count_replaced);
      for (auto& one : registered) if (one.code == gone.get()) one = {};
      gone.reset();  // whoever forgets it frees it
    } else if (kind <= 4 && device) {
      auto made = read_code(in, marks);
      Exact<uint32_t> exact(made.size());
      std::copy(made.begin(), made.end(), exact.data());
      const size_t nbytes = made.size() * 4 - (in.byte() == 255 && !made.empty() ? 2 : 0);
      ModuleInfo info{16, nullptr, 0, nbytes, exact.data()};
      next_module = uint64_t(in.from(1, 6)), module_answer = in.byte() == 255 ? -2 : SUCCESS;  // handles come again
      uint64_t module = 0;
      REQUIRE(call<CreateModule>(device->device, "vkCreateShaderModule")(device->device, &info, nullptr,
          &module) == module_answer);
      const Registered* kernel = device->ours ? expected_kernel(made, nbytes, registered) : nullptr;
      REQUIRE(seen_module.code == (kernel ? kernel->code->data() : exact.data()));
      REQUIRE(seen_module.nbytes == (kernel ? kernel->code->size() * 4 : nbytes));
      if (module_answer != SUCCESS) continue;
      REQUIRE(module == next_module);
      count_replaced += kernel != nullptr;
      sizes[{device->device, module}] = kernel ? kernel->subgroup : 0;
    } else if (kind == 5 && device) {
      const uint32_t count = in.byte() % 4 == 3 ? 2 : 1;
      PipelineInfo infos[2] = {};
      infos[0].stage.module = uint64_t(in.from(1, 6)), infos[0].stage.flags = uint32_t(in.from(0, 3));
      uint64_t made[2];
      REQUIRE(call<CreatePipelines>(device->device, "vkCreateComputePipelines")(device->device, 0, count, infos,
          nullptr, made) == SUCCESS);
      const auto found = sizes.find({device->device, infos[0].stage.module});
      const uint32_t wanted = found == sizes.end() || count > 1 ? 0 : found->second;
      REQUIRE(seen_count == count && seen_pipeline.base == wanted && (wanted || seen_infos == infos));
      REQUIRE(seen_pipeline.stage.flags == (infos[0].stage.flags | (wanted ? 2 : 0)) && !infos[0].stage.next);
    } else if (kind == 6 && device && in.flag()) {
      for (auto at = sizes.begin();
          at != sizes.end();) at = at->first.first == device->device ? sizes.erase(at) : std::next(at);
      call<Destroy>(device->device, "vkDestroyDevice")(device->device, nullptr);
      all.erase(all.begin() + (device - all.data()));
    }
  }
  REQUIRE(layer_forget(nullptr) == count_replaced);
  for (auto& one : codes) if (one) layer_forget(one->data());
  for (auto& one : all) call<Destroy>(one.device, "vkDestroyDevice")(one.device, nullptr);
  for (void* instance : all_instances) call<Destroy>(nullptr, "vkDestroyInstance")(instance, nullptr);
  REQUIRE(made_devices == 0 && made_instances == 0 && layer_arm(0) == 0);
  return 0;
}
