# SPDX-License-Identifier: Apache-2.0
"""tools/dev contract --touches: what torpor sets on vLLM's classes, modules and instances, counted.

An engine with torpor serves, sleeps and wakes in one process; in another one an engine without torpor serves. What the
first has and the second has not is torpor's.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from devtool import setup
from devtool.setup import ROOT, SetupError

PROCESS = ROOT / "tests/python/touches_process.py"
# What is wanted. More is said, and does not fail: the list is to be looked at.
MOST_REPLACED, MOST_TOUCHED = 14, 30


@dataclass(frozen=True, order=True)
class Touch:
    owner: str
    name: str
    replaced: bool  # vLLM has one of that name there

    def __str__(self) -> str:
        return f"{'replaced' if self.replaced else 'added   '}  {self.owner}.{self.name}"


def main() -> int:
    python, model = setup.everything()
    with tempfile.TemporaryDirectory(prefix="torpor-touches-") as folder:
        seen = {word: seen_by(python, model, f"{folder}/{word}", word) for word in ("unused", "used")}
    touches = found(seen["used"], seen["unused"])
    for touch in touches:
        print(touch)
    replaced = sum(touch.replaced for touch in touches)
    print(f"\ntorpor replaces {replaced} attributes of vLLM (wanted: at most {MOST_REPLACED}) "
          f"and touches {len(touches)} (at most {MOST_TOUCHED})")  # fmt: skip
    without = found(seen["unused"], seen["unused"])
    print(f"where no engine asks for torpor it has set {len(without)}: {', '.join(touch.name for touch in without)}")
    return 0


def seen_by(python: Path, model: Path, directory: str, word: str) -> dict:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    for name in [name for name in environment if name.startswith("TORPOR_")]:
        del environment[name]
    words = [python, PROCESS, model, directory, word]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SetupError(f"the engine that is {word} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def found(used: dict, unused: dict) -> list[Touch]:
    """What `used` has of torpor. What stands there already where no engine asks has torpor's origin too."""
    touches = []
    for owner, names in used["named"].items():
        stock = unused["named"].get(owner, {})
        for name, origin in names.items():
            if origin.rstrip("+") == "torpor" or name.startswith("torpor"):
                touches.append(Touch(owner, name, replaced=name in stock or origin.endswith("+")))
    for owner, names in used["instances"].items():
        touches += [Touch(owner, name, hides) for name, hides in names.items()]
    return sorted(touches)
