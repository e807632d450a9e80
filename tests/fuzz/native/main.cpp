// libFuzzer around a target that g++ compiled: counts its edges, and hands it to the driver.
#include <stddef.h>
#include <stdint.h>

extern "C" int LLVMFuzzerRunDriver(int* argc, char*** argv, int (*target)(const uint8_t*, size_t));
extern "C" void __sanitizer_cov_8bit_counters_init(uint8_t* first, uint8_t* last);

int one(const uint8_t* data, size_t size);

// An edge by the address it is called from: 14 bits of a hash. Two edges may share a counter; that hides little.
static uint8_t counters[1 << 14];

// Not the library's own function of this name, which does nothing: the linker's --wrap calls this one.
extern "C" __attribute__((no_sanitize("thread"), no_sanitize("address"), no_sanitize("undefined"))) void __wrap___sanitizer_cov_trace_pc() {
  const uint64_t place = reinterpret_cast<uint64_t>(__builtin_return_address(0));
  uint8_t& counter = counters[(place * 0x9E3779B97F4A7C15ull) >> 50];
  counter = uint8_t(counter + 1);
}

// g++ tells of comparisons of floats, too, which libFuzzer does not know.
extern "C" void __sanitizer_cov_trace_cmpf(float, float) {}
extern "C" void __sanitizer_cov_trace_cmpd(double, double) {}

int main(int argc, char** argv) {
  __sanitizer_cov_8bit_counters_init(counters, counters + sizeof counters);
  return LLVMFuzzerRunDriver(&argc, &argv, one);
}
