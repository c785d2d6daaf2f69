#include "ops/device.h"

#include <cstring>

#include "ops/cpu/device.h"

namespace pyg_dist {
namespace {

struct Entry {
  DeviceType type;
  const DeviceOps* ops;
};
// By device; null: no library has said anything. Changed while libraries are loaded, before ops run.
Entry devices[] = {{DeviceType::CPU, &cpu::kOps}, {DeviceType::CUDA, nullptr}};

// "name=instruction set" pairs with "; " between them.
std::string device_names() {
  std::string names;
  for (const Entry& entry : devices) {
    if (entry.ops == nullptr) continue;
    names += (names.empty() ? "" : "; ") + std::string(entry.ops->name) + "=" + entry.ops->isa();
  }
  return names;
}

void raise_bad_index() {
  for (const Entry& entry : devices) {
    if (entry.ops != nullptr && entry.ops->raise_bad_index != nullptr) entry.ops->raise_bad_index();
  }
}

std::string isa() { return devices[0].ops->isa(); }

std::string name_of(const torch::stable::Device& device) {
  std::ostringstream name;
  switch (device.type()) {
    case DeviceType::CPU:
      name << "cpu";
      break;
    case DeviceType::CUDA:
      name << "cuda";
      break;
    case DeviceType::Meta:
      name << "meta";
      break;
    default:
      name << "device type " << static_cast<int>(device.type());
  }
  if (device.has_index()) name << ':' << device.index();
  return name.str();
}

}  // namespace

const DeviceOps* device_ops(const char* op, const torch::stable::Device& device) {
  std::string names;
  for (const Entry& entry : devices) {
    if (entry.ops == nullptr) continue;
    if (entry.type == device.type()) return entry.ops;
    names += (names.empty() ? "" : " or ") + std::string(entry.ops->name);
  }
  fail(op, ": expected tensors on ", names, ", which this build has kernels for, got them on ", name_of(device),
       "; move them with .to()");
}

void set_device_ops(DeviceType type, const DeviceOps& ops, const char* sources) {
  if (std::strcmp(sources, PYG_DIST_TABLE_HASH) != 0) return;
  for (Entry& entry : devices) {
    if (entry.type == type) entry.ops = &ops;
  }
}

void fail_mixed_devices(const char* op, const torch::stable::Device& one, const torch::stable::Device& other) {
  fail(op, ": expected all tensors on one device, got them on ", name_of(one), " and ", name_of(other),
       "; move them with .to()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_dist, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("devices", TORCH_BOX(&device_names));
  m.impl("raise_bad_index", TORCH_BOX(&raise_bad_index));
}

}  // namespace pyg_dist
