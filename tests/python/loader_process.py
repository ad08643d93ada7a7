# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: engines with load_format="torpor", and a model directory without weights.

loader_process.py first MODEL STORE           an engine with the model's own files leaves a checkpoint
loader_process.py second MODEL STORE PATH WRONG [WAKE FILES]
    a new process fills its weights from it, wakes it, and goes on; all further arguments as JSON
"""

import json
import sys
from pathlib import Path

from conftest import InProcess
from requests_of_tests import run
from vllm import SamplingParams

from torpor.errors import Error

NAMES = ["greedy", "seeded"]


def first(model: Path, store: Path) -> dict:
    requests = {
        "greedy": ("The capital of France is", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
        "seeded": ("Once upon a time", SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)),
    }
    one = InProcess(model, store, requests=requests)
    expected = one.expected
    given = one.begin(5)
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    return {"expected": expected, "given": given, "path": path}


def chunks(one: InProcess) -> dict:
    """How often the rank moved or hashed a piece of memory since it started, by how that ended."""
    return one.llm.torpor.call("ledger")[0]["chunks_by_outcome"]


def second(model: Path, store: Path, path: str, wrong: dict, wake: str = "", files: str = "") -> dict:
    """`wrong`: starts that must be refused, each with its options. The result has why.

    `wake`: the checkpoint to wake, where it is another. `files`: a model with weights, to load anew at the end.
    """
    result = {"refused": {name: refused(store, {"model": model} | options) for name, options in wrong.items()}}
    one = InProcess(model, store, load_format="torpor", model_loader_extra_config={"checkpoint": path})
    result["loaded"] = chunks(one)
    report = one.llm.wake_up(from_checkpoint=wake or path)
    result["woken"], result["blocks"] = chunks(one), report.kept_blocks
    result["answers"] = run(one.engine)
    result["recomputed"] = one.llm.torpor.state().recomputed_tokens
    if files:
        one.llm.sleep(level=2)
        one.llm.wake_up()
        one.llm.collective_rpc("reload_weights", kwargs={"weights_path": files})
        result["reloaded"] = one.finish(one.begin(0, NAMES))
    return result


def refused(store: Path, options: dict) -> str:
    model, process = Path(options.pop("model")), options.pop("process", None)
    undo = after_loading(process) if process else lambda: None
    try:
        InProcess(model, store, load_format="torpor", **options)
    except Error as problem:
        return str(problem)
    finally:
        undo()
    return "not refused"


def after_loading(process: str):
    """A vLLM whose layers make more of their weights than it does."""
    from vllm.model_executor.layers.attention import Attention

    stock = Attention.process_weights_after_loading

    def more(layer, *args, **kwargs):
        stock(layer, *args, **kwargs)
        exec(process, {"layer": layer})

    Attention.process_weights_after_loading = more

    def undo() -> None:
        Attention.process_weights_after_loading = stock

    return undo


def main() -> None:
    which, model, store, *rest = sys.argv[1:]
    if which == "first":
        result = first(Path(model), Path(store))
    else:
        result = second(Path(model), Path(store), rest[0], *(json.loads(argument) for argument in rest[1:]))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
