# SPDX-License-Identifier: Apache-2.0
"""For workers in other processes, as their extension (vLLM's `worker_extension_cls`): deferred blocks of a post-copy
wake come only when somebody waits for them, one at a time. The import does it, before a worker makes its memory."""

from torpor import _core

OPTIONS = {"deferred_thread": False, "deferred_job_bytes": 1}

_stock, _of_device = _core.RankMemory, _core.memory_of
_core.RankMemory = lambda given: _stock(given | OPTIONS)
_core.memory_of = lambda device, given: _of_device(device, given | OPTIONS)


class DeferredByHand:
    """Adds nothing to the worker."""
