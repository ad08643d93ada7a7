#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check torpor's memory below torch, part by part, on a machine with an NVIDIA GPU.

Each check has a process of its own, so that one that dies fails only itself. A row is printed when it is known, and
appended to a file of JSON lines at the same time: a part that is killed leaves what it had. A part stops beginning
checks when its time is used up. Needs Python 3.8, and torch with CUDA except for the part "library".

Exit codes: 0 no check failed, 1 some did, 2 it could not run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from memory_library import PATH_VARIABLE, library_path
from rows import FAILED, NOT_HERE, PASSED, NotHere, Report, row

BACKGROUND = {"TORPOR_ARENA_PREFAULT_BYTES": "background"}
LEAST_SECONDS = 10  # a check is not begun with less than this left
END_SECONDS = 5  # of a part, kept for the last lines


class Check(NamedTuple):
    name: str
    expected: str
    call: str  # module and function
    seconds: int  # most that it may take
    environment: dict
    words: dict  # further arguments of the function


def library_part() -> list[Check]:
    host = {"TORPOR_MEMORY_DEVICE": "host"}
    return [
        Check("library: bytes and addresses", "as before each sleep", "library_checks.cycle", 60, host, {}),
        Check("library: tags", "each sleeps and wakes by itself", "library_checks.tags", 60, host, {}),
        Check("library: failures", "an error each, and nothing changed", "library_checks.failures", 60, host, {}),
        Check("library: speed, no GPU", "a figure", "library_checks.speed", 60, host, {}),
    ]


def torch_part() -> list[Check]:
    return [
        Check("pool", "a captured graph over torpor's pools replays", "torch_checks.pool", 60, {}, {}),
        Check("graph_pool", "a capture may allocate in torpor's pool", "torch_checks.graph_pool", 60, {}, {}),
        Check("trim", "freed memory comes back when its pool goes", "torch_checks.trim", 60, {}, {}),
        Check("capture", "no capture fails while host memory is pinned", "torch_checks.capture", 60, BACKGROUND, {}),
        Check("stall", "no step waits --stall-ms longer beside pinning", "torch_checks.stall", 60, BACKGROUND, {}),
    ]


def speed_part(options: Any) -> list[Check]:
    same = "same bytes and addresses, 90 % given back"

    def check(name: str, who: str, environment: dict | None = None, **words: Any) -> Check:
        return Check(f"speed {name}", same, "torch_checks.speed", 90, environment or {}, {"who": who, **words})

    turns = [check(who, who) for who in ("torpor", "cumem", "torch_memory_saver") * 2]
    ready = str(int((options.gib + 0.5) * (1 << 30)))
    found = [
        *turns[:3],
        check("torpor, host memory ready", "torpor", {"TORPOR_ARENA_PREFAULT_BYTES": ready}, wait_for_arena=True),
        check("torpor, unchanged weights", "torpor", {"TORPOR_KEEP_BACKUPS": "1"}, changed=False),
        *turns[3:],
    ]
    for threads in (2, 4, 16):
        name = f"torpor, {threads} threads"
        found.append(check(name, "torpor", {"TORPOR_COPY_THREADS": str(threads)}, rounds=3))
    return found


PARTS = {"library": (1, "no GPU"), "torch": (4, "a GPU"), "speed": (5, "a GPU")}  # minutes, and what it needs


def checks_of(options: Any) -> list[Check]:
    return {"library": library_part, "torch": torch_part, "speed": lambda: speed_part(options)}[options.part]()


def run_check(options: Any) -> int:
    """Run one check in this process and print its rows."""
    check = checks_of(options)[options.check]
    words = dict(check.words)
    options.arena_seconds = arena_seconds(options.gib) if words.pop("wait_for_arena", False) else 0.0

    def emit(name: str, seen: str, verdict: str, figures: dict | None = None) -> None:
        print(json.dumps(row(name, check.expected, seen, verdict, figures)), flush=True)

    try:
        module, function = check.call.split(".")
        if module == "torch_checks":
            find_torch()
        loaded = importlib.import_module(module)
        if module == "torch_checks":
            loaded.needs_gpu()
        for seen in getattr(loaded, function)(options, **words):
            emit(check.name + seen.name, seen.text, PASSED if seen.passed else FAILED, seen.figures)
    except NotHere as problem:
        emit(check.name, str(problem), NOT_HERE)
    except Exception as problem:
        traceback.print_exc()
        emit(check.name, f"{type(problem).__name__}: {problem}"[:400], FAILED)
    if check.words.get("who", "torpor") != "torpor":
        os._exit(0)  # how the others end is not checked
    return 0


def find_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise NotHere("torch is not installed for this Python")


def arena_seconds(gib: float) -> float:
    """Return how long host memory for so many GiB may take to be pinned, at 4 GB/s."""
    return min(30.0, gib * 0.27 + 1)


def in_own_process(check: Check, number: int, options: Any, seconds: float, report: Report) -> None:
    """Run a check for at most so long, and add its rows as they come. A process that dies has failed."""
    same_python = [sys.executable, *(["-I"] if sys.flags.isolated else []), *(["-S"] if sys.flags.no_site else [])]
    words = [*same_python, str(Path(__file__).resolve()), options.part, "--check", str(number)]
    words += ["--gib", str(options.gib), "--seconds", str(seconds)]
    words += ["--stretch-seconds", str(options.stretch_seconds), "--stall-ms", str(options.stall_ms)]
    environment = {**os.environ, **check.environment, PATH_VARIABLE: str(options.library)}
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    said: list[str] = []
    late = threading.Event()
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    row_count = 0
    for line in process.stdout or ():
        if line.startswith('{"check"'):
            report.add(json.loads(line))
            row_count += 1
    code = process.wait()
    timer.cancel()
    reader.join(timeout=5)
    if late.is_set():
        report.add(row(check.name, check.expected, f"no end within {seconds:.0f} s", FAILED))
    elif code != 0 or row_count == 0:
        last = "".join(said).strip().splitlines()[-1:] or ["it said nothing"]
        report.add(row(check.name, check.expected, f"the process ended with {code}: {last[0]}"[:400], FAILED))
    if said and any(each["verdict"] == FAILED for each in report.rows[-max(1, row_count) :]):
        print("".join(said[-30:]), file=sys.stderr, end="", flush=True)


def run_part(options: Any, report: Report) -> None:
    end = time.monotonic() + 60 * options.minutes - END_SECONDS
    for number, check in enumerate(checks_of(options)):
        if options.only and not any(word in check.name for word in options.only):
            continue
        left, most = end - time.monotonic(), min(check.seconds, options.most_seconds)
        if left < min(LEAST_SECONDS, most):
            report.add(row(check.name, check.expected, f"the {options.minutes:g} minutes are used up", NOT_HERE))
        else:
            in_own_process(check, number, options, min(most, left), report)


def beside(rows: list[dict]) -> dict[str, Any]:
    """Return GB/s of each allocator, and how many times theirs torpor has: first sleeps, later sleeps, wakes."""
    rates: dict[str, dict[str, list[float]]] = {}
    for each in rows:
        found = each["figures"]
        plain = each["check"].split(", ")[0] == f"speed {found.get('who')}" and each["check"].count(", ") == 1
        if not plain or each["verdict"] != PASSED:
            continue
        own = rates.setdefault(found["who"], {"first_sleep": [], "sleep": [], "wake": []})
        own["sleep" if found["round"] else "first_sleep"].append(found["sleep_gb_per_second"])
        own["wake"].append(found["wake_gb_per_second"])
    medians = {
        who: {what: round(statistics.median(values), 2) for what, values in own.items() if values}
        for who, own in rates.items()
    }
    torpor = medians.get("torpor", {})
    times = {
        who: {what: round(torpor[what] / value, 2) for what, value in own.items() if what in torpor and value}
        for who, own in medians.items()
        if who != "torpor"
    }
    return {"gb_per_second": medians, "times_theirs": times}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="memory_checks.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "part",
        choices=PARTS,
        help="which checks: "
        + "; ".join(f"{name}: {minutes} min, needs {what}" for name, (minutes, what) in PARTS.items()),
    )
    parser.add_argument("--minutes", type=float, help="after so many no check begins, and none goes on")
    parser.add_argument("--gib", type=float, default=8.0, help="GiB of weights (default 8)")
    parser.add_argument("--most-seconds", type=float, default=1e9, help="most that one check may take")
    parser.add_argument("--stretch-seconds", type=float, default=20.0, help="measured beside pinning (default 20)")
    parser.add_argument(
        "--stall-ms", type=float, default=100.0, help="longest that a step may wait beside pinning (default 100)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="checks with one of these in their name")
    parser.add_argument("--library", type=Path, default=library_path(), help="libtorpor_memory.so")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON lines, as they come")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = PARTS[options.part][0]
    if options.gib <= 0:
        parser.error(f"--gib is {options.gib:g}; use more than 0")
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}; use more than 0")
    options.library = options.library.resolve()
    if not options.library.exists():
        parser.error(f"there is no {options.library}")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.check is not None:
        return run_check(options)
    report = Report(options.out, options.json)
    began = time.monotonic()
    about = {"part": options.part, "minutes": options.minutes, "gib": options.gib, "python": sys.version.split()[0]}
    report.note(about, f"part {options.part}: at most {options.minutes:g} minutes, {options.gib:g} GiB")
    run_part(options, report)
    if options.part == "speed":
        figures = beside(report.rows)
        report.note(
            figures, f"medians, GB/s: {figures['gb_per_second']}\ntorpor, times theirs: {figures['times_theirs']}"
        )
    counts = {verdict: report.count(verdict) for verdict in (PASSED, FAILED, NOT_HERE)}
    seconds = round(time.monotonic() - began, 1)
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    report.note({"part": options.part, "ended": True, "seconds": seconds, **counts}, f"{text}; {seconds} s")
    report.close()
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
