/* A mock libnvidia-ml.so.1 that says what the environment tells it to.
 *
 *   NVML_STUB_INIT    what nvmlInit returns: 0 success, 9 driver not loaded, 18 driver/library version mismatch
 *   NVML_STUB_DRIVER  driver version; unset: not supported
 *   NVML_STUB_CUDA    newest CUDA of the driver as NVML writes it (13000); unset: not supported
 *   NVML_STUB_CARDS   one card per line, ten fields separated by '|':
 *                     name|uuid|pci bus id|pci device id|capability|minor|total bytes|used bytes|bus bits|memory MHz
 *                     an empty field answers NVML_ERROR_NOT_SUPPORTED, as unified-memory machines do for memory
 *
 * Signatures, structures and return codes are those of nvml.h, checked against nvidia-ml-py (pynvml.py), which is also
 * the source of the error strings, but for 18: that one is as nvidia-smi prints it (rapidsai/dask-cuda#949). The facts
 * about cards come from the tests, with their sources.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7,
       ARGUMENT_VERSION_MISMATCH = 25 };
enum { NAME, UUID, PCI, PCI_ID, CAPABILITY, MINOR, TOTAL, USED, BUS_WIDTH, MEMORY_CLOCK, FIELDS };
enum { MAX_CARDS = 16, MAX_TEXT = 96 };

typedef struct { char field[FIELDS][MAX_TEXT]; } Card;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned gpu, memory; } Utilization;

static Card cards[MAX_CARDS];
static unsigned count, users;

static void read_cards(void) {
  const char *at = getenv("NVML_STUB_CARDS");
  for (count = 0; at != NULL && *at != '\0' && count < MAX_CARDS; count++) {
    Card *card = &cards[count];
    memset(card, 0, sizeof *card);
    for (int field = 0; field < FIELDS; field++) {
      size_t length = strcspn(at, "|\n");
      memcpy(card->field[field], at, length < MAX_TEXT ? length : MAX_TEXT - 1);
      at += length;
      if (*at == '|') at++;
    }
    if (*at == '\n') at++;
  }
}

static int start(void) {
  const char *code = getenv("NVML_STUB_INIT");
  if (code != NULL && atoi(code) != SUCCESS) return atoi(code);
  if (users++ == 0) read_cards();
  return SUCCESS;
}
int nvmlInit_v2(void) { return start(); }
int nvmlInit(void) { return start(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return start(); }
int nvmlShutdown(void) { return users == 0 ? UNINITIALIZED : (users--, SUCCESS); }

const char *nvmlErrorString(int code) {
  switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}

static int give_text(const char *text, char *out, unsigned length) {
  if (users == 0) return UNINITIALIZED;
  if (out == NULL) return INVALID_ARGUMENT;
  if (text == NULL || *text == '\0') return NOT_SUPPORTED;
  if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
  strcpy(out, text);
  return SUCCESS;
}

/* The text of one field of the card behind a handle, or the code to return. */
static int field_of(void *handle, int field, const char **text) {
  Card *card = handle;
  if (users == 0) return UNINITIALIZED;
  if (card < cards || card >= cards + count) return INVALID_ARGUMENT;
  *text = card->field[field];
  return **text == '\0' ? NOT_SUPPORTED : SUCCESS;
}

static int give_number(void *handle, int field, unsigned *out) {
  const char *text;
  int code = field_of(handle, field, &text);
  if (code == SUCCESS) *out = (unsigned)strtoul(text, NULL, 0);
  return code;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  return give_text(getenv("NVML_STUB_DRIVER"), out, length);
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
  const char *version = getenv("NVML_STUB_CUDA");
  if (version == NULL) return NOT_SUPPORTED;
  *out = atoi(version);
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

int nvmlDeviceGetCount_v2(unsigned *out) {
  if (users == 0) return UNINITIALIZED;
  *out = count;
  return SUCCESS;
}
int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  if (users == 0) return UNINITIALIZED;
  if (index >= count) return INVALID_ARGUMENT;
  *out = &cards[index];
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }
int nvmlDeviceGetIndex(void *handle, unsigned *out) {
  const char *text;
  int code = field_of(handle, NAME, &text);
  if (code == SUCCESS || code == NOT_SUPPORTED) { *out = (unsigned)((Card *)handle - cards); return SUCCESS; }
  return code;
}

static int give_field_text(void *handle, int field, char *out, unsigned length) {
  const char *text;
  int code = field_of(handle, field, &text);
  return code == SUCCESS ? give_text(text, out, length) : code;
}
int nvmlDeviceGetName(void *handle, char *out, unsigned length) { return give_field_text(handle, NAME, out, length); }
int nvmlDeviceGetUUID(void *handle, char *out, unsigned length) { return give_field_text(handle, UUID, out, length); }
int nvmlDeviceGetMinorNumber(void *handle, unsigned *out) { return give_number(handle, MINOR, out); }
int nvmlDeviceGetMemoryBusWidth(void *handle, unsigned *out) { return give_number(handle, BUS_WIDTH, out); }
int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *out) {
  return type == 2 /* NVML_CLOCK_MEM */ ? give_number(handle, MEMORY_CLOCK, out) : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *out) {
  const char *total, *used = "0";
  int code = field_of(handle, TOTAL, &total);
  if (code != SUCCESS) return code;
  if (field_of(handle, USED, &used) == NOT_SUPPORTED) used = "0";
  out->total = strtoull(total, NULL, 10);
  out->used = strtoull(used, NULL, 10);
  out->free = out->total - out->used;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *out) {
  Memory plain;
  if (out->version != (sizeof(Memory2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
  int code = nvmlDeviceGetMemoryInfo(handle, &plain);
  if (code != SUCCESS) return code;
  out->total = plain.total, out->free = plain.free, out->used = plain.used, out->reserved = 0;
  return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *out) {
  const char *text, *id;
  int code = field_of(handle, PCI, &text);
  if (code != SUCCESS) return code;
  memset(out, 0, sizeof *out);
  if (sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3) return INVALID_ARGUMENT;
  if (field_of(handle, PCI_ID, &id) == SUCCESS) out->id = (unsigned)strtoul(id, NULL, 0);
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
  snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
           out->device & 0xff);
  return SUCCESS;
}
int nvmlDeviceGetPciInfo_v2(void *handle, Pci *out) { return nvmlDeviceGetPciInfo_v3(handle, out); }

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  const char *text;
  int code = field_of(handle, CAPABILITY, &text);
  if (code != SUCCESS) return code;
  return sscanf(text, "%d.%d", major, minor) == 2 ? SUCCESS : INVALID_ARGUMENT;
}

/* Asked for by torch.cuda.utilization(), temperature(), power_draw(), clock_rate(); nobody has recorded values here. */
static int not_supported(void *handle) {
  const char *name;
  int code = field_of(handle, NAME, &name);
  return code == SUCCESS ? NOT_SUPPORTED : code;
}
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *out) { (void)out; return not_supported(handle); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
  (void)sensor, (void)out;
  return not_supported(handle);
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) { (void)out; return not_supported(handle); }
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *out) { (void)type, (void)out; return not_supported(handle); }
