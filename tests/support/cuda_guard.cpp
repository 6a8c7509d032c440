// A CUDA device that runs nothing, for fake CUDA tensors in a PyTorch built without CUDA.
//
// The engine of autograd has a thread and a stream for each device, and asks a guard and the hooks
// of CUDA for them. A build without CUDA has neither. Hooks are looked up when PyTorch loads, so
// this one is preloaded. Ops on fake tensors run no kernels.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {

struct OneDeviceHooks final : CUDAHooksInterface {
  explicit OneDeviceHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, OneDeviceHooks)

}  // namespace at

namespace c10 {

struct OneDeviceGuard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return static_type; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return Device(static_type, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, OneDeviceGuard)

}  // namespace c10
