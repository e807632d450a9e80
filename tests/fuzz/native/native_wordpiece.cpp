// WordPiece over any vocabulary, table of characters and limits: within its memory, and the same ids on one thread and on many.
#include "text/encoders/wordpiece/wordpiece.cpp"

#include "fuzz.h"

static const uint32_t ALPHABET[] = {'a', 'b', '#', ' ', '[', ']', 'z', 0xe9, 0x3b1, 0x7ff, 0x800, 0x24ff, 0x2500, 0x65e5, 0x1f600};

static std::string utf8(uint32_t code) {
  std::string made;
  if (code < 0x80) made += char(code);
  else if (code < 0x800) made += char(0xc0 | code >> 6), made += char(0x80 | (code & 63));
  else if (code < 0x10000) made += char(0xe0 | code >> 12), made += char(0x80 | (code >> 6 & 63)), made += char(0x80 | (code & 63));
  else made += char(0xf0 | code >> 18), made += char(0x80 | (code >> 12 & 63)), made += char(0x80 | (code >> 6 & 63)), made += char(0x80 | (code & 63));
  return made;
}

static std::string word(Input& in, int64_t most) {
  std::string made;
  for (int64_t n = in.from(0, most); n > 0; n--) made += utf8(ALPHABET[in.from(0, 14)]);
  return made;
}

int one(const uint8_t* data, size_t size) {
  Input in(data, size);
  const int64_t codes = in.flag() ? 0x2500 : in.from(0, 200);
  Exact<Character> table(codes);
  for (uint32_t code : ALPHABET) {
    if (int64_t(code) >= codes) continue;
    Character& is = table[code];
    is.kind = uint8_t(in.from(0, 5));
    std::string becomes;
    is.count = 0;
    for (int64_t n = is.kind == SIGN ? 1 : in.from(0, 4); n > 0; n--) {
      const std::string next = utf8(ALPHABET[in.from(0, 14)]);
      if (becomes.size() + next.size() > sizeof is.bytes) break;
      becomes += next, is.count++;
    }
    is.length = uint8_t(becomes.size());
    memcpy(is.bytes, becomes.data(), becomes.size());
  }
  const int64_t count = in.from(0, 12);
  std::string pieces;
  Exact<int64_t> offsets(count + 1);
  Exact<uint8_t> roots(count);
  Exact<int32_t> ids(count);
  for (int64_t i = 0; i < count; i++) {
    pieces += word(in, 4);
    offsets[i + 1] = int64_t(pieces.size()), roots[i] = in.flag(), ids[i] = int32_t(i);
  }
  std::string added;
  for (int64_t n = in.from(0, 2); n > 0; n--) added += word(in, 3) + '\0';
  Exact<int32_t> before(in.from(0, 3)), after(in.from(0, 3));
  const int64_t most_characters = in.from(0, 3) == 0 ? in.from(0, 3000) : in.from(0, 200);
  Exact<uint8_t> packed(pieces.size());
  memcpy(packed.data(), pieces.data(), pieces.size());
  void* made = wordpiece_new(packed.data(), offsets.data(), roots.data(), ids.data(), count, reinterpret_cast<uint8_t*>(table.data()), codes,
                             added.data(), int64_t(added.size()), before.data(), int64_t(before.size()), after.data(), int64_t(after.size()), 77, most_characters);
  REQUIRE(made);
  const int64_t texts = in.from(0, 6), most = in.from(0, 3) == 0 ? in.from(0, 7) : in.from(0, 5000);
  std::vector<Exact<char>> held;
  Exact<const char*> begins(texts);
  Exact<int64_t> sizes(texts);
  for (int64_t i = 0; i < texts; i++) {
    std::string text = word(in, 12);
    const int64_t times = in.from(0, 9) == 0 ? in.from(1, 2000) : 1;
    held.emplace_back(text.size() * times);
    for (int64_t k = 0; k < times; k++) memcpy(held.back().data() + k * text.size(), text.data(), text.size());
    begins[i] = held.back().data(), sizes[i] = int64_t(held.back().size());
  }
  // The same through a list of Python's, one of whose items may be no text.
  struct Item { const char* text; intptr_t size; };
  const int64_t broken = in.byte() == 255 && texts ? in.from(0, texts - 1) : -1;
  Exact<Item> list(texts);
  for (int64_t i = 0; i < texts; i++) list[i] = {i == broken ? nullptr : begins[i], sizes[i]};
  Exact<const char*> found(texts);
  Exact<int64_t> lengths(texts);
  const int64_t nbytes = wordpiece_gather(
      list.data(), texts, [](void* all, intptr_t at) -> void* { return static_cast<Item*>(all) + at; },
      [](void* one, intptr_t* length) { return *length = static_cast<Item*>(one)->size, static_cast<Item*>(one)->text;
          }, found.data(), lengths.data());
  int64_t in_all = 0;
  for (int64_t i = 0; i < texts; i++) in_all += sizes[i];
  REQUIRE(nbytes == (broken < 0 ? in_all : -1) && wordpiece_character_nbytes() == sizeof(Character));
  for (int64_t i = 0; i < texts && broken < 0; i++) REQUIRE(found[i] == begins[i] && lengths[i] == sizes[i]);
  const int64_t room = wordpiece_room(made, sizes.data(), texts, most);
  Exact<int32_t> alone(room), shared(room), starts(texts + 1), others(texts + 1);
  Exact<uint8_t> flags(texts), more(texts);
  const int64_t total = wordpiece_encode(made, begins.data(), sizes.data(), texts, most, 1, alone.data(), starts.data(), flags.data());
  REQUIRE(total >= 0 && total <= room && starts[0] == 0 && starts[texts] == total);
  for (int64_t i = 0; i < texts; i++) {
    REQUIRE(starts[i] <= starts[i + 1] && starts[i + 1] - starts[i] <= most && flags[i] <= LEFT);
    REQUIRE(flags[i] != LEFT || starts[i] == starts[i + 1]);
  }
  for (int64_t i = 0; i < total; i++) REQUIRE(alone[i] == 77 || (alone[i] >= 0 && alone[i] < (count ? count : 1)));
  REQUIRE(wordpiece_encode(made, begins.data(), sizes.data(), texts, most, 3, shared.data(), others.data(), more.data()) == total);
  REQUIRE(memcmp(alone.data(), shared.data(), total * 4) == 0 && memcmp(flags.data(), more.data(), texts) == 0);
  wordpiece_delete(made);
  return 0;
}
