#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an installed torpor costs the start of a vLLM process that does not use it.

Both start as vLLM's processes do: vLLM's plugins are loaded once the engine's arguments are imported, then the engine
and the server are. The unit is seconds from the first of these to the last, in a child of a process that has imported
torch and vLLM's configuration, so that the seconds of those imports, and how they vary, are left out. Baseline: the
same without torpor on the path. In pairs, which of the two is first alternates; the median of the differences, after
a pair that only warms. Python's garbage collector is off: a few objects more decide whether a collection of all, of
0.4 s, falls into the measured time or behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

from bench_options import count

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
WANTED = 0.1


def begin(with_torpor: bool, torpor: Path) -> None:
    """Load the plugins and import what an engine and a server need."""
    if with_torpor:
        sys.path.append(str(torpor))
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core  # noqa: F401

    assert ("torpor" in sys.modules) == with_torpor


def seconds_of(with_torpor: bool, torpor: Path) -> tuple[float, float]:
    """Seconds by the clock and of a core that a child takes to begin."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            began, busy = time.monotonic(), time.process_time()
            begin(with_torpor, torpor)
            times = time.monotonic() - began, time.process_time() - busy
            os.write(writes, json.dumps(times).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    with open(reads) as said:
        text = said.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=count, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torpor = Path(distribution("torpor").locate_file(""))
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != torpor.resolve()]
    import vllm.engine.arg_utils  # noqa: F401

    assert "torpor" not in sys.modules
    gc.disable()
    pairs = []
    for number in range(options.pairs + 1):
        order = (True, False) if number % 2 else (False, True)
        pair = {with_torpor: seconds_of(with_torpor, torpor) for with_torpor in order}
        if number > 0:
            pairs.append(pair)
    found = {}
    for place, name in enumerate(("seconds", "seconds of a core")):
        more = [pair[True][place] - pair[False][place] for pair in pairs]
        without = statistics.median(pair[False][place] for pair in pairs)
        found[name] = {"without": without, "more": statistics.median(more), "least": min(more), "most": max(more)}
    if options.json:
        print(json.dumps({"pairs": options.pairs, "wanted_seconds": WANTED} | found))
        return
    print(f"start of a vLLM that does not use torpor, {options.pairs} pairs; wanted are at most {WANTED} s more")
    print("                    without    more   least    most")
    for name, row in found.items():
        print(f"{name:18} {row['without']:8.3f} {row['more']:7.3f} {row['least']:7.3f} {row['most']:7.3f}")


if __name__ == "__main__":
    main()
