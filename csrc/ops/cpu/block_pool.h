// Large blocks of memory that are used again.
//
// A full-batch epoch asks for the same few sizes again and again. The C library maps each block over 32 MiB anew and
// unmaps it when it is freed, so that every write into it meets fresh pages; on a virtual machine the host may have to
// find them, too. Here a freed block waits for the next request of its size: docs/performance.md has the figures.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace pyg_dist {

// All members may be called from any thread.
//
// What the pool holds, blocks that wait included, is never more than what was in use at once at some time, in whole
// huge pages: a request that no waiting block fits maps new memory only after those that have waited longest have made
// room for it below that mark. A block that waits is the kernel's to take (MADV_FREE) should memory become short.
class BlockPool {
 public:
  static constexpr size_t kWorthIt = 8 << 20;  // bytes of the smallest block; below, the C library's heap does well

  struct Bytes {
    size_t in_use, waiting;
  };

  // The pool of this process. It is never destroyed, since tensors may outlive whatever is destroyed at exit.
  static BlockPool& instance();

  // Uninitialised memory, on the boundary of a huge page; null where there is none, or the system is not Linux.
  void* take(size_t num_bytes);

  // What take() returned; nothing happens the second time.
  void give_back(void* block);

  // Returns all blocks that wait to the system.
  void release();

  Bytes bytes();

 private:
  struct Block {
    void* address;
    size_t size;
  };

  BlockPool();
  void unmap_longest_waiting();

  std::mutex mutex_;
  std::deque<Block> waiting_;                 // the one that has waited longest comes first
  std::unordered_map<void*, size_t> in_use_;  // sizes
  Bytes bytes_{0, 0};
  size_t most_in_use_ = 0;
};

}  // namespace pyg_dist
