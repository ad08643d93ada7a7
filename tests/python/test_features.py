# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM, each in an engine of its own: it sleeps, a new process goes on, another takes over."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import gpu_path
from conftest import LONG_ON_GPU_PATH, COLLECTED, result_of
from feature_models import write_adapter
from features import FEATURES, WAYS
from requests_of_tests import run
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

HERE = Path(__file__).parent
RUNNER = "GPU path" if gpu_path.active() else "CPU"


def _marked():
    for name, feature in FEATURES.items():
        marks = [pytest.mark.feature(feature.row or name, *feature.ways)]
        if "GPU path" in feature.on:
            marks.append(pytest.mark.gpu_path)
        if "GPU path" in feature.long_on:
            marks += LONG_ON_GPU_PATH
        if "CPU" in feature.long_on and not gpu_path.active():
            marks.append(pytest.mark.long)
        if name == "prefix hashes by xxhash":  # it has a take-over, and little else
            marks.append(pytest.mark.core)
        if "CPU" in feature.on or gpu_path.active():
            yield pytest.param(name, marks=marks, id=name.replace(",", "").replace(" ", "-"))


@pytest.mark.slow
@pytest.mark.parametrize("name", _marked())
def test_identical_with(name, zygote, real_model, tmp_path):
    env = os.environ | FEATURES[name].environment
    process = HERE / "feature_process.py"
    before = result_of(zygote.run([process, "first", name, tmp_path, real_model], env=env))
    expected = before["expected"]
    assert FEATURES[name].shown(expected)
    assert before["differing"] == [] and before["recomputed"] == 0
    assert before.get("taken_over", []) == []
    after = result_of(zygote.run([process, "second", name, tmp_path, before["checkpoint"]], env=env))
    assert after["failed"] == [] and after["recomputed"] == 0
    assert after["drafts"] == before["drafts"]
    if gpu_path.active() and name.startswith("speculation"):
        assert any(any(tokens) for tokens in after["drafts"].values())
    assert {n: a for n, a in before["given"].items() if a[0]} | after["answers"] == expected
    assert len(after["answers"]) > 0


@pytest.mark.slow
def test_an_adapter_that_is_gone_or_another_ends_its_requests_alone(zygote, real_model, tmp_path):
    process = HERE / "feature_process.py"
    before = result_of(zygote.run([process, "only", "LoRA", tmp_path, real_model]))
    model = json.loads((tmp_path / "model/config.json").read_text())
    write_adapter(tmp_path / "first", model, 99, 0.5)
    shutil.rmtree(tmp_path / "third")
    after = result_of(zygote.run([process, "second", "LoRA", tmp_path, before["checkpoint"]]))
    why = {problem["id"].rsplit("-", 1)[0]: problem["error"] for problem in after["failed"]}
    assert why.keys() == {"first", "seeded", "third"}
    assert "is not the one that it began with" in why["first"] and "cannot be loaded from" in why["third"]
    expected = before["expected"]
    assert after["answers"]["second"] == expected["second"]


@pytest.mark.gpu_path
@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_request_sleeps_while_its_grammar_is_compiled(one, monkeypatch, to):
    manager = one.core.structured_output_manager
    compiled, stock = threading.Event(), manager._create_grammar

    def create_grammar(request):
        assert compiled.wait(600)
        return stock(request)

    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(regex="[a-d]{12}")
    )
    answers = one.begin(0, ["greedy"])
    monkeypatch.setattr(manager, "_create_grammar", create_grammar)
    one.engine.add_request("late", "abc", params)
    answers |= run(one.engine, 3)
    [late] = one.core.scheduler.deferred_waiting
    assert late.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    report = one.llm.sleep(level=1, preserve_state=True, to=to)
    answers |= one.stopped()
    one.llm.wake_up()
    compiled.set()
    if to == "disk":
        run(one.engine)
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=report.checkpoint)
    finished = one.finish(answers)
    assert finished["greedy"] == one.expected["greedy"]
    text = finished["late"][1][0][2]
    assert len(text) == 12 and set(text) <= set("abcd")


def rows_of_the_document() -> dict[str, list[set[str]]]:
    """The table of features in docs/vllm.md: on which runners each is tested, a set a way."""
    text = (HERE.parents[1] / "docs/vllm.md").read_text()
    table = text.split("| feature | ", 1)[1].split("\n\n", 1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == [*(WAYS[:-1]), "crash take-over"], "the columns are others"
    return {name: [set(cell.split(", ")) for cell in ways] for name, *ways in cells[2:]}


@pytest.mark.gpu_path
def test_the_table_of_features_says_what_is_tested(request):
    marked = {}
    for _, row, *ways in request.config.stash[COLLECTED]:
        marked.setdefault(row, set()).update(ways)
    table = rows_of_the_document()
    wanted = {row: [RUNNER in cell for cell in cells] for row, cells in table.items() if row in marked}
    assert wanted == {row: [way in ways for way in WAYS] for row, ways in marked.items()}
    files = {path for path, *_ in request.config.stash[COLLECTED]}
    if files == {path for path in HERE.glob("test_*.py") if "mark.feature(" in path.read_text()}:  # all are collected
        assert [row for row in table if row not in marked and any(RUNNER in cell for cell in table[row])] == []
