/* A libcuda.so.1 that only says who woke it: the other half of the tripwire.
 *
 *   LIBCUDA_STUB_RECORD  a file; every cuInit appends the number of the process that called it
 *   LIBCUDA_STUB_CODE    what cuInit returns; 100 (CUDA_ERROR_NO_DEVICE) when unset
 *
 * Codes and signatures: cuda.h, "CUDA driver API error codes".
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_NO_DEVICE = 100 };
static int woken;

static int code(void) {
  const char *text = getenv("LIBCUDA_STUB_CODE");
  return text == NULL ? CUDA_ERROR_NO_DEVICE : atoi(text);
}

int cuInit(unsigned flags) {
  (void)flags;
  const char *path = getenv("LIBCUDA_STUB_RECORD");
  FILE *record = path == NULL ? NULL : fopen(path, "a");
  if (record != NULL) {
    fprintf(record, "%ld\n", (long)getpid());
    fclose(record);
  }
  woken = code() == 0;
  return code();
}

int cuDeviceGetCount(int *count) {
  *count = 0;
  return woken ? 0 : CUDA_ERROR_NOT_INITIALIZED;
}
