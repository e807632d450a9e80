// A small decoder of random weights, for the drivers of decode.cpp.
#pragma once
#include "text/persistent/code/decode.cpp"

#include "fuzz.h"

namespace {
// Memory of exactly so many bytes on a line's boundary, as torch's is.
struct Block {
  explicit Block(size_t nbytes) : nbytes(nbytes), at(nullptr) {
    REQUIRE(posix_memalign(&at, 64, nbytes ? nbytes : 1) == 0);
    memset(at, 0, nbytes);
  }
  Block(Block&& other) : nbytes(other.nbytes), at(other.at) { other.at = nullptr; }
  ~Block() { free(at); }
  size_t nbytes;
  void* at;
};
std::vector<Block> held;

float* floats(int64_t count, uint32_t seed, bool odd) {
  held.emplace_back(size_t(count) * 4);
  fill(static_cast<float*>(held.back().at), count, seed, odd);
  return static_cast<float*>(held.back().at);
}
void* numbers(int64_t count, int32_t format, uint32_t seed, bool odd) {
  if (format == 0) return floats(count, seed, odd);
  Exact<float> wide(count);
  fill(wide.data(), count, seed, odd);
  held.emplace_back(size_t(count) * 2);
  auto* out = static_cast<uint16_t*>(held.back().at);
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &wide[i], 4);
    // Float16 of the same bits is some number or other: it need not be the same one.
    out[i] = format == 1 ? uint16_t(bits >> 16) : uint16_t((bits >> 16 & 0x83ff) | (odd && bits % 64 == 0 ? 0x7c00 : 0x2c00));
  }
  return out;
}
Matrix matrix(int64_t rows, int64_t columns, int32_t format, int32_t bits, uint32_t seed, bool odd, bool biased) {
  Matrix made{nullptr, biased ? floats(rows, seed + 7, odd) : nullptr, rows, columns, nullptr, 0.5f};
  if (!bits) {
    made.data = numbers(rows * columns, format, seed, odd);
    return made;
  }
  const int64_t groups = (rows + PANEL - 1) / PANEL * ((columns + GROUP - 1) / GROUP);
  held.emplace_back(size_t(groups * PANEL * GROUP * bits / 8));
  auto* codes = static_cast<uint8_t*>(held.back().at);
  for (size_t i = 0; i < held.back().nbytes; i++) codes[i] = uint8_t(seed * (i + 3) >> 11);
  made.data = codes;
  made.scales = static_cast<const f16*>(numbers(groups * PANEL, 2, seed + 5, odd));
  return made;
}
}  // namespace
