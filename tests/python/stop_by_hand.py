# SPDX-License-Identifier: Apache-2.0
"""For workers in other processes, as their extension (vLLM's `worker_extension_cls`): before the order that the file
TORPOR_TEST_STOP names a worker's process stops, until it is continued or killed. The import does it."""

import contextlib
import os
import signal
from pathlib import Path

from torpor import _core


class _RankMemory(_core.RankMemory):
    def call(self, order):
        file = Path(os.environ["TORPOR_TEST_STOP"])
        with contextlib.suppress(FileNotFoundError):
            if file.read_text() == _core.order_name(order):
                file.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().call(order)


_core.RankMemory = _RankMemory


class StopByHand:
    """Adds nothing to the worker."""
