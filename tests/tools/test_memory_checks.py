# SPDX-License-Identifier: Apache-2.0
"""The checks of torch over torpor, with a stand-in for torch and its GPU, and with faults in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from devtool import gpu_bundle

CHECKS = ROOT / "tools/gpu_check/memory_checks.py"
STAND_IN = Path(__file__).parent / "fake_torch"


def checked(
    tmp_path, *words, fault: str = "", torch: bool = True, **variables: str
) -> tuple[int, dict[str, dict], list[dict]]:
    """Return the exit code, the rows by name, and all lines of the file."""
    out = tmp_path / "rows.jsonl"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
    environment |= {"TORPOR_MEMORY_DEVICE": "host", "FAKE_TORCH_FAULT": fault}
    environment["PYTHONPATH"] = str(STAND_IN if torch else tmp_path)
    environment |= variables
    command = [sys.executable, "-S", CHECKS, *words, "--library", gpu_bundle.LIBRARY, "--out", out]
    command += [
        "--gib",
        0.01,
        "--stretch-seconds",
        0.4,
        *([] if "--most-seconds" in words else ["--most-seconds", 200]),
    ]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {line["check"]: line for line in lines if "check" in line}
    assert all(set(line) == {"check", "expected", "seen", "verdict", "figures"} for line in found.values())
    assert done.stdout.count("\n") >= len(found) and lines[-1]["ended"], done.stderr
    return done.returncode, found, lines


def verdicts(found: dict[str, dict]) -> dict[str, str]:
    return {name: each["verdict"] for name, each in found.items()}


def test_every_check_of_torch_runs_to_its_end(tmp_path):
    code, found, _ = checked(tmp_path, "torch", "--stall-ms", 30_000)  # who else is busy here counts, too
    parts = ("pool", "graph_pool", "trim", "capture", "stall")
    assert code == 0 and verdicts(found) == dict.fromkeys(parts, "passed"), found
    assert found["trim"]["figures"]["kept_by_pool_bytes"] >= 0
    assert found["capture"]["figures"]["graphs"] > 0 and found["stall"]["figures"]["alone_worst_ms"] > 0


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        ("other_bytes", "graph_pool", "other values"),
        ("capture", "capture", "captures failed"),
        ("die", "graph_pool", "the process ended with 3"),
    ],
)
def test_a_fault_fails_its_check(tmp_path, fault, check, said):
    code, found, _ = checked(tmp_path, "torch", "--only", check, fault=fault)
    assert code == 1 and verdicts(found) == {check: "failed"} and said in found[check]["seen"], found


def test_what_the_machine_lacks_is_named_and_not_counted_as_passed(tmp_path):
    code, found, _ = checked(tmp_path, "torch", "--only", "trim", fault="no_gpu")
    assert code == 0 and found["trim"]["verdict"] == "not here" and "CUDA device" in found["trim"]["seen"]
    code, found, lines = checked(tmp_path, "torch", "--only", "trim", torch=False)
    assert code == 0 and found["trim"]["verdict"] == "not here" and "torch" in found["trim"]["seen"]
    assert (lines[-1]["passed"], lines[-1]["not here"]) == (0, 1)


def test_speed_is_printed_round_by_round_and_who_is_not_there_is_named(tmp_path):
    code, found, lines = checked(tmp_path, "speed", "--only", "cumem", "memory_saver", "unchanged", "2 threads")
    assert code == 0, found
    assert {name: each["verdict"] for name, each in found.items() if each["verdict"] != "passed"} == {
        "speed cumem": "not here",
        "speed torch_memory_saver": "not here",
    }
    assert "cumem_allocator.abi3.so" in found["speed cumem"]["seen"]
    rounds = [each["figures"] for name, each in found.items() if name.startswith("speed torpor, unchanged")]
    assert [each["round"] for each in rounds] == [0, 1, 2, 3]
    assert all(each["given_back_bytes"] > 0.9 * each["bytes"] for each in rounds)
    assert lines[-2] == {"gb_per_second": {}, "times_theirs": {}}  # no plain turn was taken


@pytest.mark.parametrize("fault", ["", "forgets"])
def test_others_that_are_there_are_measured_in_the_same_way(tmp_path, fault):
    """Over stand-ins of both, and of the CUDA runtime. One whose copies do nothing is seen."""
    copy = "return 0;" if fault else "memcpy(to, from, size); return 0;"
    (tmp_path / "runtime.c").write_text(
        f"#include <string.h>\nint cudaMemcpy(void *to, void *from, size_t size, int kind) {{ {copy} }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcudart.so.0", "runtime.c"], cwd=tmp_path, check=True)
    others = {
        "PYTHONPATH": f"{STAND_IN}{os.pathsep}{STAND_IN.parent / 'fake_rivals'}",
        "LD_LIBRARY_PATH": str(tmp_path),
        "TORPOR_CHECK_CUMEM": str(STAND_IN.parent / "fake_rivals/cumem.py"),
    }
    words = ["--only", "cumem"] if fault else ["--only", "cumem", "memory_saver"]
    code, found, lines = checked(tmp_path, "speed", *words, **others)
    if fault:
        assert code == 1 and found["speed cumem, round 0"]["verdict"] == "failed", found
        return
    assert code == 0 and set(verdicts(found).values()) == {"passed"}, found
    figures = lines[-2]["gb_per_second"]
    assert set(figures) == {"cumem", "torch_memory_saver"} and set(figures["cumem"]) == {"first_sleep", "sleep", "wake"}


def test_figures_of_all_are_put_beside_each_other():
    sys.path.append(str(CHECKS.parent))
    from memory_checks import beside

    def turn(who, number, sleep, wake, name="", verdict="passed"):
        figures = {"who": who, "round": number, "sleep_gb_per_second": sleep, "wake_gb_per_second": wake}
        return {"check": f"speed {who}{name}, round {number}", "verdict": verdict, "figures": figures}

    rows = [turn("torpor", 0, 4, 30), turn("torpor", 1, 44, 40), turn("torpor", 2, 40, 40), turn("cumem", 0, 2, 20),
            turn("cumem", 1, 40, 10), turn("torpor", 1, 90, 90, ", 2 threads"),
            turn("cumem", 2, 1, 1, verdict="failed")]  # fmt: skip
    figures = beside(rows)
    assert figures["gb_per_second"]["torpor"] == {"first_sleep": 4, "sleep": 42, "wake": 40}
    assert figures["times_theirs"] == {"cumem": {"first_sleep": 2, "sleep": 1.05, "wake": 2.67}}


def test_a_part_ends_when_its_time_is_used_up_and_keeps_what_it_had(tmp_path):
    code, found, _ = checked(tmp_path, "torch", "--minutes", 0.15, "--most-seconds", 3, fault="hang")
    assert code == 1 and found["pool"]["verdict"] == "failed" and "no end within" in found["pool"]["seen"]
    assert found["stall"]["verdict"] == "not here", found
    assert "used up" in found["stall"]["seen"]
