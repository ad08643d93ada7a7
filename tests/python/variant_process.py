# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with other options, put to sleep at some steps (the option "sleep_at"), to host and
to disk ("to"). Prints what differed from its own uninterrupted run, how often it preempted, and what torpor refuses."""

import json
import sys
from pathlib import Path

from conftest import InProcess

from torpor.errors import Unsupported


def main() -> None:
    model, directory, options = sys.argv[1:]
    options = json.loads(options)
    sleep_at = options.pop("sleep_at", (4, 15, 30))
    ways = options.pop("to", ("host", "disk"))
    one = InProcess(Path(model), Path(directory), **options)
    result = {
        "differing": [],
        "preemptions": 0,
        "recomputed": 0,
        "spilled": 0,
        "held": 0.0,
        "refused": "",
        "answers": len(one.expected),
    }
    stock_preempt = type(one.core.scheduler)._preempt_request

    def counted(*args, **kwargs):
        result["preemptions"] += 1
        return stock_preempt(*args, **kwargs)

    type(one.core.scheduler)._preempt_request = counted
    for steps in sleep_at:
        for to in ways:
            answers = one.begin(steps)
            try:
                report = one.llm.sleep(level=1, preserve_state=True, to=to)
            except Unsupported as problem:
                result["refused"] = problem.what
                continue
            if to == "host":
                assert report.host_bytes > 0
                result["spilled"] += report.disk_bytes
                tags = [tag for ledger in report.ledgers for tag in ledger["tags"].values()]
                held = sum(tag["backup_host_bytes"] for tag in tags)
                result["held"] = max(result["held"], held / report.host_bytes)
            answers |= one.stopped()
            one.llm.wake_up()
            if one.finish(answers) != one.expected:
                result["differing"].append([steps, to])
            result["recomputed"] += one.llm.torpor.state().recomputed_tokens
            if to == "disk":  # nothing of this engine's own state is left by now
                one.llm.reset_prefix_cache()
                one.llm.wake_up(from_checkpoint=report.checkpoint)
                if one.finish(answers) != one.expected:
                    result["differing"].append([steps, "checkpoint"])
    one.begin(5)
    one.llm.sleep(level=2)
    one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    if one.finish(one.begin()) != one.expected:
        result["differing"].append("reload")
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
