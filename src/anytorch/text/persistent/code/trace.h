// What each worker did, and when: words in a buffer of the caller's. The first is the number of workers; the rest is cut into equal
// parts for them.
//
// A part has a count of events, then for each of them: step * 65536 + layer * 256 + phase, and the nanosecond it ended at. It began
// where the one before it ended; the first is a beginning. What does not fit is not noted.
#pragma once
#include <chrono>
#include <cstdint>

enum Phase { BEGIN, WORDS, QUERIES, ATTENTION, OUT, GATED, DOWN, LOGITS, CHOICE, WAITING };

class Trace {
 public:
  Trace() = default;
  Trace(int64_t* all, int64_t words, int mine, int workers)
      : own(all + 1 + (words - 1) / workers * mine), left((words - 1) / workers - 1) {
    if (left > 0) own[0] = 0, all[0] = workers;
    else own = nullptr, all[0] = 0;
  }
  void begin(int64_t number) {
    step = number, layer = 0;
    did(BEGIN);
  }
  void did(Phase phase) {
    if (!own || left < 2) return;
    int64_t* event = own + 1 + 2 * own[0];
    event[0] = step << 16 | (layer & 255) << 8 | phase;
    event[1] = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    own[0]++, left -= 2;
    if (phase == DOWN) layer++;
  }

 private:
  int64_t* own = nullptr;
  int64_t left = 0, step = 0, layer = 0;
};
