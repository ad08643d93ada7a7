# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this is, and whether it is as torpor expects. One module a version: its manifest.

v0_32.py is whole; those of other versions say what differs from it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torpor.errors import Unsupported
from torpor.vllm.compat import changes, guards, tiers, unchanged

VERSIONS = {"0.31": "v0_31", "0.32": "v0_32", "0.33": "v0_33"}  # of vLLM, without the patch level: the module here


def manifest(version: str) -> ModuleType:
    """The manifest for this version of vLLM. Raises Unsupported for a version that torpor does not know."""
    known = _minor(version)
    if known not in VERSIONS:
        raise Unsupported(
            f"torpor is for vLLM {', '.join(VERSIONS)}, this is {version}", "install the torpor that fits it"
        )
    return import_module(f"torpor.vllm.compat.{VERSIONS[known]}")


def nearest(version: str) -> str:
    """The version in VERSIONS that any version is best compared with: itself, or else the next older, or the oldest."""
    of = {tuple(int(number) for number in known.split(".")): known for known in VERSIONS}
    numbers = [number for number in _minor(version).split(".") if number.isdecimal()]
    older = [known for known in of if len(numbers) < 2 or known <= (int(numbers[0]), int(numbers[1]))]
    return of[max(older) if older else min(of)]


def lookup(module: str, name: str):
    """What vLLM 0.32 has as `name` in `module`, wherever the installed version has it; None if it does not."""
    import vllm

    return changes.find(getattr(manifest(vllm.__version__), "CHANGES", {}), module, name)


def check(version: str, *parts: str) -> list[str]:
    """Return the unknown fields that only a checkpoint would lack (tiers.py).

    Imports no module whose files are as in a known release (unchanged.py).
    Raises Unsupported, naming the first difference, if the installed vLLM differs from the manifest in anything else.
    """
    described = manifest(version)
    differs = [
        problem for part in parts for problem in guards.problems(unchanged.to_compare(described.PARTS[part], version))
    ]
    found, new_process = tiers.split(differs)
    if found:
        raise Unsupported(f"vLLM {version} is not as expected: {first_of(found)}", "install the torpor that fits it")
    return new_process


def first_of(problems: list[str]) -> str:
    """Return the first one, and how many more there are."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
