#include "ops/cpu/block_pool.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#if defined(__linux__)
#  include <pthread.h>
#  include <sys/mman.h>
#endif

namespace pyg_dist {
namespace {

constexpr size_t kHugePage = 1 << 21;

#if defined(__linux__)

// Whole huge pages, in one piece of address space.
void* map(size_t size) {
  void* const mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + size, kHugePage - before);
  madvise(begin + before, size, MADV_HUGEPAGE);  // a hint; where it is refused nothing changes
  return begin + before;
}

void unmap(void* address, size_t size) { munmap(address, size); }

void let_kernel_take(void* address, size_t size) { madvise(address, size, MADV_FREE); }

#else

void* map(size_t) { return nullptr; }
void unmap(void*, size_t) {}
void let_kernel_take(void*, size_t) {}

#endif

}  // namespace

BlockPool& BlockPool::instance() {
  static BlockPool* const pool = new BlockPool;
  return *pool;
}

BlockPool::BlockPool() {
#if defined(__linux__)
  // A child begins with copies of all blocks, and with a mutex that nobody holds.
  pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                 [] { instance().mutex_.unlock(); });
#endif
}

void* BlockPool::take(size_t num_bytes) {
  const size_t size = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(waiting_.rbegin(), waiting_.rend(), [&](const Block& b) { return b.size == size; });
  void* address = nullptr;
  if (found != waiting_.rend()) {
    address = found->address;
    waiting_.erase(std::next(found).base());
    bytes_.waiting -= size;
  } else {
    const size_t limit = std::max(most_in_use_, bytes_.in_use + size);
    while (!waiting_.empty() && bytes_.in_use + bytes_.waiting + size > limit) unmap_longest_waiting();
    while ((address = map(size)) == nullptr && !waiting_.empty()) unmap_longest_waiting();
    if (address == nullptr) return nullptr;
  }
  in_use_.emplace(address, size);
  bytes_.in_use += size;
  most_in_use_ = std::max(most_in_use_, bytes_.in_use);
  return address;
}

void BlockPool::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(block);
  if (found == in_use_.end()) return;
  const size_t size = found->second;
  in_use_.erase(found);
  let_kernel_take(block, size);
  waiting_.push_back({block, size});
  bytes_.in_use -= size;
  bytes_.waiting += size;
}

void BlockPool::release() {
  const std::lock_guard lock(mutex_);
  while (!waiting_.empty()) unmap_longest_waiting();
  most_in_use_ = bytes_.in_use;
}

BlockPool::Bytes BlockPool::bytes() {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void BlockPool::unmap_longest_waiting() {
  const Block block = waiting_.front();
  waiting_.pop_front();
  unmap(block.address, block.size);
  bytes_.waiting -= block.size;
}

}  // namespace pyg_dist
