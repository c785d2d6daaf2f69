// A device that is none: its memory is the host's and every op runs on the CPU, but torch takes it for an accelerator.
//
// What a GPU would refuse raises here: tensors of two devices in one op. In a `strict` section so does what would make
// the host wait for a GPU, or copy from or to it. The generator is the device's own. Ops run through torch's fallback
// to the CPU, which copies what it is given. tests/device/fake_device.py is its Python side.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
const c10::Device device(kFake, 0);

std::atomic<bool> is_strict{false};
thread_local int exempt = 0;  // inside of an op, whose own copies are none of the caller's

struct Exempt {
  Exempt() { ++exempt; }
  ~Exempt() { --exempt; }
};

void refuse(const std::string& what) {
  TORCH_CHECK(!is_strict || exempt, "fake device: a step does what a GPU would be waited for: ", what);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Generator& generator() {
  static at::Generator own = at::detail::createCPUGenerator(67280421310721);
  return own;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& x) {
  return x.is_cpu() ? x : at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device() != to.device() && !non_blocking)
    refuse("a copy from " + from.device().str() + " to " + to.device().str());
  Exempt here;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ---- Ops ------------------------------------------------------------------------------------------------------------

/// Those that a GPU is waited for, whatever they are given.
const std::set<std::string> waits = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique2",
    "aten::_unique",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "pyg_dist::restrict_csr",
};

/// Those of pyg_dist that plans are made with, or that are the CPU's own: they have no form for a GPU.
const std::set<std::string> host_only = {
    "pyg_dist::csr_from_edges", "pyg_dist::transpose_csr", "pyg_dist::spmm_csr_guess", "pyg_dist::relu",
    "pyg_dist::relu_grad",      "pyg_dist::sample_rows",   "pyg_dist::distinct",       "pyg_dist::bipartite_matching",
    "pyg_dist::encode_ids",     "pyg_dist::decode_ids",    "pyg_dist::add_places",     "pyg_dist::find_numbers",
};

bool is_mask(const at::Tensor& x) {
  return x.defined() && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte);
}

void visit(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& x : value.toTensorVector()) see(x);
  } else if (value.isOptionalTensorList()) {
    for (const auto& x : value.toOptionalTensorVector())
      if (x.has_value() && x->defined()) see(*x);
  }
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name();
  auto given = torch::jit::last(*stack, schema.arguments().size());
  for (const c10::IValue& value : given)
    visit(value, [&](const at::Tensor& x) {
      TORCH_CHECK(!x.is_cpu() || x.dim() == 0 || exempt, "fake device: ", name, " got tensors of ", device, " and of ",
                  x.device(), ", of shape ", x.sizes());
    });
  TORCH_CHECK(!host_only.count(name), "fake device: ", name, " has no form for a device");
  if (waits.count(name) || (name == "aten::repeat_interleave" && given.size() == 2 && given[1].isNone())) refuse(name);
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    visit(given[1], [&](const at::Tensor& x) {
      if (is_mask(x)) refuse(name + " by a mask");
    });
  for (size_t k = 0; k < given.size(); ++k) {
    const std::string& argument = schema.arguments()[k].name();
    auto& value = (*stack)[stack->size() - given.size() + k];
    if (argument == "generator" && value.isNone()) value = generator();
    // Batch norm writes these, which its schema does not say: the fallback would lose it.
    if (argument.rfind("running_", 0) == 0 && value.isTensor() && value.toTensor().defined())
      value = on_host(value.toTensor());
  }
  Exempt here;
  at::native::cpu_fallback(op, stack);
}

void set_strict(bool strict) { is_strict = strict; }
void set_exempt(bool starts) { exempt += starts ? 1 : -1; }
at::Tensor rng_state() { return generator().get_state(); }
void set_rng_state(const at::Tensor& state) { generator().set_state(state); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("resize_",
         [](const at::Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) -> const at::Tensor& {
           auto sizes = C10_AS_INTARRAYREF_SLOW(size);
           x.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
           const size_t bytes = x.numel() * x.itemsize();
           if (x.storage().nbytes() < bytes)
             at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), bytes);
           return x;
         });
}

TORCH_LIBRARY(fake_device, m) {
  m.def("set_strict(bool strict) -> ()", &set_strict);
  m.def("set_exempt(bool starts) -> ()", &set_exempt);
  m.def("rng_state() -> Tensor", &rng_state);
  m.def("set_rng_state(Tensor state) -> ()");
  m.impl("set_rng_state", c10::DispatchKey::CPU, TORCH_FN(set_rng_state));
}

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
