# SPDX-License-Identifier: Apache-2.0
"""A process of the tests that sleeps twice and kills itself in a given phase, or wakes what another one left."""

import json
import os
import signal
import sys
from pathlib import Path

from conftest import InProcess, gpu_path
from requests_of_tests import final, run

from torpor import _core


def kill_at(one, phase: str) -> None:
    """SIGKILL when the controller's next order to the workers of this phase has been carried out."""
    hooks = one.core.torpor_side.hooks
    stock = hooks.call_ranks
    last = {"save": "save", "verify": "inform", "restore": "restore"}[phase]

    def call_ranks(order):
        replies = stock(order)
        if _core.order_name(order) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return replies

    hooks.call_ranks = call_ranks


def wake(one, directory: Path) -> dict:
    expected = json.loads((directory / "expected.json").read_text())
    report = one.llm.wake_up(from_checkpoint=directory)
    answers = final(json.loads(json.dumps(run(one.engine))))
    # What had ended before the sleep is not in the checkpoint; whatever is must end as it would have.
    least = 6 if gpu_path.active() else 8  # answers are shorter there
    same = len(answers) >= least and all(expected[name] == answer for name, answer in answers.items())
    return {"identical": same, "checkpoint": Path(report.checkpoint).name}


def main() -> None:
    model, phase, *directories = sys.argv[1:]
    directory = Path(directories[0])
    one = InProcess(Path(model), directory)
    if phase == "wake":
        print("RESULT " + json.dumps([wake(one, Path(d)) for d in directories]), flush=True)
        return
    directory.mkdir()
    (directory / "expected.json").write_text(json.dumps(one.expected))
    one.begin(10)
    first = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    one.llm.wake_up()
    if phase == "restore":
        run(one.engine)
        kill_at(one, phase)
        one.llm.wake_up(from_checkpoint=first)
    else:
        run(one.engine, 10)
        kill_at(one, phase)
        one.llm.sleep(level=1, preserve_state=True, to="disk")


if __name__ == "__main__":
    main()
