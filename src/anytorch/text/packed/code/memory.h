// Blocks of memory aligned to a cache line, and to 2 MB when they are large so that the system may use large pages.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

// nullptr where there is no memory.
inline void* aligned_memory(size_t bytes, size_t alignment) {
#if defined(_WIN32)
  return _aligned_malloc(bytes, alignment);
#else
  void* p = nullptr;
  return posix_memalign(&p, alignment, bytes) == 0 ? p : nullptr;
#endif
}

inline void free_aligned(void* p) {
#if defined(_WIN32)
  _aligned_free(p);
#else
  free(p);
#endif
}

template <class T>
class Block {
 public:
  Block() = default;
  explicit Block(size_t count) { resize(count); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  Block(Block&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr, other.count_ = 0; }
  Block& operator=(Block&& other) noexcept {
    if (this != &other) {
      free_aligned(data_);
      data_ = other.data_, count_ = other.count_;
      other.data_ = nullptr, other.count_ = 0;
    }
    return *this;
  }
  ~Block() { free_aligned(data_); }

  // Forgets the contents when it grows; all zero then.
  void resize(size_t count) {
    free_aligned(data_);
    data_ = nullptr, count_ = 0;
    if (count == 0) return;
    size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;  // one line more: the last vector may read past the end
    const size_t large = size_t(2) << 20;
    void* p = aligned_memory(bytes, bytes >= large ? large : 64);
    if (!p) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= large) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    data_ = static_cast<T*>(p), count_ = count;
  }
  void at_least(size_t count) {
    if (count > count_) resize(count);
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t nbytes() const { return count_ * sizeof(T); }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};
