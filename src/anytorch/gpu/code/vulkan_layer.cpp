// A Vulkan layer that lets stock wgpu use a GPU's matrix cores. The loader puts it between wgpu and the driver (gpu/layer.py sets
// the variables that ask for it). It does two things, both only when Python asks, and hands every other call on:
//
//   vkCreateDevice         while armed: adds the cooperative-matrix extensions and features that the driver has, and notes the
//                          matrix shapes that the driver lists. A driver that refuses them gets wgpu's own request.
//   vkCreateShaderModule   a module that holds the mark of a registered kernel is replaced by that kernel's SPIR-V.
//
// Vulkan's structures are declared here as far as they are used: no header of Vulkan's is needed to compile this file, and
// nothing of the C++ library to link it. Numbers are those of the Vulkan registry.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

typedef void (*Function)(void);
typedef Function (*GetProc)(void *handle, const char *name);

enum : int32_t { SUCCESS = 0, INCOMPLETE = 5, INITIALIZATION_FAILED = -3, TOO_MANY_OBJECTS = -10 };
enum : uint32_t {
    LOADER_INSTANCE = 47,
    LOADER_DEVICE = 48,
    VULKAN_1_2_FEATURES = 51,
    VULKAN_1_3_FEATURES = 53,
    FEATURES_2 = 1000059000,
    PROPERTIES_2 = 1000059001,
    BFLOAT16_FEATURES = 1000141000,
    MEMORY_MODEL_FEATURES = 1000211000,
    SUBGROUP_SIZE_PROPERTIES = 1000225000,
    REQUIRED_SUBGROUP_SIZE = 1000225001,
    SUBGROUP_SIZE_FEATURES = 1000225002,
    MATRIX_FEATURES = 1000506000,
    MATRIX_PROPERTIES = 1000506001,
    MATRIX_2_FEATURES = 1000593000,
    FLEXIBLE_PROPERTIES = 1000593001,
};

struct Header {
    uint32_t type;
    Header *next;
};

template <int COUNT> struct Features {
    uint32_t type;
    void *next;
    uint32_t on[COUNT];
};
typedef Features<3> MemoryModelFeatures;      // vulkanMemoryModel first
typedef Features<2> SubgroupSizeFeatures;     // subgroupSizeControl, computeFullSubgroups
typedef Features<2> MatrixFeatures;           // cooperativeMatrix, robust access
typedef Features<7> Matrix2Features;          // as in Report
typedef Features<3> Bfloat16Features;         // type, dot product, cooperative matrix
typedef Features<15> Vulkan13Features;        // the eighth and ninth are those of SubgroupSizeFeatures
typedef Features<47> Vulkan12Features;        // the 42nd is vulkanMemoryModel
const int MEMORY_MODEL_IN_12 = 41, SUBGROUP_SIZE_IN_13 = 7;

struct Features2 {
    uint32_t type;
    void *next;
    uint32_t on[55];
};

struct SubgroupSizeProperties {
    uint32_t type;
    void *next;
    uint32_t smallest, largest, most_subgroups, stages;
};

struct Properties2 {  // VkPhysicalDeviceProperties is 824 bytes long on every 64-bit system; it is not looked at
    uint32_t type;
    void *next;
    uint64_t properties[128];
};

struct MatrixProperties {
    uint32_t type;
    void *next;
    uint32_t m, n, k, a, b, c, result, saturating, scope;
};

struct FlexibleProperties {
    uint32_t type;
    void *next;
    uint32_t m, n, k, a, b, c, result, saturating, scope, invocations;
};

struct Extension {
    char name[256];
    uint32_t version;
};

struct DeviceInfo {
    uint32_t type;
    Header *next;
    uint32_t flags, queue_count;
    const void *queues;
    uint32_t layer_count;
    const char *const *layers;
    uint32_t extension_count;
    const char *const *extensions;
    const void *features;
};

struct ModuleInfo {
    uint32_t type;
    const void *next;
    uint32_t flags;
    size_t nbytes;
    const uint32_t *code;
};

struct StageInfo {
    uint32_t type;
    const void *next;
    uint32_t flags, stage;
    uint64_t module;
    const char *name;
    const void *specialization;
};

struct PipelineInfo {
    uint32_t type;
    const void *next;
    uint32_t flags;
    StageInfo stage;
    uint64_t layout, base;
    int32_t base_index;
};

struct RequiredSubgroupSize {
    uint32_t type;
    const void *next;
    uint32_t size;
};

struct Link {
    Link *next;
    GetProc instance_proc;
    GetProc other;  // of a device: its vkGetDeviceProcAddr
};

struct LoaderInfo {
    uint32_t type;
    Header *next;
    uint32_t function;  // 0: the link
    Link *link;
};

struct Negotiation {
    uint32_t type;
    void *next;
    uint32_t version;
    GetProc instance_proc, device_proc, physical_proc;
};

typedef int32_t (*CreateInstance)(const void *, const void *, void **);
typedef int32_t (*CreateDevice)(void *, const DeviceInfo *, const void *, void **);
typedef int32_t (*CreateModule)(void *, const ModuleInfo *, const void *, uint64_t *);
typedef int32_t (*CreatePipelines)(void *, uint64_t, uint32_t, const PipelineInfo *, const void *, uint64_t *);
typedef void (*Destroy)(void *, const void *);
typedef int32_t (*EnumerateExtensions)(void *, const char *, uint32_t *, Extension *);
typedef void (*Ask)(void *, void *);
typedef int32_t (*ListMatrices)(void *, uint32_t *, void *);

// --- what is kept ---------------------------------------------------------------------------------------------------------

struct Instance {
    void *key, *handle;
    GetProc next;
};

struct Device {
    void *key;
    GetProc next;
    CreateModule create_module;
    CreatePipelines create_pipelines;
    bool ours;
};

struct Kernel {
    uint32_t mark[2];
    const uint32_t *code;
    size_t nbytes;
    uint32_t subgroup;  // required; 0: whatever the driver takes
};

struct Module {  // of a kernel with a required subgroup size
    void *device;  // its key: two devices may give the same handle
    uint64_t handle;
    uint32_t subgroup;
};

const int MOST_INSTANCES = 32, MOST_DEVICES = 64, MOST_KERNELS = 64, MOST_MODULES = 256, MOST_SHAPES = 128;
const uint32_t MAGIC = 0xA17C0DE5u;  // in every marked module

struct Report {  // read by gpu/layer.py: keep the two alike
    int32_t state;       // 0: no device was made while armed; 1: matrices are on; -1: no extension; -2: no feature; -3: refused
    uint32_t subgroup_smallest, subgroup_largest, subgroup_can_be_required;
    uint32_t bfloat16;
    uint32_t second[7];  // workgroup scope, flexible sizes, reductions, conversions, per element, tensor addressing, block loads
    uint32_t shape_count, flexible_count;
    uint32_t shapes[MOST_SHAPES][9];     // m, n, k, a, b, c, result, saturating, scope
    uint32_t flexible[MOST_SHAPES][10];  // the same as granularities, and the invocations of a workgroup
};

Instance instances[MOST_INSTANCES];
Device devices[MOST_DEVICES];
Kernel kernels[MOST_KERNELS];
Module modules[MOST_MODULES];
uint32_t module_count;
Report report;
bool armed;
uint32_t replaced;
uint32_t busy;

struct Locked {
    Locked() { while (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) {} }
    ~Locked() { __atomic_store_n(&busy, 0, __ATOMIC_RELEASE); }
};

void *key_of(void *handle) { return *static_cast<void **>(handle); }  // the loader's table: alike for all handles of one owner

template <class Entry, int COUNT> Entry *find(Entry (&entries)[COUNT], void *key) {
    for (Entry &one : entries)
        if (one.key == key) return &one;
    return nullptr;
}

// A copy of what is kept of a handle's owner: another thread may be adding or removing one.
template <class Entry, int COUNT> bool known(Entry (&entries)[COUNT], void *handle, Entry &copy) {
    Locked locked;
    Entry *found = handle ? find(entries, key_of(handle)) : nullptr;
    if (found) copy = *found;
    return found;
}

LoaderInfo *link_of(const void *info, uint32_t type) {
    Header *one = static_cast<const DeviceInfo *>(info)->next;
    for (; one; one = one->next)
        if (one->type == type && reinterpret_cast<LoaderInfo *>(one)->function == 0) return reinterpret_cast<LoaderInfo *>(one);
    return nullptr;
}

Header *in_chain(Header *chain, uint32_t type) {
    for (; chain; chain = chain->next)
        if (chain->type == type) return chain;
    return nullptr;
}

// --- devices --------------------------------------------------------------------------------------------------------------

bool has_extension(const Extension *listed, uint32_t count, const char *name) {
    for (uint32_t i = 0; i < count; i++)
        if (!strcmp(listed[i].name, name)) return true;
    return false;
}

Extension *extensions_of(GetProc next, void *instance, void *physical, uint32_t *count) {
    auto enumerate = reinterpret_cast<EnumerateExtensions>(next(instance, "vkEnumerateDeviceExtensionProperties"));
    *count = 0;
    if (!enumerate || enumerate(physical, nullptr, count, nullptr) != SUCCESS || !*count) return nullptr;
    auto listed = static_cast<Extension *>(calloc(*count, sizeof(Extension)));
    if (listed && enumerate(physical, nullptr, count, listed) < 0) *count = 0;
    return listed;
}

template <class Properties, int WORDS>
uint32_t list_matrices(GetProc next, void *instance, void *physical, const char *name, uint32_t type, uint32_t (*into)[WORDS]) {
    auto list = reinterpret_cast<ListMatrices>(next(instance, name));
    uint32_t count = 0;
    if (!list || list(physical, &count, nullptr) != SUCCESS) return 0;
    if (count > MOST_SHAPES) count = MOST_SHAPES;
    auto found = static_cast<Properties *>(calloc(count ? count : 1, sizeof(Properties)));
    if (!found) return 0;
    for (uint32_t i = 0; i < count; i++) found[i].type = type;
    if (list(physical, &count, found) < 0) count = 0;
    for (uint32_t i = 0; i < count; i++) memcpy(into[i], &found[i].m, WORDS * sizeof(uint32_t));
    free(found);
    return count;
}

int32_t create_with_matrices(CreateDevice create, GetProc next, void *instance, void *physical, const DeviceInfo *asked,
                             const void *allocator, void **device) {
    uint32_t count = 0;
    Extension *listed = extensions_of(next, instance, physical, &count);
    const bool matrices = listed && has_extension(listed, count, "VK_KHR_cooperative_matrix");
    const bool second = matrices && has_extension(listed, count, "VK_NV_cooperative_matrix2");
    const bool bfloat16 = matrices && has_extension(listed, count, "VK_KHR_shader_bfloat16");
    free(listed);
    report = Report();
    report.state = -1;
    auto ask_features = reinterpret_cast<Ask>(next(instance, "vkGetPhysicalDeviceFeatures2"));
    auto ask_properties = reinterpret_cast<Ask>(next(instance, "vkGetPhysicalDeviceProperties2"));
    if (!matrices || !ask_features || !ask_properties) return create(physical, asked, allocator, device);

    MemoryModelFeatures model = {MEMORY_MODEL_FEATURES, nullptr, {}};
    SubgroupSizeFeatures sizes = {SUBGROUP_SIZE_FEATURES, &model, {}};
    MatrixFeatures first = {MATRIX_FEATURES, &sizes, {}};
    Matrix2Features more = {MATRIX_2_FEATURES, nullptr, {}};
    Bfloat16Features brain = {BFLOAT16_FEATURES, nullptr, {}};
    Features2 all = {FEATURES_2, &first, {}};
    if (second) { more.next = all.next; all.next = &more; }
    if (bfloat16) { brain.next = all.next; all.next = &brain; }
    ask_features(physical, &all);
    SubgroupSizeProperties limits = {SUBGROUP_SIZE_PROPERTIES, nullptr, 0, 0, 0, 0};
    Properties2 properties = {PROPERTIES_2, &limits, {}};
    ask_properties(physical, &properties);
    report.subgroup_smallest = limits.smallest;
    report.subgroup_largest = limits.largest;
    report.state = -2;
    if (!first.on[0] || !model.on[0]) return create(physical, asked, allocator, device);

    DeviceInfo wanted = *asked;
    const char **names = static_cast<const char **>(calloc(asked->extension_count + 3, sizeof(char *)));
    if (!names) return create(physical, asked, allocator, device);
    uint32_t named = asked->extension_count;
    if (named) memcpy(names, asked->extensions, named * sizeof(char *));
    const char *added[] = {"VK_KHR_cooperative_matrix", second ? "VK_NV_cooperative_matrix2" : "",
                           bfloat16 ? "VK_KHR_shader_bfloat16" : ""};
    for (const char *name : added) {
        bool there = !*name;
        for (uint32_t i = 0; i < asked->extension_count && !there; i++) there = !strcmp(names[i], name);
        if (!there) names[named++] = name;
    }
    wanted.extensions = names;
    wanted.extension_count = named;

    // What wgpu has in its own chain must not come a second time: it is switched on there, and off again afterwards.
    uint32_t *switched[16], before[16];
    int switches = 0;
    auto on = [&](uint32_t *feature) { switched[switches] = feature; before[switches++] = *feature; *feature = 1; };
    auto join = [&](auto &features) {
        auto there = reinterpret_cast<decltype(&features)>(in_chain(wanted.next, features.type));
        if (!there) {
            features.next = wanted.next;
            wanted.next = reinterpret_cast<Header *>(&features);
            return;
        }
        for (size_t i = 0; i < sizeof(features.on) / sizeof(*features.on); i++)
            if (features.on[i]) on(&there->on[i]);
    };
    model.on[1] = model.on[2] = 0;
    if (Header *found = in_chain(wanted.next, VULKAN_1_2_FEATURES)) {
        on(&reinterpret_cast<Vulkan12Features *>(found)->on[MEMORY_MODEL_IN_12]);
    } else {
        join(model);
    }
    const bool can_require = sizes.on[0] && sizes.on[1] && (limits.stages & 0x20);  // of compute shaders
    if (can_require) {
        if (Header *found = in_chain(wanted.next, VULKAN_1_3_FEATURES)) {
            on(&reinterpret_cast<Vulkan13Features *>(found)->on[SUBGROUP_SIZE_IN_13]);
            on(&reinterpret_cast<Vulkan13Features *>(found)->on[SUBGROUP_SIZE_IN_13 + 1]);
        } else {
            join(sizes);
        }
    }
    first.on[1] = 0;  // kernels check their own bounds
    join(first);
    if (second) join(more);
    if (bfloat16) join(brain);

    LoaderInfo *loader = link_of(asked, LOADER_DEVICE);
    Link *link = loader->link;
    int32_t result = create(physical, &wanted, allocator, device);
    for (int i = 0; i < switches; i++) *switched[i] = before[i];
    free(names);
    if (result != SUCCESS) {
        loader->link = link;
        report.state = -3;
        return create(physical, asked, allocator, device);
    }
    report.state = 1;
    report.subgroup_can_be_required = can_require;
    report.bfloat16 = bfloat16 && brain.on[0] && brain.on[2];
    if (second) memcpy(report.second, more.on, sizeof(report.second));
    report.shape_count = list_matrices<MatrixProperties, 9>(
        next, instance, physical, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", MATRIX_PROPERTIES, report.shapes);
    if (second && more.on[1])
        report.flexible_count = list_matrices<FlexibleProperties, 10>(
            next, instance, physical, "vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV",
            FLEXIBLE_PROPERTIES, report.flexible);
    return result;
}

int32_t create_device(void *physical, const DeviceInfo *info, const void *allocator, void **device) {
    LoaderInfo *loader = link_of(info, LOADER_DEVICE);
    Instance instance;
    if (!loader || !loader->link || !known(instances, physical, instance)) return INITIALIZATION_FAILED;
    GetProc next = loader->link->instance_proc, next_device = loader->link->other;
    loader->link = loader->link->next;
    auto create = reinterpret_cast<CreateDevice>(next(instance.handle, "vkCreateDevice"));
    if (!create) return INITIALIZATION_FAILED;
    const bool ours = armed;
    int32_t result = ours ? create_with_matrices(create, next, instance.handle, physical, info, allocator, device)
                          : create(physical, info, allocator, device);
    if (result != SUCCESS) return result;
    {
        Locked locked;
        if (Device *free_one = find(devices, nullptr)) {
            free_one->next = next_device;
            free_one->create_module = reinterpret_cast<CreateModule>(next_device(*device, "vkCreateShaderModule"));
            free_one->create_pipelines = reinterpret_cast<CreatePipelines>(next_device(*device, "vkCreateComputePipelines"));
            free_one->ours = ours && report.state == 1;
            free_one->key = key_of(*device);
            return result;
        }
    }
    // One that is not kept would have no functions: the loader asks this layer for them.
    reinterpret_cast<Destroy>(next_device(*device, "vkDestroyDevice"))(*device, allocator);
    *device = nullptr;
    return TOO_MANY_OBJECTS;
}

void destroy_device(void *device, const void *allocator) {
    if (!device) return;
    Destroy destroy = nullptr;
    {
        Locked locked;
        if (Device *found = find(devices, key_of(device))) {
            destroy = reinterpret_cast<Destroy>(found->next(device, "vkDestroyDevice"));
            found->key = nullptr;
        }
    }
    if (destroy) destroy(device, allocator);
}

// --- kernels --------------------------------------------------------------------------------------------------------------

// The registered kernel whose mark a module holds: MAGIC and both words of the mark are constants of 32 bits in it.
const Kernel *marked(const ModuleInfo *info) {
    const uint32_t OP_CONSTANT = 43;
    const size_t count = info->nbytes / 4;
    bool magic = false;
    for (size_t at = 5; at + 3 < count && info->code[at] >> 16; at += info->code[at] >> 16)
        magic |= info->code[at] == (4u << 16 | OP_CONSTANT) && info->code[at + 3] == MAGIC;
    if (!magic) return nullptr;
    for (const Kernel &kernel : kernels) {
        if (!kernel.code) continue;
        int seen = 0;
        for (size_t at = 5; at + 3 < count && info->code[at] >> 16; at += info->code[at] >> 16) {
            if (info->code[at] != (4u << 16 | OP_CONSTANT)) continue;
            seen |= (info->code[at + 3] == kernel.mark[0]) | (info->code[at + 3] == kernel.mark[1]) << 1;
        }
        if (seen == 3) return &kernel;
    }
    return nullptr;
}

// A driver gives the handle of a destroyed module to the next one: what was noted of that handle is of another module.
void note_module(void *device, uint64_t handle, uint32_t subgroup) {
    for (Module &one : modules)
        if (one.device == device && one.handle == handle) one = Module();
    if (subgroup) modules[module_count++ % MOST_MODULES] = {device, handle, subgroup};
}

int32_t create_module(void *device, const ModuleInfo *info, const void *allocator, uint64_t *module) {
    Device found;
    if (!known(devices, device, found)) return INITIALIZATION_FAILED;
    if (!found.ours) return found.create_module(device, info, allocator, module);
    Locked locked;  // a kernel stays registered until its module has been made
    const Kernel *kernel = marked(info);
    ModuleInfo other = *info;
    if (kernel) other.code = kernel->code, other.nbytes = kernel->nbytes;
    int32_t result = found.create_module(device, &other, allocator, module);
    if (result == SUCCESS) {
        note_module(found.key, *module, kernel ? kernel->subgroup : 0);
        replaced += kernel != nullptr;
    }
    return result;
}

int32_t create_pipelines(void *device, uint64_t cache, uint32_t count, const PipelineInfo *infos, const void *allocator,
                         uint64_t *pipelines) {
    Device found;
    if (!known(devices, device, found)) return INITIALIZATION_FAILED;
    uint32_t size = 0;
    if (found.ours && count == 1) {
        Locked locked;
        for (const Module &one : modules)
            if (one.device == found.key && one.handle == infos->stage.module) size = one.subgroup;
    }
    if (!size) return found.create_pipelines(device, cache, count, infos, allocator, pipelines);
    PipelineInfo info = *infos;
    RequiredSubgroupSize required = {REQUIRED_SUBGROUP_SIZE, info.stage.next, size};
    info.stage.next = &required;
    info.stage.flags |= 2;  // full subgroups
    return found.create_pipelines(device, cache, 1, &info, allocator, pipelines);
}

// --- the loader's entry ---------------------------------------------------------------------------------------------------

int32_t create_instance(const void *info, const void *allocator, void **instance) {
    LoaderInfo *loader = link_of(info, LOADER_INSTANCE);
    if (!loader || !loader->link) return INITIALIZATION_FAILED;
    GetProc next = loader->link->instance_proc;
    loader->link = loader->link->next;
    auto create = reinterpret_cast<CreateInstance>(next(nullptr, "vkCreateInstance"));
    if (!create) return INITIALIZATION_FAILED;
    int32_t result = create(info, allocator, instance);
    if (result != SUCCESS) return result;
    {
        Locked locked;
        if (Instance *free_one = find(instances, nullptr)) {
            free_one->handle = *instance;
            free_one->next = next;
            free_one->key = key_of(*instance);
            return result;
        }
    }
    reinterpret_cast<Destroy>(next(*instance, "vkDestroyInstance"))(*instance, allocator);
    *instance = nullptr;
    return TOO_MANY_OBJECTS;
}

void destroy_instance(void *instance, const void *allocator) {
    if (!instance) return;
    Destroy destroy = nullptr;
    {
        Locked locked;
        if (Instance *found = find(instances, key_of(instance))) {
            destroy = reinterpret_cast<Destroy>(found->next(instance, "vkDestroyInstance"));
            found->key = nullptr;
        }
    }
    if (destroy) destroy(instance, allocator);
}

Function device_proc(void *device, const char *name) {
    if (!strcmp(name, "vkGetDeviceProcAddr")) return reinterpret_cast<Function>(device_proc);
    if (!strcmp(name, "vkDestroyDevice")) return reinterpret_cast<Function>(destroy_device);
    Device found;
    if (!known(devices, device, found)) return nullptr;
    if (!strcmp(name, "vkCreateShaderModule")) return reinterpret_cast<Function>(create_module);
    if (!strcmp(name, "vkCreateComputePipelines")) return reinterpret_cast<Function>(create_pipelines);
    return found.next(device, name);
}

Function instance_proc(void *instance, const char *name) {
    if (!strcmp(name, "vkGetInstanceProcAddr")) return reinterpret_cast<Function>(instance_proc);
    if (!strcmp(name, "vkCreateInstance")) return reinterpret_cast<Function>(create_instance);
    if (!strcmp(name, "vkDestroyInstance")) return reinterpret_cast<Function>(destroy_instance);
    if (!strcmp(name, "vkCreateDevice")) return reinterpret_cast<Function>(create_device);
    if (!strcmp(name, "vkGetDeviceProcAddr")) return reinterpret_cast<Function>(device_proc);
    if (!strcmp(name, "vkDestroyDevice")) return reinterpret_cast<Function>(destroy_device);
    if (!strcmp(name, "vkCreateShaderModule")) return reinterpret_cast<Function>(create_module);
    if (!strcmp(name, "vkCreateComputePipelines")) return reinterpret_cast<Function>(create_pipelines);
    Instance found;
    return known(instances, instance, found) ? found.next(instance, name) : nullptr;
}

}  // namespace

EXPORT int32_t vkNegotiateLoaderLayerInterfaceVersion(Negotiation *asked) {
    if (asked->version < 2) return INITIALIZATION_FAILED;
    asked->version = 2;
    asked->instance_proc = instance_proc;
    asked->device_proc = device_proc;
    asked->physical_proc = nullptr;
    return SUCCESS;
}

// --- Python's entries (gpu/layer.py) --------------------------------------------------------------------------------------

// Devices made from now on are ours: they get the extensions. Returns how many instances have been made through this layer.
EXPORT int32_t layer_arm(int32_t on) {
    Locked locked;
    if (on) report = Report();
    armed = on != 0;
    int32_t count = 0;
    for (const Instance &one : instances) count += one.key != nullptr;
    return count;
}

EXPORT const Report *layer_report() { return &report; }

// The code must stay where it is until layer_forget. Returns 0 if there is no place left.
EXPORT int32_t layer_register(uint32_t first, uint32_t second, const uint32_t *code, size_t nbytes, uint32_t subgroup) {
    Locked locked;
    for (Kernel &one : kernels) {
        if (one.code) continue;
        one = Kernel{{first, second}, code, nbytes, subgroup};
        return 1;
    }
    return 0;
}

// Returns how many modules have been replaced so far.
EXPORT uint32_t layer_forget(const uint32_t *code) {
    Locked locked;
    for (Kernel &one : kernels)
        if (one.code == code) one.code = nullptr;
    return replaced;
}
