#include "fibers.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#  include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#  include <sanitizer/common_interface_defs.h>
#endif

#if defined(PYG_DIST_SIMT_RACES)
#  include <sanitizer/tsan_interface.h>
#endif

namespace pyg_dist::simt {
namespace {

// ---- One register file to another ---------------------------------------------------------------------------------

#if defined(__x86_64__)

// swapcontext also asks the system for the signals' mask: 0.9 us, and this 0.01.
extern "C" void pyg_dist_simt_switch(void** from, void* to);
asm(R"(
  .text
  .hidden pyg_dist_simt_switch
  .globl pyg_dist_simt_switch
  .type pyg_dist_simt_switch, @function
pyg_dist_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pyg_dist_simt_switch, .-pyg_dist_simt_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void start(char* stack, size_t size, void (*entry)()) {
    auto* top =
        reinterpret_cast<void**>(stack + size) - 2;  // as if entry had been called: 8 bytes off a multiple of 16
    top[1] = nullptr;
    top[0] = reinterpret_cast<void*>(entry);
    stack_pointer = top - 6;
    std::memset(stack_pointer, 0, 6 * sizeof(void*));
  }
  void switch_to(Context& other) { pyg_dist_simt_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t registers;

  void start(char* stack, size_t size, void (*entry)()) {
    getcontext(&registers);
    registers.uc_stack.ss_sp = stack;
    registers.uc_stack.ss_size = size;
    registers.uc_link = nullptr;
    makecontext(&registers, entry, 0);
  }
  void switch_to(Context& other) { swapcontext(&registers, &other.registers); }
};

#endif

// ---- Who waits for whom, as ThreadSanitizer is told ----------------------------------------------------------------
//
// To it each thread of a block is a thread of its own, and what orders their accesses to memory is what would on a GPU:
// block_sync, warp_sync, and the begin and end of a launch. A shuffle or ballot orders nothing, nor does one block
// another: blocks take turns by several sets of fibers, so that most pairs of them have different threads.
//
// This file is compiled without the sanitizer, and linked first, so that its own memory is nobody's race.

#if defined(PYG_DIST_SIMT_RACES)

constexpr int kSets = 3;

struct Observed {
  void* fiber = nullptr;

  static Observed of_this_thread() { return {__tsan_get_current_fiber()}; }
  static Observed made() { return {__tsan_create_fiber(0)}; }
  void goes_on() const { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
};

// All that these have done comes before what `others` do next. Both stand still.
template <class Before, class After>
void order(const Before& before, const After& after, char* by) {
  const Observed own = Observed::of_this_thread();
  before([by](const Observed& one) {
    one.goes_on();
    __tsan_release(by);
  });
  after([by](const Observed& one) {
    one.goes_on();
    __tsan_acquire(by);
  });
  own.goes_on();
}

#else

constexpr int kSets = 1;

struct Observed {
  static Observed of_this_thread() { return {}; }
  static Observed made() { return {}; }
  void goes_on() const {}
};

template <class Before, class After>
void order(const Before&, const After&, char*) {}

#endif

// ---- Fibers -------------------------------------------------------------------------------------------------------

constexpr size_t kStackBytes = 256 << 10;  // what is not touched takes no memory

enum class Exchange : uint8_t { sync, shuffle, ballot };
enum class State : uint8_t { runs, waits_for_block, waits_for_lanes, ended };

struct Fiber {
  Context context;
  Observed observed;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  State state = State::ended;
  char of_block = 0, of_lanes = 0;  // what orders those that wait, by the first one of them
  Site site{};
  uint32_t lanes = 0;
  uint64_t value = 0;
  int from = 0;
};

void enter();

class Scheduler {
 public:
  static Scheduler& of_this_thread() {
    static thread_local Scheduler scheduler;
    return scheduler;
  }

  ~Scheduler() {
    for (auto& set : fibers_) {
      for (Fiber& fiber : set) munmap(fiber.stack, kStackBytes);
    }
  }

  void run(const Launch& launch) {
    if (launch_ != nullptr) throw std::runtime_error("simt: a kernel launches another one");
    launch_ = &launch;
    for (auto& set : fibers_) make_fibers(set, static_cast<size_t>(launch.num_threads));
    const Observed host = Observed::of_this_thread();
    const auto of_host = [&](const auto& f) { f(host); };
    const auto of_none = [](const auto&) {};
    const auto of_block = [&](const auto& f) { for_lanes(0, launch.num_threads, f); };
    // Of each block, as units of their own, so that AddressSanitizer knows their ends.
    std::vector<std::unique_ptr<char[]>> shared;
    std::vector<int64_t> blocks(static_cast<size_t>(launch.num_blocks * launch.num_slices));
    std::iota(blocks.begin(), blocks.end(), int64_t{0});
    for (size_t k = blocks.size(); k > 0; --k) {
      std::swap(blocks[k - 1], blocks[draw(k)]);
      block_ = blocks[k - 1] % launch.num_blocks;
      slice_ = blocks[k - 1] / launch.num_blocks;
      set_ = draw_set();
      shared_ = shared.emplace_back(std::make_unique_for_overwrite<char[]>(launch.shared_bytes)).get();
      std::memset(shared_, 0xff, launch.shared_bytes);
      order(of_host, of_block, &begin_);
      run_block();
      if (error_) break;
      order(of_block, of_none, &end_);
    }
    order(of_none, of_host, &end_);
    launch_ = nullptr;
    if (error_) {
      for (auto& set : fibers_) start_again(set);  // what waits in the middle of a kernel never goes on
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  void seed(uint64_t seed) { state_ = seed * 0x9e3779b97f4a7c15u + 1; }

  int thread() const { return current_; }
  int64_t block() const { return block_; }
  int64_t slice() const { return slice_; }

  // Of a fiber: runs what comes until its launch ends.
  void live() {
    while (true) {
      finish_switch(fiber(current_).fake_stack);
      try {
        while (true) {
          launch_->body(launch_->kernel, shared_);
          fiber(current_).state = State::ended;
          leave();
        }
      } catch (...) {
        error_ = std::current_exception();
      }
      leave();
    }
  }

  void block_sync(Site site) {
    if (num_at_barrier_ == 0) barrier_ = site;
    if (!same(site, barrier_)) {
      fail("threads of a block meet at two barriers: ", text(barrier_) + " and " + text(site));
    }
    Fiber& own = wait(State::waits_for_block, site);
    if (++num_at_barrier_ < launch_->num_threads) {
      leave();
      return;
    }
    num_at_barrier_ = 0;
    const auto everyone = [&](const auto& f) { for_lanes(0, launch_->num_threads, f); };
    order(everyone, everyone, &fiber(0).of_block);
    const auto count = static_cast<uint64_t>(launch_->num_threads), first = draw(count);
    for (uint64_t k = first; k < first + count; ++k) {
      const auto thread = static_cast<int>(k % count);
      if (thread != current_) release(thread);
    }
    go_on(own);
  }

  uint64_t exchange(Site site, uint32_t lanes, uint64_t value, int from, Exchange kind) {
    const int warp = current_ / kWarp * kWarp, lane = current_ % kWarp;
    if ((lanes >> lane & 1) == 0) fail(text(site), ": a lane leaves itself out");
    if ((lanes >> from & 1) == 0) fail(text(site), ": from a lane that takes no part");
    Fiber& own = wait(State::waits_for_lanes, site);
    own.lanes = lanes;
    own.value = value;
    own.from = from;
    bool all_here = true;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const Fiber& other = fiber(warp + std::countr_zero(rest));
      if (other.state == State::runs) {
        all_here = false;
      } else if (other.state != State::waits_for_lanes || !same(other.site, site) || other.lanes != lanes) {
        fail(text(site), ": waits for a lane that " +
                             (other.state == State::ended ? "has ended" : "waits elsewhere, in " + text(other.site)));
      }
    }
    if (all_here) {
      if (kind == Exchange::sync) {
        const auto lanes_here = [&](const auto& f) {
          for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) f(fiber(warp + std::countr_zero(rest)).observed);
        };
        order(lanes_here, lanes_here, &fiber(warp + std::countr_zero(lanes)).of_lanes);
      }
      uint64_t results[kWarp];
      uint64_t votes = 0;
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int other = std::countr_zero(rest);
        const Fiber& one = fiber(warp + other);
        results[other] = fiber(warp + one.from).value;
        votes |= one.value << other;
      }
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int other = std::countr_zero(rest);
        fiber(warp + other).value = kind == Exchange::ballot ? votes : results[other];
        if (other != lane) release(warp + other);
      }
      go_on(own);
    } else {
      leave();
    }
    return own.value;
  }

  [[noreturn]] static void fail(const std::string& where, const std::string& what) {
    throw std::runtime_error("simt: " + where + what);
  }

 private:
  static bool same(const Site& a, const Site& b) {
    return a.line == b.line && a.column == b.column && std::strcmp(a.file, b.file) == 0;
  }
  static std::string text(const Site& site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(site.word) + " (" + (slash == nullptr ? site.file : slash + 1) + ":" +
           std::to_string(site.line) + ")";
  }

  Fiber& fiber(int thread) { return fibers_[set_][static_cast<size_t>(thread)]; }

  template <class F>
  void for_lanes(int begin, int end, const F& f) {
    for (int k = begin; k < end; ++k) f(fiber(k).observed);
  }

  size_t draw_set() { return kSets == 1 ? 0 : static_cast<size_t>(draw(kSets)); }

  static void make_fibers(std::deque<Fiber>& set, size_t count) {
    while (set.size() < count) {
      Fiber fiber;
      void* const stack =
          mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) throw std::runtime_error("simt: no memory for the stacks of a block");
      mprotect(stack, 4096, PROT_NONE);
      fiber.stack = static_cast<char*>(stack);
      fiber.observed = Observed::made();
      fiber.context.start(fiber.stack, kStackBytes, enter);
      set.push_back(fiber);
    }
  }

  static void start_again(std::deque<Fiber>& set) {
    for (Fiber& fiber : set) {
      fiber.context.start(fiber.stack, kStackBytes, enter);
      fiber.fake_stack = nullptr;
    }
  }

  void run_block() {
    const int num_threads = launch_->num_threads;
    ready_.resize(static_cast<size_t>(num_threads));
    std::iota(ready_.begin(), ready_.end(), 0);
    for (int k = 0; k < num_threads; ++k) fiber(k).state = State::runs;
    num_at_barrier_ = 0;
    // In every second block those that were released last come first: one warp runs as far ahead of the others as it
    // can.
    const bool runs_ahead = draw(2) == 0;
    while (!ready_.empty() && !error_) {
      if (!runs_ahead) std::swap(ready_[draw(ready_.size())], ready_.back());
      current_ = ready_.back();
      ready_.pop_back();
      start_switch(host_fake_stack_, fiber(current_).stack, kStackBytes);
      const Observed host = Observed::of_this_thread();
      fiber(current_).observed.goes_on();
      host_.switch_to(fiber(current_).context);
      host.goes_on();
      finish_switch(host_fake_stack_);
    }
    if (error_) return;
    for (int k = 0; k < num_threads; ++k) {
      const Fiber& one = fiber(k);
      if (one.state == State::ended) continue;
      try {
        fail(text(one.site), ": thread " + std::to_string(k) + " waits for threads that never come");
      } catch (...) {
        error_ = std::current_exception();
      }
      return;
    }
  }

  Fiber& wait(State state, Site site) {
    Fiber& own = fiber(current_);
    own.state = state;
    own.site = site;
    return own;
  }

  void release(int thread) {
    fiber(thread).state = State::runs;
    ready_.push_back(thread);
  }

  // The last one to come: now, or in its turn.
  void go_on(Fiber& own) {
    own.state = State::runs;
    if (draw(2) == 0) return;
    ready_.push_back(current_);
    leave();
  }

  void leave() {
    Fiber& own = fiber(current_);
    start_switch(own.fake_stack, host_stack_, host_stack_bytes_);
    own.context.switch_to(host_);
    finish_switch(own.fake_stack);
  }

  uint64_t draw(uint64_t count) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % count;
  }

#if defined(__SANITIZE_ADDRESS__)
  void start_switch(void*& fake_stack, const void* bottom, size_t size) {
    __sanitizer_start_switch_fiber(&fake_stack, bottom, size);
  }
  void finish_switch(void* fake_stack) {
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
    if (host_stack_ == nullptr) {  // the first one to come from there
      host_stack_ = bottom;
      host_stack_bytes_ = size;
    }
  }
#else
  void start_switch(void*&, const void*, size_t) {}
  void finish_switch(void*) {}
#endif

  const Launch* launch_ = nullptr;
  char* shared_ = nullptr;
  std::deque<Fiber> fibers_[kSets];  // those that wait are referred to
  size_t set_ = 0;
  char begin_ = 0, end_ = 0;  // of launches, as ThreadSanitizer knows them
  std::vector<int> ready_;
  Context host_;
  void* host_fake_stack_ = nullptr;
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
  int current_ = 0;
  int64_t block_ = 0, slice_ = 0;
  int num_at_barrier_ = 0;
  Site barrier_{};
  std::exception_ptr error_;
  uint64_t state_ = [] {
    const char* seed = std::getenv("PYG_DIST_SIMT_SEED");
    return (seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10)) * 0x9e3779b97f4a7c15u + 1;
  }();
};

void enter() { Scheduler::of_this_thread().live(); }

}  // namespace

int thread() { return Scheduler::of_this_thread().thread(); }
int64_t block() { return Scheduler::of_this_thread().block(); }
int64_t slice() { return Scheduler::of_this_thread().slice(); }

void block_sync(Site site) { Scheduler::of_this_thread().block_sync(site); }

void warp_sync(Site site, uint32_t lanes) {
  Scheduler::of_this_thread().exchange(site, lanes, 0, thread() % kWarp, Exchange::sync);
}

uint64_t exchange(Site site, uint32_t lanes, uint64_t value, int from) {
  return Scheduler::of_this_thread().exchange(site, lanes, value, from, Exchange::shuffle);
}

uint32_t ballot(Site site, uint32_t lanes, bool is_true) {
  const uint64_t votes = Scheduler::of_this_thread().exchange(site, lanes, is_true, thread() % kWarp, Exchange::ballot);
  return static_cast<uint32_t>(votes);
}

void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    Scheduler::fail("", "a load or store of " + std::to_string(bytes) + " bytes at an address that is no multiple");
  }
}

void run(const Launch& launch) { Scheduler::of_this_thread().run(launch); }

void set_seed(uint64_t seed) { Scheduler::of_this_thread().seed(seed); }

}  // namespace pyg_dist::simt
