// Threads that stay between calls: starting one takes some 35 microseconds, one after the other, and a call may be a single token.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <unistd.h>
#endif

// Whoever computes alone at that time has a crew of its own; it goes back to those that wait, of which two are kept.
class Crew {
 public:
  ~Crew() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      closing = true;
    }
    begin.notify_all();
    for (auto& thread : threads) thread.join();
  }

  // One that waits, or a new one; with `wanted` members, the caller counted, or as many as the system gives threads for.
  static std::unique_ptr<Crew> take(int wanted) {
    std::unique_ptr<Crew> crew;
    {
      Waiting& all = waiting();
      std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);  // a fork may have left it locked: then it stays so
      if (lock.owns_lock()) {
        if (all.process != process()) {  // a child of fork: the threads are its parent's
          for (auto& one : all.crews) one.release();
          all.crews.clear(), all.process = process();
        }
        if (!all.crews.empty()) crew = std::move(all.crews.back()), all.crews.pop_back();
      }
    }
    if (!crew) crew.reset(new Crew);
    crew->grow(wanted);
    return crew;
  }
  static void give_back(std::unique_ptr<Crew> crew) {
    Waiting& all = waiting();
    std::unique_lock<std::mutex> lock(all.mutex, std::try_to_lock);
    if (lock.owns_lock() && all.process == process() && all.crews.size() < all.crews.capacity()) all.crews.push_back(std::move(crew));
  }

  int members() const { return 1 + (int)threads.size(); }
  // Calls work(i) for each i below `count`, which is at most `members()`, at the same time; the caller is 0.
  void run(int count, const std::function<void(int)>& work) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      task = &work, wanted = count, left = count - 1, round++;
    }
    begin.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return left == 0; });
  }

 private:
  struct Waiting {
    Waiting() { crews.reserve(2); }
    std::mutex mutex;
    std::vector<std::unique_ptr<Crew>> crews;
    long process = Crew::process();
  };
  static Waiting& waiting() {
    static Waiting* all = new Waiting;  // not freed at exit: threads may outlive static objects
    return *all;
  }
  static long process() {
#if defined(_WIN32)
    return 0;
#else
    return (long)getpid();
#endif
  }

  void grow(int members) {
    try {
      threads.reserve(members);
      while ((int)threads.size() + 1 < members) threads.emplace_back([this, mine = (int)threads.size() + 1] { live(mine); });
    } catch (const std::system_error&) {  // fewer, then
    }
  }
  void live(int mine) {
    std::unique_lock<std::mutex> lock(mutex);
    for (uint64_t seen = 0;;) {
      begin.wait(lock, [&] { return closing || round != seen; });
      if (closing) return;
      seen = round;
      if (mine >= wanted) continue;
      lock.unlock();
      (*task)(mine);
      lock.lock();
      if (--left == 0) done.notify_one();
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable begin, done;
  const std::function<void(int)>* task = nullptr;
  int wanted = 0, left = 0;
  uint64_t round = 0;
  bool closing = false;
};
