// torch's guard that does nothing, for CUDA in a torch without it: what torch's own builds with CUDA give fake tensors
// where there is no GPU.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
