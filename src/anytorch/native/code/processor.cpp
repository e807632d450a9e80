// What an x86-64 processor can do and its system allows, by CPUID. Linux and macOS have lists of that, Windows has none.
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>

namespace {

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  Leaf(uint32_t leaf, uint32_t part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }  // zeros where there is no such leaf
};

// The registers that the system keeps when it changes between threads: without it an instruction is not to be used.
uint64_t kept() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

}  // namespace

// A bit for each name of ASKED in simd.py, in its order.
extern "C" __attribute__((visibility("default"))) uint32_t processor_features() {
  const Leaf one(1, 0), seven(7, 0), more(7, 1);
  const bool asks = one.c >> 27 & 1;  // OSXSAVE: xgetbv may be asked
  const uint64_t registers = asks ? kept() : 0;
  const bool avx = (registers & 0x6) == 0x6 && (one.c >> 28 & 1);
  const bool avx512 = avx && (registers & 0xe0) == 0xe0;
  const bool found[] = {
      avx && (one.c >> 12 & 1),     avx && (one.c >> 29 & 1),     avx && (seven.b >> 5 & 1),
      avx512 && (seven.b >> 16 & 1), avx512 && (seven.b >> 17 & 1), avx512 && (seven.b >> 30 & 1),
      avx512 && (seven.b >> 31 & 1), avx512 && (seven.c >> 11 & 1), avx && (more.a >> 4 & 1),
  };
  uint32_t bits = 0;
  for (unsigned i = 0; i < sizeof found; i++) bits |= uint32_t(found[i]) << i;
  return bits;
}

#else
extern "C" __attribute__((visibility("default"))) uint32_t processor_features() { return 0; }
#endif
