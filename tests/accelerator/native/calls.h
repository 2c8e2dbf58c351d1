// One operation on the device: refuse what CUDA refuses, lend the arguments to the CPU kernel, claim its results.
#pragma once

#include "runtime.h"

namespace {

Tensor make(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.unsafeGetTensorImpl()->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Keeps the keys of its base: a view of an ordinary tensor is one also in inference mode.
Tensor view_of(const Tensor& base, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.unsafeGetTensorImpl()->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

struct Call {
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // of the device, its CPU face
  std::vector<std::pair<Tensor, Tensor>> lent;                  // device tensor, its CPU face
  Device device{kSim, -1};

  Tensor face(const Tensor& t) {
    if (!t.defined() || t.device().type() != kSim) return t;
    const c10::Storage& mine = t.storage();
    Tensor cpu;
    if (mine.nbytes() == 0) {  // may be an `out` to be resized
      cpu = at::empty(t.sizes(), t.options().device(at::kCPU));
    } else {
      c10::Storage other;
      for (auto& [known, face] : storages)
        if (known.unsafeGetStorageImpl() == mine.unsafeGetStorageImpl()) other = face;
      if (!other) {
        other = c10::Storage(
            c10::Storage::use_byte_size_t(), mine.nbytes(), lend(mine, at::kCPU, false), nullptr, false);
        storages.emplace_back(mine, other);
      }
      cpu = make(other, c10::DispatchKey::CPU, t);
    }
    lent.emplace_back(t, cpu);
    return cpu;
  }

  Tensor claim(const Tensor& cpu, const std::string& name) {
    if (!cpu.defined() || cpu.device().type() != at::kCPU) return cpu;
    for (auto& [mine, face] : lent)
      if (face.unsafeGetTensorImpl() == cpu.unsafeGetTensorImpl()) return mine;
    for (auto& [mine, face] : lent)
      if (face.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) return view_of(mine, cpu);
    for (auto& [mine, face] : storages)  // of an earlier result of this call
      if (face.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        return make(mine, c10::DispatchKey::PrivateUse1, cpu);
    c10::Storage own = adopt(cpu.storage());
    storages.emplace_back(own, cpu.storage());
    const auto bytes = static_cast<int64_t>(cpu.storage().nbytes());
    notify("made", name, bytes);
    if (cpu.scalar_type() == at::kDouble) notify("float64", name, bytes);
    return make(own, c10::DispatchKey::PrivateUse1, cpu);
  }

  c10::Storage adopt(const c10::Storage& cpu) const {
    return c10::Storage(
        c10::Storage::use_byte_size_t(), cpu.nbytes(), lend(cpu, device, true), &g_allocator, true);
  }

  void settle() {  // an `out` argument that its kernel gave a size
    for (auto& [mine, face] : lent)
      if (mine.storage().nbytes() == 0 && (face.numel() > 0 || mine.sizes() != face.sizes())) {
        auto* impl = mine.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(adopt(face.storage()));
        impl->set_sizes_and_strides(face.sizes(), face.strides(), face.storage_offset());
      }
  }
};

template <class F>
void each_tensor(IValue& value, F&& change) {
  if (value.isTensor()) {
    Tensor t = value.toTensor();
    value = IValue(change(t));
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(change(t));
    value = IValue(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& element : value.toOptionalTensorVector())
      list.push_back(element.has_value() && element->defined() ? std::optional<Tensor>(change(*element)) : element);
    value = IValue(list);
  }
}

bool starts(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// The device is that of the first tensor with dimensions, else of any; then that of a `device` argument.
void find_device(Call& call, const std::vector<Tensor>& seen, torch::jit::Stack* stack, size_t begin) {
  for (const Tensor& t : seen)
    if (t.device().type() == kSim && (call.device.index() < 0 || t.dim() > 0)) {
      call.device = t.device();
      if (t.dim() > 0) break;
    }
  for (size_t i = begin; i < stack->size(); ++i)
    if ((*stack)[i].isDevice() && (*stack)[i].toDevice().type() == kSim) {
      if (call.device.index() < 0) call.device = (*stack)[i].toDevice();
      (*stack)[i] = IValue(Device(at::kCPU));
    }
  if (call.device.index() < 0) call.device = Device(kSim, t_current);
}

// All tensors on one device, but for zero-dimensional CPU tensors where CUDA takes them, and CPU indices.
void refuse_mixed_devices(const Call& call, const std::string& name, const std::vector<Tensor>& seen) {
  const bool lenient = g_lenient.count(name) > 0 || !starts(name, "aten::");
  const bool index = starts(name, "aten::index.Tensor") || starts(name, "aten::index_put") ||
      starts(name, "aten::_index_put") || starts(name, "aten::_unsafe_index");
  for (size_t i = 0; i < seen.size(); ++i) {
    const bool on_cpu = seen[i].device().type() == at::kCPU;
    if (seen[i].device() == call.device || (on_cpu && lenient && seen[i].dim() == 0)) continue;
    if (on_cpu && index && i > 0 && seen[0].device() == call.device) {
      notify("h2d", name, static_cast<int64_t>(seen[i].nbytes()));
      continue;
    }
    std::ostringstream where;
    for (const Tensor& t : seen) where << " " << t.device() << t.sizes();
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                call.device, " and ", seen[i].device(), "! (simulated; in ", name, " of", where.str(), ")");
  }
}

// On CUDA the result's shape, or the Python value returned, depends on values: the host waits. A mask given to index
// goes through nonzero, which is counted there; index_put hands it to the kernel.
void tell_waiting(const std::string& name, const std::vector<Tensor>& seen) {
  static const std::unordered_set<std::string> waits = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::equal", "aten::bincount", "aten::is_nonzero", "aten::multinomial", "aten::unique_dim_consecutive",
      "aten::histc"};
  const auto masks = [](const Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; };
  if (waits.count(name) > 0 || (name.find("index_put") != std::string::npos && seen.size() > 2 &&
                                std::any_of(seen.begin() + 1, seen.end() - 1, masks)))
    notify("sync", name, 0);
}

// CUDA's reductions to another type convert their whole input first (make_reduction; half to float alone is fused).
void tell_conversion(const c10::OperatorHandle& op, const std::string& name, const std::vector<Tensor>& seen,
                     const torch::jit::Stack& stack, size_t begin) {
  static const std::vector<const char*> reductions = {
      "aten::sum", "aten::mean", "aten::prod", "aten::nansum", "aten::cumsum", "aten::linalg_vector_norm"};
  if (seen.empty() || seen[0].scalar_type() == at::kDouble ||
      std::none_of(reductions.begin(), reductions.end(), [&](const char* r) { return starts(name, r); }))
    return;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "dtype" && stack[begin + i].isInt() &&
        static_cast<at::ScalarType>(stack[begin + i].toInt()) == at::kDouble)
      notify("float64", name + " of its input", seen[0].numel() * 8);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& full = op.operator_name();
  const std::string name = full.overload_name.empty() ? full.name : full.name + "." + full.overload_name;
  const size_t begin = stack->size() - schema.arguments().size();
  Call call;
  std::vector<Tensor> seen;
  for (size_t i = begin; i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const Tensor& t) {
      if (t.defined()) seen.push_back(t);
      return t;
    });
  find_device(call, seen, stack, begin);
  refuse_mixed_devices(call, name, seen);
  tell_waiting(name, seen);
  tell_conversion(op, name, seen, *stack, begin);
  {
    c10::InferenceMode plain(false);  // faces are ordinary tensors; only what is claimed follows the caller's mode
    for (size_t i = begin; i < stack->size(); ++i) {
      IValue& value = (*stack)[i];
      if (value.isGenerator()) {
        auto generator = value.toGenerator();
        TORCH_CHECK(generator.device().type() == kSim, "Expected a '", call.device.type(),
                    "' device type for generator but found '", generator.device().type(), "' (simulated; ", name, ")");
        value = IValue(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner);
      } else if (value.isNone() &&
                 schema.arguments()[i - begin].type()->str().find("Generator") != std::string::npos) {
        auto generator = default_generator(call.device.index());
        value = IValue(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner);
      }
      each_tensor(value, [&](const Tensor& t) { return call.face(t); });
    }
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const Tensor& t) { return call.claim(t, name); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace
