# SPDX-License-Identifier: Apache-2.0
"""torpor: puts a running LLM inference engine to sleep mid-sentence and wakes it with the very next token.

With vLLM there is nothing to import: the package registers itself as a vLLM plugin, and `LLM.sleep`, `AsyncLLM.sleep`
and their `wake_up` take the arguments that docs/vllm.md describes. `torpor.swap(a, b)` exchanges two of its engines.
"""

from __future__ import annotations

from torpor import errors
from torpor._core import EngineCheckpoint, __version__, read_checkpoint
from torpor.errors import Error

__all__ = ["EngineCheckpoint", "Error", "__version__", "errors", "read_checkpoint", "swap"]


def __getattr__(name: str):
    """`swap` is looked up when it is used: it needs vLLM."""
    if name != "swap":
        raise AttributeError(name)
    from torpor.vllm import swap

    return swap
