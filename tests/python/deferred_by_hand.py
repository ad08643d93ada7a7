# SPDX-License-Identifier: Apache-2.0
"""For workers in other processes, as their extension (vLLM's `worker_extension_cls`): what an early wake leaves to come
moves only when somebody waits for it, a block at a time. The import does it, before a worker makes its memory."""

from torpor import _core

OPTIONS = {"deferred_thread": False, "deferred_job_bytes": 1}

_stock, _of_device = _core.RankMemory, _core.memory_of
_core.RankMemory = lambda given: _stock(given | OPTIONS)
_core.memory_of = lambda device, given: _of_device(device, given | OPTIONS)


class DeferredByHand:
    """Adds nothing to the worker."""
