# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with a feature of features.py.

    feature_process.py first NAME FOLDER TOKENIZER    sleeps and wakes in this process, leaves a checkpoint
    feature_process.py only NAME FOLDER TOKENIZER     only leaves a checkpoint
    feature_process.py second NAME FOLDER CHECKPOINT  a new process goes on from it; its weights may come from there

Prints its answers and what differed from its own run that never slept.
"""

import json
import sys
from pathlib import Path

from conftest import InProcess
from features import FEATURES
import gpu_path
from requests_of_tests import run
from tiny_model import make_model

from torpor import _core, errors
from torpor.vllm.server.recorder import Recorder


def engine(name: str, folder: Path, **options) -> InProcess:
    feature, model = FEATURES[name], folder / "model"
    return InProcess(model, folder / "store", requests=feature.requests(model), **feature.options(model), **options)


def first(name: str, folder: Path, only_leave: bool) -> dict:
    """One run that sleeps to host, and later to disk; the checkpoint is for a new process."""
    feature, one = FEATURES[name], engine(name, folder)
    result = {"expected": one.expected}
    to_host, to_disk = feature.steps
    answers = one.begin(to_host)
    if not only_leave:
        one.llm.sleep(level=1, preserve_state=True)
        answers |= one.stopped()
        if gpu_path.active():
            fail_to_wake(one)
        one.llm.wake_up()
    answers |= run(one.engine, to_disk - to_host)
    result["checkpoint"] = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    answers |= one.stopped()
    result["given"] = dict(answers)
    if only_leave:
        return result
    one.llm.wake_up()
    result["drafts"] = drafts(one)
    finished = one.finish(answers)
    result["differing"] = [name for name in one.expected if finished.get(name) != one.expected[name]]
    result["recomputed"] = one.llm.torpor.state().recomputed_tokens
    if "take-over" in feature.ways:
        result["taken_over"] = taken_over(one, 3, 4, feature.certain)
    return result


def fail_to_wake(one: InProcess) -> None:
    """A wake that fails while the requests go back into their slots. What it has taken apart the next one needs."""

    def add_requests(_) -> None:
        raise MemoryError("refused for this test")

    one.runner.add_requests = add_requests
    try:
        one.llm.wake_up()
    except errors.Error as problem:
        assert "refused for this test" in str(problem), problem
    else:
        raise AssertionError("the wake did not fail")
    finally:
        del one.runner.add_requests
    assert one.llm.is_sleeping()


def drafts(one: InProcess) -> dict[str, list[int]]:
    """The tokens that model runner V2 has drafted for each request's next step."""
    state = one.core.torpor_side.hooks.capture()["workers"][0]["engine"]["requests"]
    return {item["id"]: item["drafts"]["tokens"] for item in state if item.get("drafts")}


def taken_over(one: InProcess, steps: int, since: int, certain: tuple[str, ...]) -> list[str]:
    """Requests that go on otherwise after their readers were given more than a checkpoint has, as after a kill."""
    processor = one.engine.output_processor
    replaced = ("add_request", "process_outputs", "abort_requests", "propagate_error")
    stock = {name: getattr(processor, name) for name in replaced}
    answers = _core.DeliveryLog({"directory": None, "engine": one.llm.torpor.call("fingerprint"), "keep_seconds": 600})
    recorder = Recorder(processor, answers, False)
    answers = one.begin(steps)
    path = one.llm.checkpoint().checkpoint
    answers |= run(one.engine, since)
    packed = recorder.answers.pack()
    recorder.close()
    run(one.engine)
    one.llm.reset_prefix_cache()
    report = one.llm.torpor.call("wake_up", {"from_checkpoint": path, "answers": packed, "hold": True})
    if report["failed_requests"]:
        return [problem["error"] for problem in report["failed_requests"]]
    one.engine.renderer.clear_mm_cache()  # as a new process has it
    lost = recorder.take_up(report["restored"], report["outputs"])
    one.llm.torpor.call("end_hold", {"keep": True})
    for state in processor.request_states.values():
        state.queue = None  # step() returns what comes
    finished = one.finish(answers)
    for name, method in stock.items():
        setattr(processor, name, method)
    tokens = {name: [choice[1] for choice in answer[1]] for name, answer in finished.items()}
    expected = {name: [choice[1] for choice in answer[1]] for name, answer in one.expected.items()}
    different = [name for name in certain or expected if tokens.get(name) != expected[name]]
    return [f"{name}: {tokens.get(name)} instead of {expected[name]}, lost {lost}" for name in different]


def second(name: str, folder: Path, checkpoint: str) -> dict:
    options = {}
    feature = FEATURES[name]
    # special models get their weights from the checkpoint; on a GPU that is refused
    if feature.model is not make_model and not feature.own_files and not gpu_path.pretends_cuda():
        options = {"load_format": "torpor", "model_loader_extra_config": {"checkpoint": checkpoint}}
        for weights in (folder / "model").glob("*.safetensors"):
            weights.unlink()
    one = engine(name, folder, **options)
    report = one.llm.wake_up(from_checkpoint=checkpoint)
    result = {"failed": report.failed_requests, "drafts": drafts(one)}
    answers = one.finish({})
    return result | {"answers": answers, "recomputed": one.llm.torpor.state().recomputed_tokens}


def main() -> None:
    which, name, folder, argument = sys.argv[1:]
    if which in ("first", "only"):
        FEATURES[name].model(Path(folder) / "model", Path(argument))
        result = first(name, Path(folder), which == "only")
    else:
        result = second(name, Path(folder), argument)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
