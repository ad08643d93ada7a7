# SPDX-License-Identifier: Apache-2.0
"""Scenarios that a process of the tests plays one after the other, and what its test gets of them."""

import traceback
from collections.abc import Iterable


def play(engine, names: Iterable[str]) -> dict:
    """Return what each scenario returned: the method of the engine with this name. After one that fails none is
    played."""
    result = {}
    for name in names:
        try:
            result[name] = getattr(engine, name)()
        except Exception:  # check() fails with it, in the process of the test
            result[name] = {"error": traceback.format_exc()}
            break
    return result


def check(result: dict) -> None:
    """Fail with the traceback of a scenario that failed."""
    failed = {name: of["error"] for name, of in result.items() if isinstance(of, dict) and "error" in of}
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
