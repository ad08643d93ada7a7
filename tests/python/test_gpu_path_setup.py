# SPDX-License-Identifier: Apache-2.0
"""The GPU path (tests/gpu_path): vLLM's default GPU path is in force on it, and it answers the same each time."""

import os
import re
from pathlib import Path

import pytest
import gpu_path
from conftest import result_of
from gpu_path import numbers

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.gpu_path]  # each starts an engine
LENGTH = 24  # tokens of most answers on the GPU path
IN_FORCE = {
    "runner": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "triton": True,
    "scheduler": "AsyncScheduler",
    "async_scheduling": True,
    "step": "step_with_batch_queue",
    "batches_at_most": 2,
    "batches_in_flight": 0,
}


@pytest.fixture(scope="session")
def on_gpu_path(gpu_path_zygote, gpu_path_model, tmp_path_factory):
    """Runs gpu_path_process.py with an engine of this kind."""

    def start(kind: str, variables: dict | None = None, **options) -> dict:
        words = [HERE / "gpu_path_process.py", kind, gpu_path_model, tmp_path_factory.mktemp("checkpoints")]
        environment = os.environ | gpu_path.environment(**options) | (variables or {})
        return result_of(gpu_path_zygote.run(words, env=environment))

    return start


@pytest.fixture(scope="session")
def in_process(on_gpu_path) -> dict:
    return on_gpu_path("in-process")


def tokens(answers: dict, names=None) -> dict:
    return {name: [completion[1] for completion in answers[name][1]] for name in names or answers}


def check_in_force(result: dict, workers: int = 1, kv_layout: str = "LBNHC") -> None:
    """The runner, the scheduler and the way of a step; and a batch is in flight when a step returns."""
    assert result["before"] == IN_FORCE | {"workers": workers, "kv_layout": kv_layout}
    assert result["in_flight"] == 1


def test_the_gpu_path_is_in_force_and_answers_the_same_twice(in_process):
    check_in_force(in_process)
    first, second = in_process["runs"]
    assert first == second
    texts = [completion[2] for _, completions, _ in first.values() for completion in completions]
    assert all(text.isascii() and text.isprintable() for text in texts) and len(set(texts)) == len(texts)
    lengths = {name: len(completions[0][1]) for name, (_, completions, _) in first.items() if name != "stops"}
    assert lengths["greedy"] == lengths["unseeded"] == lengths["bias"] == LENGTH, "a special token came"


def test_a_grammar_is_followed(in_process):
    assert re.fullmatch("[abc]{8}d", in_process["by_grammar"])


def test_what_stands_in_for_kernels_does_what_they_do(in_process):
    log_probabilities, ranks = in_process["kernels"]
    assert log_probabilities < 1e-5 and ranks == 0


@pytest.mark.long
def test_kernels_over_numpy_leave_what_the_interpreter_leaves(on_gpu_path, in_process):
    result = on_gpu_path("both-ways")
    assert result["runs"] == in_process["runs"][:1] and result["by_grammar"] == in_process["by_grammar"]
    assert result["launches"].keys() >= numbers.KERNELS
    assert result["different"] == []


@pytest.mark.long  # each of these kinds serves and sleeps in test_other_processes.py
@pytest.mark.parametrize(("kind", "workers"), [("own-core", 1), ("async", 1), ("two-ranks", 2)])
def test_the_gpu_path_is_in_force_in_other_processes(on_gpu_path, in_process, kind, workers):
    result = on_gpu_path(kind, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers == 2 else None)
    check_in_force(result, workers)
    first, second = result["runs"]
    assert tokens(first) == tokens(second)
    if workers == 1:  # sums over two ranks are other sums
        assert tokens(first) == tokens(in_process["runs"][0], first)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=pytest.mark.long) for layout in gpu_path.KV_LAYOUTS if layout != "LBNHC"],
)
def test_every_kv_layout_answers_the_same(on_gpu_path, in_process, layout):
    result = on_gpu_path("briefly", kv_layout=layout)
    check_in_force(result, kv_layout=layout)
    [answers] = result["runs"]
    assert tokens(answers) == tokens(in_process["runs"][0], answers) and len(answers) == 4


def test_with_slow_copies_who_waits_sees_the_same_and_who_does_not_sees_garbage(on_gpu_path, in_process):
    result = on_gpu_path("in-process", slow_copies=True)
    check_in_force(result)
    assert result["runs"] == in_process["runs"]
    assert result["late"] > 0, "nothing of the step was left to the device"
    assert tokens(result["unawaited"]) == {"greedy": [[1] * LENGTH], "seeded": [[1] * LENGTH]}
