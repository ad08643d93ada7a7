# SPDX-License-Identifier: Apache-2.0
"""What each word after tools/dev does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from devtool import (
    board,
    checks,
    contract,
    deploy,
    gpu_bundle,
    mutants,
    other_vllm,
    packages,
    plots,
    proof,
    reference,
    setup,
    site,
    testing,
    vllm_tests,
)
from devtool.durations import Step
from devtool.setup import ROOT, SetupError, cmake_build, say

PRESETS = ("dev", "release", "asan", "asan-rest", "tsan", "tsan-rest", "fuzz")
BENCHES = {
    "scheduler_state": "tools/bench/scheduler_state_bench.py",
    "sleep_wake": "build/release/tools/bench/sleep_wake_bench",
    "offload_scheduler": "build/release/tools/bench/offload_scheduler_bench",
    "kv_copy": "build/release/tools/bench/kv_copy_bench",
    "kv_copy_torch": "tools/bench/kv_copy_torch_bench.py",
    "store": "build/release/tools/bench/store_bench",
    "tier_replay": "build/release/tools/bench/tier_replay_bench",
    "arena": "build/release/tools/bench/arena_bench",
    "blocks": "build/release/tools/bench/blocks_bench",
    "block_index": "build/release/tools/bench/block_index_bench",
    "checkpoint": "build/release/tools/bench/checkpoint_bench",
    "scheduler_snapshot": "build/release/tools/bench/scheduler_snapshot_bench",
    "python_baselines": "tools/bench/python_baselines_bench.py",
    "server": "tools/bench/server_bench.py",
    "start": "tools/bench/start_bench.py",
    "steps": "tools/bench/steps_bench.py",
    "cold_start": "tools/bench/cold_start_bench.py",
    "response_log": "tools/bench/response_log_bench.py",
    "server_sleeps": "tools/bench/server_sleeps_bench.py",
    "continuous": "tools/bench/continuous_bench.py",
    "remote": "tools/bench/remote_bench.py",
    "offloading": "tools/bench/offloading_bench.py",
    "weights_load": "tools/bench/weights_load_bench.py",
    "connector": "tools/bench/connector_bench.py",
    "within_step": "tools/bench/within_step_bench.py",
    "rl": "tools/bench/rl_bench.py",
    "trl": "tools/bench/trl_bench.py",
    "verl": "tools/bench/verl_bench.py",
    "codec": "build/release/tools/bench/codec_bench",
    "early": "build/release/tools/bench/early_bench",
    "early_vllm": "tools/bench/early_vllm_bench.py",
    "swap": "build/release/tools/bench/swap_bench",
    "swap_servers": "tools/bench/swap_servers_bench.py",
    "paced_link": "build/release/tools/bench/paced_link_bench",
    "events": "build/release/tools/bench/events_bench",
    "console": "tools/bench/console_bench.py",
    "sessions": "tools/bench/sessions_bench.py",
    "preemptions": "tools/bench/preemptions_bench.py",
    "peers": "tools/bench/peers_bench.py",
}


_HAVE_HELP = ("demo", "gpu_check", "torpor", "python", "simulate")  # of their own; each bench has, too


def _part_of(manual: str, word: str) -> str:
    """Return the lines of the manual about a word."""
    entries = re.split(r"\n(?=  tools/dev )", manual.split("\n\n")[1])
    return next(entry for entry in entries if re.match(rf"\s*tools/dev {word}\b(?!-)", entry))


def main(arguments: list[str], manual: str) -> int:
    words = {
        "demo": demo,
        "test": testing.main,
        "build": build,
        "bench": bench,
        "simulate": simulate,
        "mutants": mutants.main,
        "fuzz": proof.fuzz,
        "proof": proof.main,
        "contract": contract.main,
        "vllm-tests": vllm_tests.main,
        "gpu_check": gpu_bundle.main,
        "wheel": packages.wheel,
        "deb": packages.deb,
        "deploy": deploy.main,
        "docs": site.main,
        "reference": reference.main,
        "board": board.main,
        "plots": plots.main,
        "torpor": torpor,
        "python": python,
        "lint": lint,
        "format": format_sources,
        "setup": set_up,
        "clean": clean,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(manual)
        return 0 if arguments else 2
    if arguments[0] not in words:
        say(f"error: tools/dev has no word {arguments[0]!r}; there are {', '.join(words)}")
        return 2
    is_asked = {"-h", "--help"} & set(arguments[1:2] if arguments[0] == "python" else arguments[1:])
    is_of_bench = arguments[0] == "bench" and any(not word.startswith("-") for word in arguments[1:])
    if is_asked and not is_of_bench and (arguments[0] not in _HAVE_HELP or arguments[0] == "python"):
        print(_part_of(manual, arguments[0]))
        return 0
    try:
        return words[arguments[0]](arguments[1:])
    except SetupError as problem:
        say(f"error: {problem}")
        return 2
    except KeyboardInterrupt:
        return 130


def demo(arguments: list[str]) -> int:
    other, arguments = other_vllm.named(arguments)
    asked = subprocess.run([sys.executable, ROOT / "tools/demo/demo_options.py", *arguments], stdout=subprocess.PIPE)
    if {"-h", "--help"} & set(arguments) or asked.returncode != 0:  # needs nothing that is to be installed
        sys.stdout.write(asked.stdout.decode())
        return asked.returncode
    say(f"tools/dev demo: {asked.stdout.decode().strip()} First it installs what is missing.")
    name = _demo_name(arguments, other)
    for line in setup.DURATIONS.plan([*setup.steps(portable=True), Step("the demo", (name,))]):
        say(line)
    python_path, model = setup.to_run(portable=True)
    if "--console" in arguments:
        setup.install_console(python_path)
    if "--remote" in arguments:
        setup.install_stores(python_path)
    if {"--console", "--remote", "--standby"} & set(arguments):
        os.environ["TORPOR_BINARY"] = str(inspector())
    python_path, env = with_vllm(other, python_path)
    began = time.monotonic()
    script = ROOT / "tools/demo/demo.py"
    code = subprocess.run([python_path, script, "--model", model, *arguments], env=env).returncode
    if code == 0:
        setup.DURATIONS.remember(name, time.monotonic() - began)
    return code


def _demo_name(arguments: list[str], other: str | None) -> str:
    """Return under which name the duration of such a demo is remembered: others take another time."""
    kinds = ("server", "offload", "console", "remote", "sessions", "standby", "features", "gpu-path")
    named = [kind for kind in kinds if f"--{kind}" in arguments]
    return "-".join(["demo", *named, *([other] if other else [])])


def with_vllm(other: str | None, python_path: Path) -> tuple[Path, dict[str, str]]:
    """The python that has this other version of vLLM, or else the one given; and the environment of its processes."""
    if other is None:
        return python_path, dict(os.environ)
    python_path, more = other_vllm.environment(other)
    return python_path, os.environ | more


def set_up(_: list[str]) -> int:
    python_path, model = setup.everything()
    say(f"python: {python_path}\nmodel:  {model}")
    return 0


def python(arguments: list[str]) -> int:
    """`--vllm VERSION` comes first: what follows is Python's own."""
    first = 2 if arguments[:1] == ["--vllm"] else 0
    other, _ = other_vllm.named(arguments[:first])
    python_path, model = setup.everything()
    python_path, env = with_vllm(other, python_path)
    return subprocess.run([python_path, *arguments[first:]], env=env | {"TORPOR_TEST_MODEL": str(model)}).returncode


def build(arguments: list[str]) -> int:
    preset = arguments[0] if arguments else "release"
    if preset not in PRESETS:
        say(f"error: there is no preset {preset!r}; there are {', '.join(PRESETS)}")
        return 2
    setup.system_packages()
    if preset not in ("dev", "release"):
        setup.clang()
    cmake_build(preset)
    return 0


def torpor(arguments: list[str]) -> int:
    return subprocess.run([inspector(), *arguments]).returncode


def inspector() -> Path:
    """Return the program `torpor`: the one that is installed, else it is compiled."""
    if installed := setup.installed_program():
        return installed
    setup.system_packages()
    cmake_build("release", ("torpor",))
    return ROOT / "build/release/tools/torpor/torpor"


def bench(arguments: list[str]) -> int:
    names = [a for a in arguments if not a.startswith("-")] or list(BENCHES)
    flags = [a for a in arguments if a.startswith("-")]
    if unknown := [name for name in names if name not in BENCHES]:
        say(f"error: there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}. Options are --NAME=VALUE")
        return 2
    code = 0
    for name in names:
        path = ROOT / BENCHES[name]
        if path.suffix == ".py":
            python_path, model = setup.everything()
            if not {"-h", "--help"} & set(flags):
                if name == "remote":
                    setup.install_stores(python_path)
                cmake_build("release")  # some run the C++ ones
            code |= subprocess.run(
                [python_path, path, *flags], env=os.environ | {"TORPOR_TEST_MODEL": str(model), "HF_HUB_OFFLINE": "1"}
            ).returncode
        else:
            setup.system_packages()
            cmake_build("release", (path.name,))
            code |= subprocess.run([path, *flags]).returncode
    return code


def simulate(arguments: list[str]) -> int:
    setup.system_packages()
    cmake_build("release", ("simulate",))
    return subprocess.run([ROOT / "build/release/tests/simulation/simulate", *arguments]).returncode


def lint(_: list[str]) -> int:
    problems = checks.all_problems(ROOT)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


def format_sources(_: list[str]) -> int:
    """Lays out all C++ as .clang-format says, and all Python as pyproject.toml does."""
    python, _ = setup.prerequisites()
    setup.clang()
    setup.install_lint(python)
    sources = [p for p in checks.tracked(ROOT) if p.suffix in (".h", ".cpp", ".cu")]
    code = subprocess.run(["clang-format-16", "-i", *sources]).returncode
    return code | subprocess.run([setup.LINT / "bin/ruff", "format", "--no-cache", "--quiet", ROOT]).returncode


def clean(_: list[str]) -> int:
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    return 0
