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

// ---- Fibers -------------------------------------------------------------------------------------------------------

constexpr size_t kStackBytes = 256 << 10;  // what is not touched takes no memory

enum class State : uint8_t { runs, waits_for_block, waits_for_lanes, ended };

struct Fiber {
  Context context;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  State state = State::ended;
  bool is_ballot = false;
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
    for (Fiber& fiber : fibers_) munmap(fiber.stack, kStackBytes);
  }

  void run(const Launch& launch) {
    if (launch_ != nullptr) throw std::runtime_error("simt: a kernel launches another one");
    launch_ = &launch;
    make_fibers(static_cast<size_t>(launch.num_threads));
    // As a unit of its own, so that AddressSanitizer knows its ends.
    const auto shared = std::make_unique_for_overwrite<char[]>(launch.shared_bytes);
    shared_ = shared.get();
    std::vector<int64_t> blocks(static_cast<size_t>(launch.num_blocks * launch.num_slices));
    std::iota(blocks.begin(), blocks.end(), int64_t{0});
    for (size_t k = blocks.size(); k > 0; --k) {
      std::swap(blocks[k - 1], blocks[draw(k)]);
      block_ = blocks[k - 1] % launch.num_blocks;
      slice_ = blocks[k - 1] / launch.num_blocks;
      std::memset(shared_, 0xff, launch.shared_bytes);
      run_block();
      if (error_) break;
    }
    launch_ = nullptr;
    if (error_) {
      fibers_changed();  // what waits in the middle of a kernel never goes on
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
      finish_switch(fibers_[static_cast<size_t>(current_)].fake_stack);
      try {
        while (true) {
          launch_->body(launch_->kernel, shared_);
          fibers_[static_cast<size_t>(current_)].state = State::ended;
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
    const auto count = static_cast<uint64_t>(launch_->num_threads), first = draw(count);
    for (uint64_t k = first; k < first + count; ++k) {
      const auto thread = static_cast<int>(k % count);
      if (thread != current_) release(thread);
    }
    go_on(own);
  }

  uint64_t exchange(Site site, uint32_t lanes, uint64_t value, int from, bool is_ballot) {
    const int warp = current_ / kWarp * kWarp, lane = current_ % kWarp;
    if ((lanes >> lane & 1) == 0) fail(text(site), ": a lane leaves itself out");
    if ((lanes >> from & 1) == 0) fail(text(site), ": from a lane that takes no part");
    Fiber& own = wait(State::waits_for_lanes, site);
    own.lanes = lanes;
    own.value = value;
    own.from = from;
    own.is_ballot = is_ballot;
    bool all_here = true;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const Fiber& other = fibers_[static_cast<size_t>(warp + std::countr_zero(rest))];
      if (other.state == State::runs) {
        all_here = false;
      } else if (other.state != State::waits_for_lanes || !same(other.site, site) || other.lanes != lanes) {
        fail(text(site), ": waits for a lane that " +
                             (other.state == State::ended ? "has ended" : "waits elsewhere, in " + text(other.site)));
      }
    }
    if (all_here) {
      uint64_t results[kWarp];
      uint64_t votes = 0;
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int other = std::countr_zero(rest);
        const Fiber& fiber = fibers_[static_cast<size_t>(warp + other)];
        results[other] = fibers_[static_cast<size_t>(warp + fiber.from)].value;
        votes |= fiber.value << other;
      }
      for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
        const int other = std::countr_zero(rest);
        fibers_[static_cast<size_t>(warp + other)].value = is_ballot ? votes : results[other];
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

  void make_fibers(size_t count) {
    while (fibers_.size() < count) {
      Fiber fiber;
      void* const stack =
          mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) throw std::runtime_error("simt: no memory for the stacks of a block");
      mprotect(stack, 4096, PROT_NONE);
      fiber.stack = static_cast<char*>(stack);
      fiber.context.start(fiber.stack, kStackBytes, enter);
      fibers_.push_back(fiber);
    }
  }

  void fibers_changed() {
    for (Fiber& fiber : fibers_) {
      fiber.context.start(fiber.stack, kStackBytes, enter);
      fiber.fake_stack = nullptr;
    }
  }

  void run_block() {
    const int num_threads = launch_->num_threads;
    ready_.resize(static_cast<size_t>(num_threads));
    std::iota(ready_.begin(), ready_.end(), 0);
    for (int k = 0; k < num_threads; ++k) fibers_[static_cast<size_t>(k)].state = State::runs;
    num_at_barrier_ = 0;
    // In every second block those that were released last come first: one warp runs as far ahead of the others as it
    // can.
    const bool runs_ahead = draw(2) == 0;
    while (!ready_.empty() && !error_) {
      if (!runs_ahead) std::swap(ready_[draw(ready_.size())], ready_.back());
      current_ = ready_.back();
      ready_.pop_back();
      start_switch(host_fake_stack_, fibers_[static_cast<size_t>(current_)].stack, kStackBytes);
      host_.switch_to(fibers_[static_cast<size_t>(current_)].context);
      finish_switch(host_fake_stack_);
    }
    if (error_) return;
    for (int k = 0; k < num_threads; ++k) {
      const Fiber& fiber = fibers_[static_cast<size_t>(k)];
      if (fiber.state == State::ended) continue;
      try {
        fail(text(fiber.site), ": thread " + std::to_string(k) + " waits for threads that never come");
      } catch (...) {
        error_ = std::current_exception();
      }
      return;
    }
  }

  Fiber& wait(State state, Site site) {
    Fiber& own = fibers_[static_cast<size_t>(current_)];
    own.state = state;
    own.site = site;
    return own;
  }

  void release(int thread) {
    fibers_[static_cast<size_t>(thread)].state = State::runs;
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
    Fiber& own = fibers_[static_cast<size_t>(current_)];
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
  std::deque<Fiber> fibers_;  // those that wait are referred to
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

uint64_t exchange(Site site, uint32_t lanes, uint64_t value, int from) {
  return Scheduler::of_this_thread().exchange(site, lanes, value, from, false);
}

uint32_t ballot(Site site, uint32_t lanes, bool is_true) {
  const uint64_t votes = Scheduler::of_this_thread().exchange(site, lanes, is_true, thread() % kWarp, true);
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
