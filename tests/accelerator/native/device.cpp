// The simulated accelerator: torch's third-party device (PrivateUse1) on the CPU's kernels. See ../device.py.
#include "collectives.h"
#include "operations.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("setup", [](int devices, const std::vector<std::string>& lenient) {
    g_devices = devices;
    g_lenient.insert(lenient.begin(), lenient.end());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  });
  m.def("listen", [](pybind11::object listener) {
    Py_XDECREF(g_listener);
    g_listener = listener.is_none() ? nullptr : listener.release().ptr();
  });
  m.def("current", [] { return static_cast<int>(t_current); });
  m.def("use", [](int index) {
    TORCH_CHECK(index >= 0 && index < g_devices, "invalid device ordinal ", index, " of ", g_devices);
    t_current = static_cast<DeviceIndex>(index);
  });
  m.def("generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("live", [] { return g_live.load(); });
  m.def("peak", [] { return g_peak.load(); });
  m.def("reset_peak", [] { g_peak = g_live.load(); });
  m.def("limit", [](std::optional<int64_t> bytes) { g_limit = bytes.value_or(INT64_MAX); });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(std::move(inner), rank, size));
  });
}
