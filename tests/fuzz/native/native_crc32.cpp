// CRC-32: the same as bit by bit, of any length, at any alignment, in parts and one after the other.
#include "native/code/crc32.cpp"

#include "fuzz.h"

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const size_t skip = size_t(in.from(0, 63)), cut = size_t(in.from(0, 600)), part = size_t(in.from(1, 700));
  const uint32_t begin = uint32_t(in.word());
  const size_t many = size_t(in.from(1, 9)), n = in.left() * many;
  Exact<uint8_t> room(skip + n);
  uint8_t* text = room.data() + skip;
  for (size_t i = 0; i < n; i++) text[i] = data[size - in.left() + i % in.left()];
  REQUIRE(crc32_of(begin, text, int64_t(n)) == ~bytes(~begin, text, n));
  const size_t middle = cut < n ? cut : n;
  REQUIRE(crc32_of(crc32_of(begin, text, int64_t(middle)), text + middle, int64_t(n - middle)) == crc32_of(begin, text, int64_t(n)));
  REQUIRE(crc32_is_fast() == is_fast());
  Exact<uint32_t> sums((n + part - 1) / part);
  crc32_parts(text, int64_t(n), int64_t(part), sums.data());
  for (size_t i = 0; i < sums.size(); i++) {
    const size_t length = n - i * part < part ? n - i * part : part;
    REQUIRE(sums[i] == ~bytes(~0u, text + i * part, length));
  }
  return 0;
}
