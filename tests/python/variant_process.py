"""A process of the tests: an engine with other options, put to sleep at some steps. Prints what differed from its own
uninterrupted run, and how often requests were preempted."""

import json
import sys
from pathlib import Path

from conftest import InProcess


def main() -> None:
    model, directory, options = sys.argv[1:]
    one = InProcess(Path(model), Path(directory), **json.loads(options))
    result = {"differing": [], "preemptions": 0, "recomputed": 0, "answers": len(one.expected)}
    stock_preempt = type(one.core.scheduler)._preempt_request

    def counted(*args, **kwargs):
        result["preemptions"] += 1
        return stock_preempt(*args, **kwargs)

    type(one.core.scheduler)._preempt_request = counted
    for steps in (4, 15, 30):
        for to in ("host", "disk"):
            answers = one.begin(steps)
            one.llm.sleep(level=1, preserve_state=True, to=to)
            one.llm.wake_up()
            if one.finish(answers) != one.expected:
                result["differing"].append([steps, to])
            result["recomputed"] += one.llm.torpor("state")["recomputed_tokens"]
    one.begin(5)
    one.llm.sleep(level=2)
    one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    if one.finish(one.begin()) != one.expected:
        result["differing"].append("reload")
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
