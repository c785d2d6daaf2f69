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

// Whole huge pages, in one piece of address space: as high as they fit, since Linux maps downwards, and next to what
// was mapped before them.
char* map(size_t size) {
  void* const mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const size_t after = reinterpret_cast<uintptr_t>(begin) % kHugePage, before = kHugePage - after;
  munmap(begin, before);
  if (after > 0) munmap(begin + before + size, after);
  madvise(begin + before, size, MADV_HUGEPAGE);  // a hint; where it is refused nothing changes
  return begin + before;
}

void unmap(void* address, size_t size) { munmap(address, size); }

// A huge page's memory from one address to another, which is mapped; one at a time, since a call may not span several
// of the kernel's areas. False, and the page is gone, where the system cannot.
bool move_page(void* from, void* to) {
  if (mremap(from, kHugePage, kHugePage, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) return true;
  munmap(from, kHugePage);
  mmap(to, kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);  // it may be unmapped
  return false;
}

void let_kernel_take(void* address, size_t size) { madvise(address, size, MADV_FREE); }

#else

char* map(size_t) { return nullptr; }
void unmap(void*, size_t) {}
bool move_page(void*, void*) { return false; }
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
  count_request();
  char* address = cut_from_waiting(size);
  if (address == nullptr) address = map_over_waiting(size);
  if (address == nullptr) return nullptr;
  in_use_.emplace(address, size);
  bytes_.in_use += size;
  most_in_use_ = std::max(most_in_use_, bytes_.in_use);
  return address;
}

void BlockPool::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(static_cast<char*>(block));
  if (found == in_use_.end()) return;
  const auto [address, size] = *found;
  in_use_.erase(found);
  bytes_.in_use -= size;
  let_kernel_take(address, size);
  wait(address, size);
}

void BlockPool::release() {
  const std::lock_guard lock(mutex_);
  unmap_down_to(0);
  most_in_use_ = most_before_ = bytes_.in_use;
}

BlockPool::Bytes BlockPool::bytes() {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

// The begin of the smallest piece that is large enough, or null.
char* BlockPool::cut_from_waiting(size_t size) {
  auto best = waiting_.end();
  for (auto piece = waiting_.begin(); piece != waiting_.end(); ++piece) {
    if (piece->second >= size && (best == waiting_.end() || piece->second < best->second)) best = piece;
  }
  if (best == waiting_.end()) return nullptr;
  const auto [address, found] = *best;
  waiting_.erase(best);
  if (found > size) waiting_.emplace(address + size, found - size);
  bytes_.waiting -= size;
  return address;
}

// New address space, and behind it the pages that wait, the smallest pieces' first; the rest is fresh.
char* BlockPool::map_over_waiting(size_t size) {
  char* begin = map(size);
  if (begin == nullptr) {
    unmap_down_to(0);
    begin = map(size);
  }
  if (begin == nullptr) return nullptr;
  for (size_t at = 0; at < size && !waiting_.empty(); at += kHugePage) {
    if (!move_page(cut_last_page(), begin + at)) break;
  }
  const size_t limit = std::max({most_in_use_, most_before_, bytes_.in_use + size});
  unmap_down_to(limit - bytes_.in_use - size);
  return begin;
}

// Of the smallest piece.
char* BlockPool::cut_last_page() {
  const auto least = smallest_piece();
  least->second -= kHugePage;
  bytes_.waiting -= kHugePage;
  char* const page = least->first + least->second;
  if (least->second == 0) waiting_.erase(least);
  return page;
}

BlockPool::Pieces::iterator BlockPool::smallest_piece() {
  return std::min_element(waiting_.begin(), waiting_.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; });
}

void BlockPool::wait(char* address, size_t size) {
  bytes_.waiting += size;
  const auto next = waiting_.upper_bound(address);
  if (next != waiting_.end() && address + size == next->first) {
    size += next->second;
    waiting_.erase(next);
  }
  const auto after = waiting_.upper_bound(address);
  if (after != waiting_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == address) {
      before->second += size;
      return;
    }
  }
  waiting_.emplace(address, size);
}

// Unmaps what is too much, of the smallest pieces first.
void BlockPool::unmap_down_to(size_t waiting) {
  while (bytes_.waiting > waiting) {
    const auto least = smallest_piece();
    const size_t size = std::min(least->second, bytes_.waiting - waiting);
    least->second -= size;
    unmap(least->first + least->second, size);
    if (least->second == 0) waiting_.erase(least);
    bytes_.waiting -= size;
  }
}

void BlockPool::count_request() {
  if (++num_requests_ < kWindow) return;
  num_requests_ = 0;
  most_before_ = most_in_use_;
  most_in_use_ = bytes_.in_use;
  const size_t limit = std::max(most_in_use_, most_before_);
  unmap_down_to(limit - bytes_.in_use);
}

}  // namespace pyg_dist
