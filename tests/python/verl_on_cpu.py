# SPDX-License-Identifier: Apache-2.0
"""A platform of verl without an accelerator, by verl's own seam for other devices: VERL_PLATFORM=cpu."""

from types import SimpleNamespace

from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def is_ipc_supported(self) -> bool:  # weights go by shared memory
        return False
