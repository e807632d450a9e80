/* Two tiny libraries in one, for what the mock NVML in tests/native cannot be: a Level Zero loader, and an NVML that hangs.
 *
 * Signatures and ZE_RESULT_ERROR_UNINITIALIZED (0x78000001) are those of Level Zero's zes_api.h and ze_api.h:
 *   ze_result_t zesInit(zes_init_flags_t), zesDriverGet(uint32_t*, zes_driver_handle_t*),
 *   zesDeviceGet(zes_driver_handle_t, uint32_t*, zes_device_handle_t*)
 */
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static int drivers[2];

int zesInit(uint32_t flags) {
  const char *code = getenv("LEVEL_ZERO_STUB_CODE");
  return flags != 0 ? 0x78000004 : code == NULL ? 0 : (int)strtoul(code, NULL, 0);
}
int zesDriverGet(uint32_t *count, void **handles) {
  if (handles != NULL)
    for (uint32_t i = 0; i < *count && i < 2; i++) handles[i] = &drivers[i];
  *count = 2;
  return 0;
}
int zesDeviceGet(void *driver, uint32_t *count, void **handles) {
  (void)handles;
  if (driver != &drivers[0] && driver != &drivers[1]) return 0x78000007;
  *count = driver == &drivers[0] ? 2 : 1;
  return 0;
}

int nvmlInit_v2(void) { sleep(3); return 0; }
