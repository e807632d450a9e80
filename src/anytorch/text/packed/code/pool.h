// A small pool of threads that sleep while there is nothing to do (no spinning: other processes share the cores).
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), pid_(getpid()) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      closing_ = true;
    }
    begin_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  int threads() const { return threads_; }
  bool alive() const { return pid_ == getpid(); }  // not in a child of fork: it has none of the threads

  // Calls task(item, thread) for every item in [0, items); returns when all are done. Not reentrant.
  void run(int items, const std::function<void(int, int)>& task) {
    if (items <= 1 || threads_ == 1) {
      for (int i = 0; i < items; i++) task(i, 0);
      return;
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      task_ = &task;
      items_ = items;
      next_.store(0);
      busy_ = threads_ - 1;
      round_++;
    }
    begin_.notify_all();
    take(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    task_ = nullptr;
  }

 private:
  void take(int thread) {
    for (int i; (i = next_.fetch_add(1)) < items_;) (*task_)(i, thread);
  }
  void work(int thread) {
    long seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        begin_.wait(lock, [&] { return closing_ || round_ != seen; });
        if (closing_) return;
        seen = round_;
      }
      take(thread);
      std::lock_guard<std::mutex> guard(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  int threads_;
  pid_t pid_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable begin_, done_;
  const std::function<void(int, int)>* task_ = nullptr;
  std::atomic<int> next_{0};
  int items_ = 0, busy_ = 0;
  long round_ = 0;
  bool closing_ = false;
};
