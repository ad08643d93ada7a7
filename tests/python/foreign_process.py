# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose scheduler has vLLM's interface, not its class. Prints its answers."""

import json
import sys
from pathlib import Path

from conftest import InProcess
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler

from torpor import errors
from torpor.vllm import plugin

NAMES = ("greedy", "long")  # without a seed, which vLLM itself cannot chunk on a CPU


def forwarded(name: str):
    return lambda self, *args, **kwargs: getattr(self._inside, name)(*args, **kwargs)


class Foreign(SchedulerInterface):
    """It hands all on to a scheduler that it keeps to itself."""

    def __init__(self, *args, **kwargs):
        self._inside = Scheduler(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("torpor"):
            raise AttributeError(f"{name}: nobody may look for it here")
        return getattr(self._inside, name)


for name, item in vars(SchedulerInterface).items():
    if isinstance(item, property):
        setattr(Foreign, name, property(lambda self, name=name: getattr(self._inside, name)))
    elif callable(item) and not name.startswith("__"):
        setattr(Foreign, name, forwarded(name))
Foreign.__abstractmethods__ = frozenset()


def main() -> None:
    one = InProcess(Path(sys.argv[1]), Path(sys.argv[2]), scheduler_cls="foreign_process.Foreign")
    answers = one.finish(one.begin(0, NAMES))
    result = {"inactive": plugin.inactive(), "scheduler": type(one.core.scheduler).__name__, "answers": answers}
    try:
        one.llm.sleep(level=1, preserve_state=True)
    except errors.Unsupported as problem:
        result["refused"] = str(problem)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
