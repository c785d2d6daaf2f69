#include <torch/csrc/stable/library.h>

#include <string>

namespace pyg_dist {
namespace {

// "key=value" pairs with "; " between them.
std::string build_info() {
  return "version=" PYG_DIST_VERSION "; torch=" TORCH_VERSION "; compiler=" PYG_DIST_COMPILER
         "; levels=" PYG_DIST_LEVELS;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CompositeExplicitAutograd, m) { m.impl("build_info", TORCH_BOX(&build_info)); }

}  // namespace pyg_dist
