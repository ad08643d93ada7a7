"""tools/dev mutants: plants each fault of tests/mutants.toml in a copy of the tree and sees whether its test catches it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import tomllib

from devtool import setup
from devtool.setup import ROOT, SetupError, say

TREE = ROOT / "build" / "mutants"
HANG_SECONDS = 60  # a fault that makes its test wait for ever is caught too


def main(arguments: list[str]) -> int:
    mutants = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]
    if arguments:
        mutants = [m for m in mutants if any(word in m["name"] for word in arguments)]
        if not mutants:
            raise SetupError(f"no mutant has {arguments[0]!r} in its name")
    setup.system_packages()
    setup.use_cuda_headers(setup.python_environment())
    env = dict(os.environ)
    copy_tree()
    setup.run("Configure the mutants' tree", ["cmake", "-S", TREE / "source", "-B", TREE / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DTORPOR_BUILD_TOOLS=OFF", "-DTORPOR_SIMULATION_SEEDS=200"], env=env, log_name="configure-mutants")
    programs = sorted({m["caught_by"].split()[0] for m in mutants})
    setup.run("Compile it without a fault", ["cmake", "--build", TREE / "build", "--target", *programs], env=env, log_name="compile-mutants")
    missed = sum(not caught(m, env) for m in mutants)
    say(f"{len(mutants) - missed} of {len(mutants)} caught")
    return 1 if missed else 0


def copy_tree() -> None:
    """The tracked and new files as they are; times are kept, so that little is compiled again."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        target = TREE / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy2(ROOT / name, target)


def caught(mutant: dict, env: dict) -> bool:
    path = TREE / "source" / mutant["file"]
    original = path.read_text()
    if original.count(mutant["replace"]) != 1:
        raise SetupError(f"{mutant['file']} has the text of the mutant {mutant['name']!r} {original.count(mutant['replace'])} times; mend tests/mutants.toml")
    program, pattern = mutant["caught_by"].split()
    began = time.monotonic()
    try:
        path.write_text(original.replace(mutant["replace"], mutant["by"]))
        built = subprocess.run(["cmake", "--build", TREE / "build", "--target", program], env=env, capture_output=True, text=True)
        if built.returncode != 0:
            raise SetupError(f"the mutant {mutant['name']!r} does not compile:\n{built.stdout[-3000:]}")
        found = run(next((TREE / "build/tests").rglob(program)), pattern)
    finally:
        path.write_text(original)
    say(f"{found if found else 'MISSED':<8} {time.monotonic() - began:4.0f} s  {mutant['name']}  ({pattern})")
    return found != ""


def run(binary, pattern: str) -> str:
    """How the test noticed, or nothing."""
    try:
        done = subprocess.run([binary, f"--gtest_filter={pattern}", "--gtest_brief=1"], capture_output=True, text=True, errors="replace", timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        return "hangs"
    if "0 tests from 0 test suites ran" in done.stdout:
        raise SetupError(f"no test matches {pattern}")
    if done.returncode == 0:
        return ""
    return "fails" if done.returncode > 0 else "crashes"
