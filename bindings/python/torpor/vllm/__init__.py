# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: translates vLLM's objects to values and back.

Deciding, copying, hashing, serializing and files are C++. Nothing here is imported by torpor itself; vLLM loads
`torpor.vllm.plugin` through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

__all__ = ["attach", "swap"]


def __getattr__(name: str):
    """They are looked up when they are used: what they need of vLLM exists only where torpor fits."""
    if name not in __all__:
        raise AttributeError(name)
    from torpor.vllm.plugin import require

    require()
    if name == "swap":
        from torpor.vllm.exchange import swap

        return swap
    from torpor.vllm.frontend import attach

    return attach
