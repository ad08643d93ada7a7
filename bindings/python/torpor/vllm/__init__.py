"""The vLLM adapter: translates vLLM's objects to values and back.

Deciding, copying, hashing, serializing and files are C++. Nothing here is imported by torpor itself; vLLM loads
`torpor.vllm.plugin` through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

__all__ = ["attach"]


def __getattr__(name: str):
    """`attach` is looked up when it is used: what it needs of vLLM exists only where torpor fits."""
    if name != "attach":
        raise AttributeError(name)
    from torpor.vllm.plugin import require

    require()
    from torpor.vllm.frontend import attach

    return attach
