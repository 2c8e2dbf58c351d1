// Devices, streams (in order, always done) and random numbers (a CPU generator for each device).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "state.h"

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    Device old(kSim, t_current);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kSim, t_current); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_current = d.index();
  }
  c10::Stream getStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kSim, d.index() >= 0 ? d.index() : t_current));
  }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(g_devices); }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { notify("sync", "synchronize stream", 0); }
  void synchronizeEvent(void*) const override { notify("sync", "synchronize event", 0); }
  void synchronizeDevice(const DeviceIndex) const override { notify("sync", "synchronize device", 0); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  Generator(DeviceIndex index, at::Generator cpu)
      : GeneratorImpl(Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
};

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? t_current : index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < g_devices; ++i) made.push_back(new_generator(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all.at(index < 0 ? t_current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(g_devices); }
  void setCurrentDevice(DeviceIndex d) const override { t_current = d; }
  DeviceIndex getCurrentDevice() const override { return t_current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = t_current;
    if (d >= 0) t_current = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, t_current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto old = exchangeDevice(storage.device().index());
    auto fresh = g_allocator.allocate(bytes);
    exchangeDevice(old);
    if (size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace
