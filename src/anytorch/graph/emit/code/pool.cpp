// The workers that run generated kernels: one pool for the process, shared by all kernels and all threads that call them.
//
// A worker looks for work for a few microseconds before it goes to sleep: kernels come one after another, and waking a thread
// takes longer than many of them run. Who wakes up too late to help is not waited for. Whoever calls while the pool is busy
// computes alone rather than wait.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

typedef void (*Kernel)(void**, const int64_t*, int64_t, int64_t);

namespace {

constexpr auto SPIN = std::chrono::microseconds(30);

struct Work {
  Kernel kernel;
  void** buffers;
  const int64_t* sizes;
  int64_t items, grain;
  std::atomic<int64_t> next{0};

  void take() {
    for (int64_t first; (first = next.fetch_add(grain)) < items;)
      kernel(buffers, sizes, first, first + grain < items ? first + grain : items);
  }
};

class Pool {
 public:
  explicit Pool(int threads) : pid(getpid()), wanted(threads) {
    for (int i = 1; i < threads; i++) workers.emplace_back([this] { live(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      closing.store(true);
    }
    begin.notify_all();
    for (auto& worker : workers) worker.join();
  }

  void run(Work& work) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      current = &work;
      round.fetch_add(1);
    }
    begin.notify_all();
    work.take();
    {
      std::lock_guard<std::mutex> guard(mutex);
      current = nullptr;  // who comes from here on finds nothing to do
    }
    auto until = std::chrono::steady_clock::now() + SPIN;
    while (helping.load() && std::chrono::steady_clock::now() < until) {}
    if (helping.load()) {
      std::unique_lock<std::mutex> lock(mutex);
      done.wait(lock, [this] { return helping.load() == 0; });
    }
  }

  const pid_t pid;
  const int wanted;

 private:
  void live() {
    int64_t seen = 0;
    for (;;) {
      auto until = std::chrono::steady_clock::now() + SPIN;
      while (round.load() == seen && !closing.load() && std::chrono::steady_clock::now() < until) {}
      Work* work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        begin.wait(lock, [&] { return closing.load() || round.load() != seen; });
        if (closing.load()) return;
        seen = round.load();
        work = current;
        if (!work) continue;  // the others were faster
        helping.fetch_add(1);
      }
      work->take();
      if (helping.fetch_sub(1) == 1) {
        std::lock_guard<std::mutex> guard(mutex);
        done.notify_one();
      }
    }
  }

  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable begin, done;
  Work* current = nullptr;
  std::atomic<int64_t> round{0};
  std::atomic<int> helping{0};
  std::atomic<bool> closing{false};
};

std::mutex entrance;
Pool* pool = nullptr;  // not freed at exit: its threads may outlive static objects

}  // namespace

extern "C" __attribute__((visibility("default"))) void run_kernel(
    Kernel kernel, void** buffers, const int64_t* sizes, int64_t items, int threads) {
  std::unique_lock<std::mutex> lock(entrance, std::try_to_lock);
  if (threads < 2 || items < 2 || !lock.owns_lock()) {
    kernel(buffers, sizes, 0, items);
    return;
  }
  if (pool && pool->pid != getpid()) pool = nullptr;  // a child of fork: the threads are its parent's
  if (pool && pool->wanted != threads) {
    delete pool;
    pool = nullptr;
  }
  if (!pool) pool = new Pool(threads);
  Work work{kernel, buffers, sizes, items, 1};
  work.grain = items > 64 * threads ? items / (32 * threads) : 1;
  pool->run(work);
}
