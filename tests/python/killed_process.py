"""A process of the tests that sleeps twice and kills itself in a given phase, or wakes what another one left."""

import json
import os
import signal
import sys
from pathlib import Path

from conftest import InProcess
from requests_of_tests import final, run


def kill_at(one, phase: str) -> None:
    """SIGKILL when the controller's next order to the workers of this phase has been carried out."""
    hooks = one.core.torpor_side.hooks
    stock = hooks.call_ranks
    orders = {"commit": "describe", "save": "save", "prove": "moved", "detach": "detach", "restore": "load_blocks"}

    def call_ranks(method, payload):
        replies = stock(method, payload)
        if method == orders[phase]:
            os.kill(os.getpid(), signal.SIGKILL)
        return replies

    hooks.call_ranks = call_ranks


def main() -> None:
    model, directory, phase = sys.argv[1:]
    one = InProcess(Path(model), Path(directory))
    if phase == "wake":
        expected = json.loads((Path(directory) / "expected.json").read_text())
        report = one.llm.wake_up(from_checkpoint=directory)
        answers = json.loads(json.dumps(run(one.engine)))
        # What had ended before the sleep is not in the checkpoint; whatever is must end as it would have.
        same = len(final(answers)) >= 8 and all(expected[name] == answer for name, answer in final(answers).items())
        print("RESULT " + json.dumps({"identical": same, "checkpoint": Path(report.checkpoint).name}), flush=True)
        return
    expected = one.expected
    Path(directory).mkdir(exist_ok=True)
    (Path(directory) / "expected.json").write_text(json.dumps(expected))
    one.begin(10)
    first = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    if phase == "restore":
        one.llm.wake_up()
        run(one.engine)
        kill_at(one, phase)
        one.llm.wake_up(from_checkpoint=first)
    else:
        one.llm.wake_up()
        run(one.engine, 10)
        kill_at(one, phase)
        one.llm.sleep(level=1, preserve_state=True, to="disk")


if __name__ == "__main__":
    main()
