# SPDX-License-Identifier: Apache-2.0
"""The checks of an engine for a machine with a GPU, on the GPU path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, started
from devtool import gpu_bundle

HERE = Path(__file__).parent
CHECKS = ROOT / "tools/gpu_check/engine_checks.py"
PASSED = {
    "1 deterministic without a sleep", "2 sleep and wake, eager, host", "2 sleep and wake, eager, disk",
    "4 addresses over a sleep", "5 checkpoint for a new process", "5 new process",
    "6 generators, unseeded top-k and top-p", "7 level 2, reload_weights", "8 KV blocks",
    "8 KV blocks, layout BLHNC", "8 KV blocks, layout BHLNC", "9 sleep right after a step", "10 unified buffers",
    "11 two steps in flight", "12 tensor parallel, two ranks", "14 drafts by n-grams",
    "15 memory and time", "16 a loaded engine",
}  # fmt: skip
NOT_HERE = {
    "1 deterministic, CUDA graphs, without torpor", "1 deterministic without a sleep, CUDA graphs",
    "3 sleep and wake, CUDA graphs, host", "3 sleep and wake, CUDA graphs, disk", "4 addresses, graphs replay",
    "5 checkpoint, CUDA graphs", "5 new process, graphs captured again", "5 checkpoint, no autotuning",
    "5 new process, no autotuning", "6 generators, FlashInfer", "12 NCCL and custom all-reduce", "13 FP8 KV", "13 MLA",
    "14 drafts by EAGLE",
}  # fmt: skip


def rows(done: subprocess.CompletedProcess) -> dict[str, dict]:
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(each) == {"check", "expected", "seen", "verdict"} and each["seen"] for each in found)
    assert len({each["check"] for each in found}) == len(found)
    return {each["check"]: each for each in found}


def verdicts(found: dict[str, dict]) -> dict[str, str]:
    return {name: each["verdict"] for name, each in found.items()}


@pytest.mark.long
def test_every_check_that_needs_no_gpu_passes_and_no_other_does(tmp_path):
    done = started(CHECKS, "--gpu-path", "--dir", tmp_path)
    found = rows(done)
    assert verdicts(found) == dict.fromkeys(PASSED, "passed") | dict.fromkeys(NOT_HERE, "not here"), done.stderr
    assert done.returncode == 0
    assert f"{len(PASSED)} passed, 0 failed, {len(NOT_HERE)} not here" in done.stderr
    assert found["9 sleep right after a step"]["seen"].startswith("20 sleeps")
    assert "--eagle-head" in found["14 drafts by EAGLE"]["seen"]


@pytest.mark.long
def test_drafts_of_a_head_are_checked_where_one_is_given(tmp_path, real_model):
    from feature_models import beside, with_eagle_head

    model = with_eagle_head(tmp_path / "model", real_model)
    words = ["--gpu-path", "--dir", tmp_path / "checks", "--only", 14, "--model", model]
    found = rows(started(CHECKS, *words, "--eagle-head", beside(model, "eagle")))
    assert set(verdicts(found).values()) == {"passed"} and len(found) == 2, found


@pytest.mark.long  # an engine for each fault
def test_a_fault_is_a_failed_row_and_the_other_checks_run(tmp_path):
    words = ["--gpu-path", "--dir", tmp_path, "--only", 1, 2, 4, 6]
    done = started(HERE / "engine_with_faults.py", *words, forked=9, on_gpu_path=True)
    found = rows(done)
    failed = {
        "1 deterministic without a sleep": "RuntimeError: planted",
        "2 sleep and wake, eager, host": "slept after step 2: greedy: from token",
        "2 sleep and wake, eager, disk": "slept after step 2: greedy: from token",
        "6 generators, unseeded top-k and top-p": "the process ended with 3",
    }
    assert verdicts(found) == dict.fromkeys(failed, "failed") | {
        "4 addresses over a sleep": "passed",
        "4 addresses, graphs replay": "not here",
        "1 deterministic, CUDA graphs, without torpor": "not here",
        "1 deterministic without a sleep, CUDA graphs": "not here",
        "6 generators, FlashInfer": "not here",
    }, done.stderr
    assert all(found[name]["seen"].startswith(seen) for name, seen in failed.items()), done.stdout
    assert done.returncode == 1


def test_a_check_that_is_at_work_when_the_time_is_used_up_is_not_counted(tmp_path):
    words = ["--gpu-path", "--dir", tmp_path, "--only", 1, 3, "--minutes", 0.001]
    done = started(CHECKS, *words)
    found = rows(done)
    assert done.returncode == 0 and "0 passed, 0 failed, 5 not here" in done.stderr, done.stderr
    assert "0.001 minutes are used up" in found["1 deterministic without a sleep"]["seen"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu-path", "--only", "17"], "--only 17"),
        (["--gpu-path", "--sleeps", "0"], "--sleeps is 0"),
        (["--gpu-path", "--minutes", "0"], "--minutes is 0"),
        ([], "--model"),
        (["--model", "x"], "no CUDA device"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(words, named):
    done = started(CHECKS, *words, forked=1)
    assert done.returncode == 2 and named in done.stderr and done.stdout == ""


def test_the_bundle_has_what_its_readme_names(tmp_path):
    gpu_bundle.add_scripts(tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert "engine_checks.py --model" in readme
    for part in ("core", "library", "torch", "speed", "sanitizer"):
        assert f"run {part}" in readme
    assert started(tmp_path / "engine_checks.py", "--help").returncode == 0
    done = started(tmp_path / "engine_checks.py", "--gpu-path")
    assert done.returncode == 2 and "needs a checkout" in done.stderr
    for name in ("checks", "checked_engine"):
        assert (tmp_path / f"{name}.py").exists()


def test_the_command_says_what_it_makes_and_takes_no_other_word():
    command = [sys.executable, ROOT / "tools/dev", "gpu_check"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "gpu_check/run --help" in done.stdout and done.stderr == ""
    done = subprocess.run([*command, "--cycles"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "--cycles" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: ./run PART"),
        (["core", "--help"], 0, "--cycle-gib"),
        (["torch", "--help"], 0, "--most-seconds"),
        ([], 2, "usage: ./run PART"),
        (["everything"], 2, "no part everything"),
        (["core", "--minutes", "ten"], 2, "ten"),
        (["torch", "--minutes", "0"], 2, "--minutes is 0"),
    ],
)
def test_the_bundles_program_has_help_for_each_part_and_names_a_wrong_word(bundle, words, code, said):
    done = run(bundle, *words)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(("suite", "verdict"), [("exit 0", "passed"), ("exit 1", "failed")])
def test_a_part_tells_its_rows_in_a_file_and_how_it_ended(bundle, suite, verdict):
    """A stand-in for the suite; the figures need a driver."""
    (bundle / "cuda_device_test").write_text(f"#!/bin/sh\n{suite}\n")
    (bundle / "cuda_device_test").chmod(0o755)
    done = run(bundle, "core", "--minutes", "1")
    assert done.returncode == 3 and "no NVIDIA driver" in done.stderr and "at most 60 s" in done.stderr
    lines = (bundle / "results/core.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == [verdict]
    assert "MemTotal" in (bundle / "results/machine.txt").read_text()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_check")
    program = gpu_bundle.PROGRAMS[0]
    if not program.exists():
        pytest.skip("this build has no CUDA headers")
    gpu_bundle.add_programs(folder, (program,))
    gpu_bundle.add_scripts(folder)
    return folder


def run(bundle, *words) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    return subprocess.run([bundle / "run", *words], env=environment, capture_output=True, text=True, timeout=600)
