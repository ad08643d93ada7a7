# SPDX-License-Identifier: Apache-2.0
"""`python -m torpor`: what is installed here, and which of torpor's tiers the vLLM beside it has (docs/vllm.md)."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torpor
from torpor import _core

_PARTS = ("early_wake", "connector", "portable", "fork", "other_connectors", "server")  # checked when they are used


def main() -> int:
    """Print it. Return 0 if an engine of this vLLM can use torpor, 1 if not, 2 if the command has arguments."""
    if sys.argv[1:]:
        print("error: python -m torpor takes no arguments; the inspector is the program torpor", file=sys.stderr)
        return 2
    print(f"torpor {torpor.__version__}, built {'with' if _core.built_with_cuda() else 'without'} CUDA")
    if find_spec("vllm") is None:
        print("vllm is not installed for this Python: install a release that torpor knows (docs/vllm.md)")
        return 1
    import vllm

    from torpor.vllm import plugin

    if plugin.activate():
        for part in _PARTS:
            plugin.fits(part)
    if (reason := plugin.inactive()) is not None:
        print(f"vllm {vllm.__version__} runs without torpor: {reason}")
        return 1
    print(f"vllm {vllm.__version__} fits. An engine that asks for torpor has:")
    for tier, why_off in plugin.tiers().items():
        print(f"  {tier:<18}{why_off or 'yes'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
