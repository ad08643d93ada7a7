# SPDX-License-Identifier: Apache-2.0
"""torpor's memory under this name; what it offers stands in torpor.torch_memory_saver."""

from torpor.torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
