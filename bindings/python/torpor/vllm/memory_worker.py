# SPDX-License-Identifier: Apache-2.0
"""torpor's part of a worker whose memory is torpor's and whose sleeps are vLLM's own, on a GPU: they keep no requests.

It needs little of vLLM (the part "memory" of the manifest), so it works beside a vLLM that changed in other things.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torpor.vllm.gpu_allocator import TorporAllocator, check_alone
from torpor.vllm.mixed_in import Stock
from torpor.vllm.named_mixins import NamedMixins, resolved


class MemoryWorkerMixin(Stock):
    """A worker that allocates through TorporAllocator what vLLM's sleep mode frees."""

    torpor_base: type  # the worker without torpor

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        if tag == "weights":
            check_alone(self.device.index or 0)
        return TorporAllocator.get_instance().use_memory_pool(tag)

    def shutdown(self) -> None:
        """Give back what vLLM's pools hold, so that another engine of this process can have it."""
        super().shutdown()
        TorporAllocator.get_instance().release_pools()


_MADE = NamedMixins(__name__, MemoryWorkerMixin)


def __getattr__(name: str) -> type:
    return _MADE.find(name)


def choose(vllm_config) -> None:
    """Put the mixin in front of this engine's workers. Doing it again changes nothing."""
    parallel = vllm_config.parallel_config
    if not _MADE.has(parallel.worker_cls):
        parallel.worker_cls = _MADE.named(resolved(parallel.worker_cls))
