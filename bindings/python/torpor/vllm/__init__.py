"""The vLLM adapter: translates vLLM's objects to values and back. Deciding, copying, hashing, serializing and files are C++.

Nothing here is imported by torpor itself; vLLM loads `torpor.vllm.plugin` through the entry point `vllm.general_plugins`.
"""

from torpor.vllm.frontend import attach

__all__ = ["attach"]
