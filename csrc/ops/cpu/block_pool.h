// Large blocks of memory that are used again.
//
// A full-batch epoch asks for the same few sizes again and again, mini-batches for sizes that vary. The C library maps
// each block over 32 MiB anew and unmaps it when it is freed, so that every write into it meets fresh pages; on a
// virtual machine the host may have to find them, too. Here a freed block waits, as one piece with free neighbours, for
// the next request that fits into it: docs/performance.md has the figures.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace pyg_dist {

// All members may be called from any thread.
//
// What the pool holds, what waits included, is never more than what was in use at once during the last one or two
// thousand requests, in whole huge pages. A request that fits into no waiting piece gets new addresses, behind which
// the memory of several pieces is moved (mremap), the smallest pieces first: only what waits nowhere is fresh. What
// waits is the kernel's to take (MADV_FREE) should memory become short. A call of mremap may not span several of the
// kernel's areas, of which Linux allows a process 65,530 (vm.max_map_count): what is moved has its own, and where there
// are kMostAreas, nothing is moved.
class BlockPool {
 public:
  static constexpr size_t kWorthIt = 2 << 20;  // bytes of the smallest block, a huge page

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
  static constexpr size_t kMostAreas = 1 << 14;
  static constexpr int kWindow = 1024;  // requests; a full-batch epoch makes some dozens

  using Pieces = std::map<char*, size_t>;  // sizes by address

  BlockPool();
  char* cut_from_waiting(size_t size);
  char* map_over_waiting(size_t size);
  Pieces::iterator area_before(char* address);
  void forget_areas(char* address, size_t size);
  void cut_end(Pieces::iterator piece, size_t size);
  Pieces::iterator smallest_piece();
  void wait(char* address, size_t size);
  void unmap_down_to(size_t waiting);
  void count_request();

  std::mutex mutex_;
  Pieces waiting_;  // of which no two touch
  Pieces in_use_;
  Pieces areas_;  // the kernel's, at most: it joins some
  Bytes bytes_{0, 0};
  size_t most_in_use_ = 0, most_before_ = 0;  // in this window of requests, and in the last one
  int num_requests_ = 0;                      // in this window
};

}  // namespace pyg_dist
