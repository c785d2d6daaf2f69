#include "ops/device.h"

#include "ops/cpu/device.h"

namespace pyg_dist {
namespace {

struct Entry {
  DeviceType type;
  const DeviceOps* ops;
};
constexpr Entry kDevices[] = {{DeviceType::CPU, &cpu::kOps}};

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
  for (const Entry& entry : kDevices) {
    if (entry.type == device.type()) return entry.ops;
    names += (names.empty() ? "" : " or ") + std::string(entry.ops->name);
  }
  fail(op, ": expected tensors on ", names, ", which this build has kernels for, got them on ", name_of(device),
       "; move them with .to()");
}

void fail_mixed_devices(const char* op, const torch::stable::Device& one, const torch::stable::Device& other) {
  fail(op, ": expected all tensors on one device, got them on ", name_of(one), " and ", name_of(other),
       "; move them with .to()");
}

}  // namespace pyg_dist
