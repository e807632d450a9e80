// WordPiece over UTF-8: texts by address and size, to packed token ids, on several threads.
//
// What a character becomes (letters, a gap, a sign of its own, nothing) is a table the caller makes by asking the
// reference tokenizer, so that no rule about Unicode stands here. A text with a character the table does not know, or with
// one of the tokenizer's added tokens in it, is left to the reference: its flag says so.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Kind : uint8_t { UNKNOWN = 0, LETTERS = 1, GAP = 2, SIGN = 3, NOTHING = 4 };
constexpr int64_t LONGEST_WORD = 2048;  // bytes
enum Flag : uint8_t { DONE = 0, TRUNCATED = 1, LEFT = 2 };

// Children of a node by byte: one open-addressing table for all nodes, since nearly every node has one child.
class Trie {
public:
    Trie() { values_.assign(2, -1); resize(1 << 12); }

    void insert(int root, const uint8_t* text, int64_t length, int32_t value) {
        int32_t node = root;
        for (int64_t i = 0; i < length; i++) {
            int32_t next = child(node, text[i]);
            if (next < 0) {
                next = static_cast<int32_t>(values_.size());
                values_.push_back(-1);
                if (2 * ++count_ > static_cast<int64_t>(slots_.size())) resize(2 * slots_.size());
                put(key(node, text[i]), next);
            }
            node = next;
        }
        values_[node] = value;
    }

    int32_t child(int32_t node, uint8_t byte) const {
        const uint32_t wanted = key(node, byte);
        for (uint32_t at = spread(wanted) & mask_;; at = (at + 1) & mask_) {
            const Slot& slot = slots_[at];
            if (slot.key == wanted) return slot.node;
            if (slot.node < 0) return -1;
        }
    }

    int32_t value(int32_t node) const { return values_[node]; }

private:
    struct Slot { uint32_t key; int32_t node; };

    static uint32_t key(int32_t node, uint8_t byte) { return (static_cast<uint32_t>(node) << 8) | byte; }
    static uint32_t spread(uint32_t x) { x *= 2654435769u; return x ^ (x >> 15); }

    void put(uint32_t k, int32_t node) {
        uint32_t at = spread(k) & mask_;
        while (slots_[at].node >= 0) at = (at + 1) & mask_;
        slots_[at] = {k, node};
    }

    void resize(size_t size) {
        std::vector<Slot> old;
        old.swap(slots_);
        slots_.assign(size, Slot{0, -1});
        mask_ = static_cast<uint32_t>(size - 1);
        for (const Slot& slot : old) if (slot.node >= 0) put(slot.key, slot.node);
    }

    std::vector<Slot> slots_;
    std::vector<int32_t> values_;
    uint32_t mask_ = 0;
    int64_t count_ = 0;
};

struct Character { uint8_t kind; uint8_t length; uint8_t count; char bytes[13]; };  // what it becomes; `count` characters

struct Tokenizer {
    Trie trie;  // root 0: pieces that begin a word; root 1: pieces that continue one
    std::vector<Character> table;
    std::vector<std::string> added;
    bool added_starts[256] = {};
    std::vector<int32_t> before, after;
    int32_t unknown = 0;
    int64_t most_characters = 100;

    int64_t pieces(const uint8_t* word, int64_t length, int32_t* out) const {
        int64_t found = 0, start = 0;
        while (start < length) {
            int32_t node = start == 0 ? 0 : 1, best = -1;
            int64_t end = start;
            for (int64_t i = start; i < length; i++) {
                node = trie.child(node, word[i]);
                if (node < 0) break;
                if (trie.value(node) >= 0) { best = trie.value(node); end = i + 1; }
            }
            if (best < 0) { out[0] = unknown; return 1; }
            out[found++] = best;
            start = end;
        }
        return found;
    }

    bool added_at(const uint8_t* text, int64_t left) const {
        for (const std::string& one : added)
            if (static_cast<int64_t>(one.size()) <= left && std::memcmp(text, one.data(), one.size()) == 0) return true;
        return false;
    }

    // One text's ids behind `out`, which has room for one per byte and then some; how many they are. With no room for the
    // tokens around a text (`most` below their number), or a word longer than the buffer, it is left to the reference.
    int64_t encode(const uint8_t* text, int64_t length, int64_t most, int32_t* out, uint8_t* flag) const {
        uint8_t word[LONGEST_WORD];
        int32_t found[LONGEST_WORD];
        int64_t bytes = 0, characters = 0, ids = 0;
        const int64_t room = most - static_cast<int64_t>(before.size() + after.size());
        if (room < 0) { *flag = LEFT; return 0; }
        *flag = DONE;
        for (int32_t id : before) *out++ = id;

        auto emit = [&](const uint8_t* some, int64_t size, int64_t counted) {
            int64_t made = 1;
            if (counted > most_characters) found[0] = unknown; else made = pieces(some, size, found);
            const int64_t kept = made < room - ids ? made : room - ids;
            std::memcpy(out + ids, found, kept * sizeof(int32_t));
            ids += kept;
            if (kept < made) *flag = TRUNCATED;
        };
        auto flush = [&]() {
            if (characters) emit(word, bytes, characters);
            bytes = characters = 0;
        };

        for (int64_t i = 0; i < length && *flag == DONE;) {
            const uint8_t first = text[i];
            if (added_starts[first] && added_at(text + i, length - i)) { *flag = LEFT; return 0; }
            uint32_t code = first;
            int64_t size = 1;
            if (first >= 0x80) {  // the caller's encoder made it: it is well-formed
                size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
                code = first & (0xFF >> (size + 1));
                for (int64_t k = 1; k < size; k++) code = (code << 6) | (text[i + k] & 0x3F);
            }
            i += size;
            if (code >= table.size()) { *flag = LEFT; return 0; }
            const Character& is = table[code];
            switch (is.kind) {
                case LETTERS:
                    // A word of too many characters only has to be known to be so.
                    if (characters <= most_characters) {
                        if (bytes + is.length > LONGEST_WORD) { *flag = LEFT; return 0; }
                        std::memcpy(word + bytes, is.bytes, is.length);
                        bytes += is.length;
                    }
                    characters += is.count;
                    break;
                case GAP: flush(); break;
                case SIGN:
                    flush();
                    if (*flag == DONE) emit(reinterpret_cast<const uint8_t*>(is.bytes), is.length, 1);
                    break;
                case NOTHING: break;
                default: *flag = LEFT; return 0;
            }
        }
        if (*flag == DONE) flush();
        out += ids;
        for (int32_t id : after) *out++ = id;
        return ids + static_cast<int64_t>(before.size() + after.size());
    }
};

}  // namespace

// pieces: `count` texts in one block, piece i at [offsets[i], offsets[i + 1]), root 0 or 1. characters: `codes` entries of
// sizeof(Character). added: the added tokens' texts, separated by zeros. Null where there is no memory for it.
EXPORT void* wordpiece_new(const uint8_t* pieces, const int64_t* offsets, const uint8_t* roots, const int32_t* ids,
                           int64_t count, const uint8_t* characters, int64_t codes, const char* added,
                           int64_t added_length, const int32_t* before, int64_t befores, const int32_t* after,
                           int64_t afters, int32_t unknown, int64_t most_characters) {
    try {  // no exception may leave for the C of the caller
        std::unique_ptr<Tokenizer> made(new Tokenizer());
        for (int64_t i = 0; i < count; i++)
            made->trie.insert(roots[i], pieces + offsets[i], offsets[i + 1] - offsets[i], ids[i]);
        made->table.resize(codes);
        if (codes) std::memcpy(made->table.data(), characters, codes * sizeof(Character));
        // A text has no more tokens than bytes, which `wordpiece_room` relies on: what becomes more is for the reference.
        for (int64_t code = 0; code < codes; code++)
            if (made->table[code].count > (code < 0x80 ? 1 : code < 0x800 ? 2 : 3)) made->table[code].kind = UNKNOWN;
        for (int64_t begin = 0; begin < added_length;) {
            std::string one(added + begin);
            begin += static_cast<int64_t>(one.size()) + 1;
            if (one.empty()) continue;
            made->added_starts[static_cast<uint8_t>(one[0])] = true;
            made->added.push_back(one);
        }
        made->before.assign(before, before + befores);
        made->after.assign(after, after + afters);
        made->unknown = unknown;
        made->most_characters = most_characters;
        return made.release();
    } catch (const std::exception&) {
        return nullptr;
    }
}

EXPORT void wordpiece_delete(void* tokenizer) { delete static_cast<Tokenizer*>(tokenizer); }

EXPORT int64_t wordpiece_character_nbytes() { return sizeof(Character); }

// Where the UTF-8 of each str of a Python list lies: no copy is made of ASCII, and Python keeps the others' beside the str.
// The two functions are Python's own, PyList_GetItem and PyUnicode_AsUTF8AndSize, so that its headers are not needed here.
// Called with the GIL. Gives the number of bytes, or -1 with Python's error set: an item is no str, or has no UTF-8.
EXPORT int64_t wordpiece_gather(void* list, int64_t count, void* (*item)(void*, intptr_t),
                                const char* (*utf8)(void*, intptr_t*), const char** texts, int64_t* sizes) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        void* one = item(list, static_cast<intptr_t>(i));
        if (one == nullptr) return -1;
        intptr_t size = 0;
        texts[i] = utf8(one, &size);
        if (texts[i] == nullptr) return -1;
        sizes[i] = size;
        total += size;
    }
    return total;
}

// Room for the ids of texts of such sizes: a token takes a byte at least, and no text has more than `most`.
EXPORT int64_t wordpiece_room(const void* tokenizer, const int64_t* sizes, int64_t count, int64_t most) {
    const Tokenizer& it = *static_cast<const Tokenizer*>(tokenizer);
    const int64_t special = static_cast<int64_t>(it.before.size() + it.after.size());
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += std::min(sizes[i] + special, std::max(most, special));
    return total;
}

// `count` texts by at most `threads` threads. Fills ids (which must have the room asked for), starts [count + 1] and flags
// [count]; gives the number of ids, or -1 where there is no memory to share the work out.
EXPORT int64_t wordpiece_encode(const void* tokenizer, const char* const* texts, const int64_t* sizes, int64_t count,
                                int64_t most, int64_t threads, int32_t* ids, int32_t* starts, uint8_t* flags) {
    const Tokenizer& it = *static_cast<const Tokenizer*>(tokenizer);
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += sizes[i];
    // A thread may take a tenth of a millisecond to start: less than a few hundred texts' work is not worth one.
    threads = std::max<int64_t>(1, std::min({threads, count, bytes / 12288 + 1}));
    struct Share { int64_t first, last, room, made; };
    std::vector<Share> shares;
    std::vector<std::thread> others;
    try {
        shares.reserve(threads);
        others.reserve(threads);
    } catch (const std::exception&) {
        return -1;
    }
    for (int64_t first = 0, seen = 0, room = 0, part = 1; part <= threads; part++) {
        int64_t last = first, own = 0;
        while (last < count && (part == threads || seen * threads < bytes * part)) {
            seen += sizes[last];
            own += wordpiece_room(tokenizer, sizes + last, 1, most);
            last++;
        }
        shares.push_back({first, last, room, 0});
        room += own;
        first = last;
    }
    auto work = [&](Share& share) {
        int64_t made = 0;
        for (int64_t i = share.first; i < share.last; i++) {
            made += it.encode(reinterpret_cast<const uint8_t*>(texts[i]), sizes[i], most, ids + share.room + made, flags + i);
            starts[i + 1] = static_cast<int32_t>(made);  // from the share's own beginning
        }
        share.made = made;
    };
    for (size_t part = 1; part < shares.size(); part++) {
        try {
            others.emplace_back(work, std::ref(shares[part]));
        } catch (const std::exception&) {  // no more threads, or no memory for one: this one does it
            work(shares[part]);
        }
    }
    work(shares[0]);
    for (std::thread& other : others) other.join();
    int64_t total = 0;
    starts[0] = 0;
    for (const Share& share : shares) {
        if (total != share.room) std::memmove(ids + total, ids + share.room, share.made * sizeof(int32_t));
        for (int64_t i = share.first; i < share.last; i++) starts[i + 1] += static_cast<int32_t>(total);
        total += share.made;
    }
    return total;
}
