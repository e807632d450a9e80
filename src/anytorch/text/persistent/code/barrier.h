// Where workers wait for one another between two phases, and fetch what they read next meanwhile.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "simd.h"

constexpr int SPINS = 2000;  // looks at a barrier, some 50 microseconds
constexpr int LINE = 64;     // bytes that memory is fetched in

struct Memory {
  const char* begin;
  int64_t nbytes;
};
INLINE void fetch(Memory memory) {
  for (int64_t i = 0; i < memory.nbytes; i += LINE) __builtin_prefetch(memory.begin + i, 0, 2);
}

// Who comes early fetches what it reads next, looks on for a while, then sleeps: where others want the cores, looking on takes them
// from whoever is late.
class Barrier {
 public:
  explicit Barrier(int workers) : workers(workers) {}
  void wait(Memory ahead = {nullptr, 0}) {
    const int seen = turn.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == workers - 1) {
      arrived.store(0, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> guard(mutex);
        turn.store(seen + 1, std::memory_order_release);
      }
      next.notify_all();
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (turn.load(std::memory_order_acquire) != seen) return;
      const int64_t few = std::min<int64_t>(ahead.nbytes, 4 * LINE);
      fetch({ahead.begin, few});
      ahead.begin += few, ahead.nbytes -= few;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    next.wait(lock, [&] { return turn.load(std::memory_order_acquire) != seen; });
  }
  const int workers;

 private:
  std::atomic<int> arrived{0}, turn{0};
  std::mutex mutex;
  std::condition_variable next;
};
