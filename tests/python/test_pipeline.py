# SPDX-License-Identifier: Apache-2.0
"""A model in two stages of a pipeline, each in a process of its own; only the last one samples."""

import json
from pathlib import Path

import pytest
import gpu_path
from conftest import long_on_gpu_path, result_of
from requests_of_tests import final

HERE = Path(__file__).parent
STEPS = [9]
DEPTH = 3 if gpu_path.active() else 2  # batches at most, and one less between steps


@pytest.mark.feature("pipeline stages", "in process", "new process", "take-over")
@pytest.mark.slow
@pytest.mark.gpu_path
@long_on_gpu_path
@pytest.mark.long
def test_two_stages_sleep_and_a_new_process_goes_on(zygote, tiny_model, tmp_path):
    def process(what, values):
        words = [HERE / "pipeline_process.py", what, tiny_model, tmp_path / "store", json.dumps(values)]
        return result_of(zygote.run(words))

    slept = process("sleep", STEPS)
    assert slept["differing"] == [] and slept["recomputed"] == 0 and slept["reloaded"]
    assert max(slept["in_flight"]) == DEPTH - 1
    assert all(slept["taken_over"].values()), slept["taken_over"]
    awake, early = slept["early"]
    assert awake["answers"] == early["answers"] and awake["deferred_blocks"] == [0, 0]
    assert min(early["deferred_blocks"]) > 4 and early["before"]["pending"] == early["deferred_blocks"][-1]
    after = early["after"]
    assert (
        4 < after["arrived"] < early["deferred_blocks"][-1] and after["unreadable"] == 0 and after["recomputed"] == []
    )
    assert max(early["in_flight"]) == DEPTH - 1
    woken = process("wake", slept["paths"])
    for reference, delivered, result in zip(slept["references"], slept["delivered"], woken, strict=True):
        assert final(delivered | result["answers"]) == reference
        assert result["failed"] == [] and result["recomputed"] == 0
