# SPDX-License-Identifier: Apache-2.0
"""A new process of the tests: wakes checkpoints one after another and runs each to its end. Prints a JSON object.

The first may be "latest": the one that the engine finds in its directory.
"""

import json
import os
import sys
from pathlib import Path

from conftest import InProcess
from requests_of_tests import answer, said_of


def main() -> None:
    model, directory, *paths = sys.argv[1:]
    os.environ["TORPOR_WAKE_LATEST"] = "1"
    one = InProcess(Path(model), Path(directory))
    results = []
    for path in paths:
        report = one.llm.wake_up() if path == "latest" else one.llm.wake_up(from_checkpoint=path)
        said = said_of(one.core, "greedy")
        version = one.engine.get_weight_version()
        answers, spans = {}, {}
        while one.engine.has_unfinished_requests():
            for output in one.engine.step():
                answers[output.request_id] = answer(output)
                if output.finished:
                    versions = [
                        getattr(choice, "weight_versions", None) or [] for choice in output.outputs
                    ]  # none in 0.31
                    spans[output.request_id] = [[(s.version, s.start, s.end) for s in each] for each in versions]
        recomputed = one.llm.torpor.state().recomputed_tokens
        results.append({
            "said": said, "version": version, "spans": spans, "answers": answers, "requests": report.requests,
            "failed": report.failed_requests, "recomputed": recomputed,
            "metadata": report.metadata,
        })  # fmt: skip
    assert not one.llm.wake_up().changed  # it has served: this is vLLM's own call on an engine that is awake
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
