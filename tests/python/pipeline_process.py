# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose model lies in two stages of a pipeline, each in a process of its own.

`sleep`: sleeps at some steps, to host, to disk and restored by the same process. Prints what differed from the
reference run, which only paused at that step; the answers of the reference runs; and where the last checkpoint of each
step lies.
`wake`: a new process wakes such checkpoints. Prints their answers.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"

from conftest import InProcess, without_weights
import gpu_path
from requests_of_tests import REQUESTS, add_requests, final, run

DEFERRED_BY_HAND = "deferred_by_hand.DeferredByHand"
TAKEN_OVER = ("greedy", "seeded", "penalties", "prefix-a")


def seed(worker) -> None:
    """Of what requests without a seed draw from; the last stage samples."""
    import numpy
    import torch

    torch.manual_seed(3)
    numpy.random.seed(3)


def make(model: Path, directory: Path, **options) -> InProcess:
    options |= {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": DEFERRED_BY_HAND,
    }
    one = InProcess(model, directory, **options)
    if (
        os.environ.get("TORPOR_GPU_PATH") != "1"
    ):  # vLLM's V1 on the CPU makes what its last stage receives into only where it compiles
        one.core.collective_rpc(lambda worker: worker.model_runner.profile_run())
    return one


def begin(one: InProcess, steps: int, names=None) -> dict:
    one.begin(0, names)
    one.core.collective_rpc(seed)
    return run(one.engine, steps)


def sleep(model: Path, directory: Path, sleep_at: list[int]) -> dict:
    one = make(model, directory)
    result = {"differing": [], "in_flight": [], "references": [], "delivered": [], "paths": [], "recomputed": 0}
    for steps in sleep_at:
        answers = begin(one, steps)
        result["in_flight"].append(len(one.core.batch_queue))
        one.llm.sleep(level=0)
        answers |= one.stopped()
        one.llm.wake_up()
        reference = one.finish(answers)
        for to in ("host", "disk"):
            answers = begin(one, steps)
            report = one.llm.sleep(level=1, preserve_state=True, to=to)
            assert len(report.ledgers) == 2 and all(ledger["device_physical_bytes"] == 0 for ledger in report.ledgers)
            answers |= one.stopped()
            one.core.collective_rpc(seed)  # whatever else runs in these processes meanwhile
            one.llm.wake_up()
            if one.finish(answers) != reference:
                result["differing"].append([steps, to])
            result["recomputed"] += one.llm.torpor.state().recomputed_tokens
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=report.checkpoint)
        if one.finish(answers) != reference:
            result["differing"].append([steps, "checkpoint"])
        result["references"].append(reference)
        result["delivered"].append(answers)
        result["paths"].append(report.checkpoint)
    one.llm.sleep(level=2)
    one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    result["reloaded"] = one.finish(begin(one, 0, ["greedy"])) == {"greedy": result["references"][0]["greedy"]}
    result["taken_over"] = take_over(one, 9, 9)
    result["early"] = [cached(one, early) for early in (False, True)]
    return result


def cached(one: InProcess, early: bool) -> dict:
    """Requests that are stopped twice, the second time while blocks of a post-copy wake are still to come if they
    sleep, and one that then finds what such blocks have."""
    begin(one, 0, ["long", "long-seeded"])
    run(one.engine)
    add_requests(one.engine, TAKEN_OVER)
    answers, result = run(one.engine, 9), {"deferred_blocks": [], "in_flight": []}
    for to in ("host", "disk"):
        one.llm.sleep(level=1, preserve_state=True, to=to) if early else one.llm.sleep(level=0)
        answers |= one.stopped()
        result["deferred_blocks"].append(one.llm.wake_up(early=early).deferred_blocks)
        answers |= run(one.engine, 4)
        result["in_flight"].append(len(one.core.batch_queue))
    result["before"] = one.llm.torpor.call("state")["deferred"]
    add_requests(one.engine, ["long-seeded"])
    result["answers"] = final(answers | run(one.engine))
    return result | {"after": one.llm.torpor.call("state")["deferred"]}


def take_over(one: InProcess, steps: int, more: int) -> dict:
    """A checkpoint while serving, some steps whose tokens its readers get, and then a new engine: by request, whether
    the tokens are those of a run that was only paused."""
    from torpor import _core
    from torpor.vllm import outputs
    from torpor.vllm.server.recorder import Recorder

    begin(one, steps, TAKEN_OVER)
    one.llm.checkpoint()
    reference = one.finish({})
    recorder = Recorder(one.engine.output_processor, _core.DeliveryLog({"engine": {}}), False)
    begin(one, steps, TAKEN_OVER)
    path = one.llm.checkpoint().checkpoint
    run(one.engine, more)
    given = recorder.answers.pack()
    tokens = {a["request"]["id"]: len(a["request"]["output_token_ids"]) for a in recorder.answers.all()}
    one.engine.abort_request(list(TAKEN_OVER))
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": given, "hold": True})
    assert len(report["replayed"]["extended"]) == len(TAKEN_OVER), report["replayed"]
    for entry in report["outputs"]["requests"]:
        assert len(entry["token_ids"]) == tokens[entry["id"]]
        entry["text"] = None
    outputs.restore(one.engine.output_processor, report["outputs"], with_queues=False)
    one.llm.torpor.call("end_hold", {"keep": True})
    answers = one.finish({})
    return {name: answers[name][1][0][1] == reference[name][1][0][1] for name in TAKEN_OVER}


def wake(model: Path, directory: Path, paths: list[str]) -> list:
    if gpu_path.pretends_cuda():  # load_format="torpor" is refused there
        one = make(model, directory)
    else:
        bare = without_weights(model, directory.parent / "bare")
        one = make(bare, directory, load_format="torpor", model_loader_extra_config={"checkpoint": paths[0]})
    results = []
    for path in paths:
        report = one.llm.wake_up(from_checkpoint=path)
        answers = run(one.engine)
        recomputed = one.llm.torpor.state().recomputed_tokens
        results.append({"answers": answers, "failed": report.failed_requests, "recomputed": recomputed})
        one.llm.reset_prefix_cache()
    return results


def main() -> None:
    what, model, directory, values = sys.argv[1:]
    result = {"sleep": sleep, "wake": wake}[what](Path(model), Path(directory), json.loads(values))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    assert set(TAKEN_OVER) <= REQUESTS.keys()
    main()
