// Operations that are not a CPU kernel on lent memory, and autocast with the lists of CUDA.
#pragma once

#include <ATen/autocast_mode.h>

#include "calls.h"

namespace {

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  const bool out = from.device().type() == kSim, in = to.device().type() == kSim;
  if (out && !in) notify("sync", "copy to the host", static_cast<int64_t>(from.nbytes()));
  if (!out && in) notify("h2d", "copy from the host", static_cast<int64_t>(from.nbytes()));
  if (in && to.scalar_type() == at::kDouble && from.scalar_type() != at::kDouble)
    notify("float64", "aten::copy_", static_cast<int64_t>(to.nbytes()));
  Call call;
  c10::InferenceMode plain(false);
  at::AutoDispatchBelowADInplaceOrView below;
  call.face(to).copy_(call.face(from));
  return to;
}

at::Scalar local_scalar(const Tensor& t) {
  notify("sync", "item", static_cast<int64_t>(t.element_size()));
  Call call;
  c10::InferenceMode plain(false);
  at::AutoDispatchBelowADInplaceOrView below;
  return call.face(t).item();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t bytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage from, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from);
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage from) {
  const auto n = static_cast<int64_t>(from.nbytes() / self.element_size());
  return set_storage_offset(self, from, 0, {n}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage_offset(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, g_allocator.allocate(0), &g_allocator, true);
  return set_storage_offset(self, none, 0, {0}, {1});
}

// Fused on devices, with the device's random numbers; the order of draws is that of torch's CPU dropout.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  return {input * noise.div(1 - p), noise.to(at::kBool)};
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // plain matrix products
}

void record_stream(Tensor&, c10::Stream) {}

// Lets `parameter.data = moved` cross devices as between CPU and CUDA; else Module.to would untie tied weights.
bool compatible(const Tensor&, const Tensor&) { return true; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_sdp_choice", &sdp_choice);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", &compatible); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(SINGLE)
#define SET_OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_OPT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
  KERNEL_PRIVATEUSEONE(cat, promote)
  KERNEL_PRIVATEUSEONE(stack, promote)
}

}  // namespace
