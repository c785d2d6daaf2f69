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
  munmap(begin, before);  // where it fails, addresses are lost that nobody has touched
  if (after > 0) munmap(begin + before + size, after);
  madvise(begin + before, size, MADV_HUGEPAGE);  // a hint; where it is refused nothing changes
  return begin + before;
}

// False: it stays, as where that would make more areas than the system allows.
bool unmap(void* address, size_t size) { return munmap(address, size) == 0; }

// Memory of one area from one address to another, which is mapped. False: it stays, and nothing may be mapped there.
bool move(void* from, void* to, size_t size) {
  return mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

bool map_again(void* address, size_t size) {
  return mmap(address, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

void let_kernel_take(void* address, size_t size) { madvise(address, size, MADV_FREE); }

#else

char* map(size_t) { return nullptr; }
bool unmap(void*, size_t) { return false; }
bool move(void*, void*, size_t) { return false; }
bool map_again(void*, size_t) { return false; }
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

// New address space, and behind it the memory that waits, the smallest pieces' first; the rest is fresh.
char* BlockPool::map_over_waiting(size_t size) {
  char* begin = map(size);
  if (begin == nullptr) {
    unmap_down_to(0);
    begin = map(size);
  }
  if (begin == nullptr) return nullptr;
  areas_.emplace(begin, size);
  for (size_t at = 0; at < size && !waiting_.empty() && areas_.size() < kMostAreas;) {
    const auto least = smallest_piece();
    char* const end = least->first + least->second;
    const size_t length = std::min({least->second, size - at, static_cast<size_t>(end - area_before(end)->first)});
    if (!move(end - length, begin + at, length)) {
      if (map_again(begin + at, length)) break;
      unmap(begin, at);  // a hole is in the block
      unmap(begin + at + length, size - at - length);
      forget_areas(begin, size);
      return nullptr;
    }
    forget_areas(end - length, length);
    cut_end(least, length);
    forget_areas(begin + at, length);
    areas_.emplace(begin + at, length);
    at += length;
  }
  const size_t limit = std::max({most_in_use_, most_before_, bytes_.in_use + size});
  unmap_down_to(limit - bytes_.in_use - size);
  return begin;
}

// The last area that begins before an address.
BlockPool::Pieces::iterator BlockPool::area_before(char* address) { return std::prev(areas_.lower_bound(address)); }

// Neither an area nor a part of one lies there any more.
void BlockPool::forget_areas(char* address, size_t size) {
  char* const end = address + size;
  while (true) {
    const auto last = areas_.lower_bound(end);
    if (last == areas_.begin()) return;
    const auto [begin, length] = *std::prev(last);
    if (begin + length <= address) return;
    areas_.erase(begin);
    if (begin + length > end) areas_.emplace(end, static_cast<size_t>(begin + length - end));
    if (begin < address) areas_.emplace(begin, static_cast<size_t>(address - begin));
  }
}

void BlockPool::cut_end(Pieces::iterator piece, size_t size) {
  piece->second -= size;
  bytes_.waiting -= size;
  if (piece->second == 0) waiting_.erase(piece);
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

// Unmaps what is too much, of the smallest pieces first; what the system does not unmap waits on.
void BlockPool::unmap_down_to(size_t waiting) {
  while (bytes_.waiting > waiting) {
    const auto least = smallest_piece();
    const size_t size = std::min(least->second, bytes_.waiting - waiting);
    char* const begin = least->first + least->second - size;
    if (!unmap(begin, size)) return;
    forget_areas(begin, size);
    cut_end(least, size);
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
