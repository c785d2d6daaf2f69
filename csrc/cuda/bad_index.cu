#include "cuda/bad_index.cuh"

namespace pyg_dist::gpu {

BadIndexCell* new_cell() { return new (host_memory(sizeof(BadIndexCell))) BadIndexCell{}; }

}  // namespace pyg_dist::gpu
