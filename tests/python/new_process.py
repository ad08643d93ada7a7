"""A new process of the tests: wakes checkpoints one after the other and runs each to its end. Prints one JSON object."""

import json
import sys
from pathlib import Path

from conftest import InProcess
from requests_of_tests import run


def main() -> None:
    model, directory, *paths = sys.argv[1:]
    one = InProcess(Path(model), Path(directory))
    results = []
    for path in paths:
        report = one.llm.wake_up(from_checkpoint=path)
        answers = run(one.engine)
        results.append({"answers": answers, "requests": report.requests, "failed": report.failed_requests, "recomputed": one.llm.torpor("state")["recomputed_tokens"]})
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
