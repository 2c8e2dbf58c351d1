// What the parts of the simulated accelerator share: its devices, its memory and its observer.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/extension.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

namespace {

int g_devices = 1;
thread_local DeviceIndex t_current = 0;
std::unordered_set<std::string> g_lenient;  // operations that accept zero-dimensional CPU tensors
std::atomic<int64_t> g_live{0}, g_peak{0}, g_limit{INT64_MAX};
PyObject* g_listener = nullptr;  // called as (kind, operation, bytes)

void notify(const char* kind, const std::string& operation, int64_t bytes) {
  if (g_listener == nullptr || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire lock;
  if (g_listener == nullptr) return;
  PyObject* result = PyObject_CallFunction(g_listener, "ssL", kind, operation.c_str(), static_cast<long long>(bytes));
  if (result == nullptr) throw pybind11::error_already_set();
  Py_DECREF(result);
}

// -- memory: a storage of the device is ordinary memory under another device's name ------------------

struct Owned {
  c10::Storage storage;
  int64_t counted;
};

void release(void* context) {
  auto* owned = static_cast<Owned*>(context);
  g_live -= owned->counted;
  delete owned;
}

void count(int64_t bytes) {
  int64_t now = g_live += bytes;
  if (now > g_limit) {
    g_live -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device out of memory: ", bytes, " bytes more than the limit");
  }
  int64_t peak = g_peak;
  while (now > peak && !g_peak.compare_exchange_weak(peak, now)) {
  }
}

// A data pointer into the memory of another storage, which it keeps alive, on the given device.
c10::DataPtr lend(const c10::Storage& storage, Device device, bool counted) {
  const int64_t bytes = counted ? static_cast<int64_t>(storage.nbytes()) : 0;
  if (bytes > 0) count(bytes);
  return c10::DataPtr(const_cast<void*>(storage.data()), new Owned{storage, bytes}, &release, device);
}

c10::Storage host_storage(size_t bytes) {
  auto* cpu = c10::GetAllocator(at::kCPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, false);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return lend(host_storage(bytes), Device(kSim, t_current), true); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator g_allocator;
REGISTER_ALLOCATOR(kSim, &g_allocator);

// Page-locked host memory is ordinary memory that says so.
std::mutex g_pinned_lock;
std::map<const char*, size_t> g_pinned;

void unpin(void* context) {
  auto* owned = static_cast<Owned*>(context);
  {
    std::lock_guard<std::mutex> lock(g_pinned_lock);
    g_pinned.erase(static_cast<const char*>(owned->storage.data()));
  }
  delete owned;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto storage = host_storage(bytes);
    void* data = const_cast<void*>(storage.data());
    {
      std::lock_guard<std::mutex> lock(g_pinned_lock);
      g_pinned[static_cast<const char*>(data)] = bytes;
    }
    return c10::DataPtr(data, new Owned{storage, 0}, &unpin, at::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator g_pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(g_pinned_lock);
  auto after = g_pinned.upper_bound(static_cast<const char*>(data));
  if (after == g_pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(data) < found->first + std::max<size_t>(found->second, 1);
}

}  // namespace
