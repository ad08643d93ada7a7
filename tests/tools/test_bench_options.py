# SPDX-License-Identifier: Apache-2.0
"""Options of benches: values that they refuse, what documents name, and the smallest shape of each, which runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
from conftest import ROOT
from devtool import checks, commands

BENCH = ROOT / "tools/bench"


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["within_step", "--tokens=64,x"], "argument --tokens: 'x' is not a whole number of 1 or more"),
        (["within_step", "--rounds=0"], "argument --rounds: '0' is not a whole number of 1 or more"),
        (["trl", "--arms=keep,other"], "argument --arms: there is no other; choose of recompute, keep, resend"),
        (
            ["peers", "--work=agents,all"],
            "argument --work: there is no all; choose of return, restart, streams, agents",
        ),
        (["cold_start", "--rounds=-1"], "argument --rounds: '-1' is not a whole number of 0 or more"),
        (["sessions", "--lengths=64,0"], "argument --lengths: '0' is not a whole number of 1 or more"),
        (["verl", "--prompt-tokens=-1"], "argument --prompt-tokens: '-1' is not a whole number of 1 or more"),
    ],
)
def test_a_value_that_cannot_be_measured_is_refused_by_its_option(arguments, refused):
    name, *options = arguments
    done = subprocess.run([sys.executable, BENCH / f"{name}_bench.py", *options], capture_output=True, text=True)
    assert done.returncode == 2 and refused in done.stderr and "Traceback" not in done.stderr, done.stderr


def commands_of(page: str, text: str) -> list[tuple[str, list[str]]]:
    """Each bench that a document starts, with its options. A bench of C++ has options with a blank, too, where it is
    named as the program; the pages of benches name some without `tools/dev bench`."""
    found = []
    for quoted in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S)):
        _, starts, words = quoted.rpartition("tools/dev bench ")
        name, *options = words.split() or [""]
        is_program = name.removesuffix("_bench") in BENCHES and not starts
        if starts and name.isidentifier():
            assert all(word.startswith("-") for word in options), f"{page}: a value behind a blank: {quoted}"
        if starts or (page in OF_BENCHES and is_program and options[:1] and options[0].startswith("--")):
            found.append((name if starts else name.removesuffix("_bench"), options))
    return [(name, [word for word in options if "…" not in word]) for name, options in found if name.isidentifier()]


OF_BENCHES = ("docs/measurements.md", "tools/bench/README.md")
BENCHES = commands.BENCHES
# Parses as the bench does, and ends there.
PARSE = """
import argparse, json, os, runpy, sys
stock = argparse.ArgumentParser.parse_args
class Parsed(Exception): pass
def parse(self, *arguments):
    stock(self, *arguments)
    raise Parsed
argparse.ArgumentParser.parse_args = parse
for path, options in json.loads(sys.argv[1]):
    sys.argv, sys.path[0] = [path, *options], os.path.dirname(path)
    try:
        runpy.run_path(path, run_name="__main__")
    except Parsed:
        pass
"""


def test_each_bench_takes_the_options_that_documents_name():
    found = {}
    for page in [path for path in checks.tracked(ROOT) if path.suffix == ".md"]:
        name = str(page.relative_to(ROOT))
        found |= {(bench, *options): name for bench, options in commands_of(name, page.read_text()) if options}
    assert len(found) > 25 and {"sessions", "connector", "peers", "start", "codec"} <= {bench for bench, *_ in found}
    of_python = []
    for (bench, *options), page in found.items():
        path = ROOT / BENCHES[bench]
        if path.suffix == ".py":
            of_python.append((str(path), options))
            continue
        source = (ROOT / f"tools/bench/{path.name}.cpp").read_text()
        for option in [word.partition("=")[0] for word in options if word.startswith("--")]:
            assert f'"{option}"' in source, f"{page}: {bench} has no {option}"
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(of_python)],
        env=os.environ | {"TORPOR_TEST_MODEL": "/none"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


# Each bench in its smallest shape: it ends, and what it checks itself holds. Trainers have tests of their own, which
# train (test_trl.py, test_verl_training.py).
SMALLEST = {
    "scheduler_state": ["--running=4", "--waiting=4", "--rounds=1"],
    "sleep_wake": ["--mib=64", "--regions=4", "--rounds=1"],
    "offload_scheduler": ["--rounds=10"],
    "kv_copy": ["--mib=64", "--rounds=1"],
    "kv_copy_torch": ["--mib=64", "--rounds=1"],
    "store": ["--mib=64", "--rounds=1"],
    "tier_replay": [],
    "arena": ["--ranges=1000", "--calls=100", "--baseline-calls=10", "--rounds=1"],
    "blocks": ["--blocks=1000", "--live=100", "--rounds=1"],
    "block_index": ["--slots=10000", "--rounds=1"],
    "checkpoint": ["--mib=64", "--rounds=1", "--checkpoints=10"],
    "scheduler_snapshot": ["--running=4", "--waiting=4", "--rounds=1"],
    "python_baselines": ["--mib=64", "--rounds=1"],
    "server": ["--rounds=1"],
    "start": ["--pairs=1"],
    "steps": ["--streams=1", "--steps=4", "--rounds=1"],
    "cold_start": ["--rounds=0"],
    "response_log": ["--rounds=1"],
    "server_sleeps": ["--rounds=1"],
    "continuous": ["--rounds=1", "--streams=2"],
    "remote": ["--rounds=1", "--blocks=8"],
    "offloading": ["--rounds=1", "--blocks=8", "--only=disk"],
    "weights_load": ["--rounds=1"],
    "connector": ["--rounds=1", "--requests=20", "--only=torpor eager"],
    "within_step": ["--tokens=64", "--streams=1", "--rounds=1"],
    "rl": ["--rounds=1", "--groups=1", "--group-size=2", "--tokens=8"],
    "codec": ["--mib=8", "--rounds=1"],
    "early": ["--mib=64", "--requests=4", "--rounds=1"],
    "early_vllm": ["--rounds=1"],
    "swap": ["--mib=64", "--rounds=1"],
    "swap_servers": ["--rounds=1"],
    "paced_link": ["--mib=64", "--sweep-mib=16", "--rounds=1"],
    "events": ["--events=1000", "--rounds=1"],
    "console": ["--rounds=1", "--requests=20", "--seconds=0.5"],
    "sessions": ["--rounds=1", "--hibernations=2", "--lengths=250"],
    "preemptions": ["--lengths=250", "--turns=1"],
    "peers": ["--contestants=torpor", "--work=return", "--starts=1", "--tokens=1000"],
}
OF_TRAINERS = {"trl", "verl"}
QUICK = {
    "scheduler_state", "offload_scheduler", "store", "arena", "blocks", "block_index", "scheduler_snapshot", "codec",
    "early", "events",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SMALLEST]
)
def test_each_bench_runs(name):
    path = ROOT / BENCHES[name]
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    command = [sys.executable, path] if path.suffix == ".py" else [path]
    done = subprocess.run([*command, *SMALLEST[name], "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout[done.stdout.index("{") :]), done.stdout


def test_the_console_bench_publishes_events_in_a_process_of_its_own():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, BENCH / "console_bench.py", "--publish", folder, "100"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publishing:
            assert publishing.stdout.readline() == "ready\n"
            publishing.kill()


def test_there_is_a_smallest_shape_of_each_bench():
    assert SMALLEST.keys() == BENCHES.keys() - OF_TRAINERS


def test_the_help_of_a_bench_is_its_own(capfd, monkeypatch):
    monkeypatch.setattr(commands.setup, "everything", lambda: (sys.executable, "/none"))
    monkeypatch.setattr(commands, "cmake_build", None)  # it needs none
    assert commands.main(["bench", "scheduler_state", "--help"], MANUAL) == 0
    assert "--waiting WAITING" in capfd.readouterr().out
    assert commands.main(["bench", "--help"], MANUAL) == 0
    assert "the one line" in capfd.readouterr().out


MANUAL = "tools/dev\n\n  tools/dev bench  the one line\n  tools/dev build\n"
