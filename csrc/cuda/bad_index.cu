#include "cuda/bad_index.cuh"

namespace pyg_dist::gpu {

BadIndexes new_bad_indexes() {
  auto* const cell = new (host_memory(sizeof(BadIndexCell))) BadIndexCell{};
  return {cell, static_cast<uint32_t*>(device_memory(sizeof(uint32_t)))};
}

std::optional<BadIndexCell> take_bad_index(const BadIndexes& found, Stream stream) {
  if (__atomic_load_n(&found.cell->ready, __ATOMIC_ACQUIRE) == 0 || is_captured(stream)) return std::nullopt;
  const BadIndexCell bad = *found.cell;
  __atomic_store_n(&found.cell->ready, 0u, __ATOMIC_RELEASE);
  clear(found.taken, sizeof(uint32_t), stream);
  return bad;
}

}  // namespace pyg_dist::gpu
