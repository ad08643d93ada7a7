# SPDX-License-Identifier: Apache-2.0
"""python -m torpor.console: the screens. Without Textual there is `torpor console`, which prints them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torpor import console
from torpor.console.source import Live, Recording, inspector
from torpor.errors import Error, NotFound

_SIZE = (120, 36)
# What a terminal's font is called; a picture that loads one would ask another machine for it.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_PATIENCE = 10  # seconds
_THEN = (("1", "slots"), ("2", "request"), ("3", "transfers"), ("4", "tiers"))
_AT_LAST = (("5", "memory"), ("6", "operations"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torpor.console", description=__doc__)
    parser.add_argument("path", nargs="?", help="a directory of events of engines (events_dir)")
    parser.add_argument("--replay", metavar="RECORDING", help="what was recorded, with the same screens")
    parser.add_argument("--mock", action="store_true", help="an engine that is made up: no vLLM, no GPU")
    parser.add_argument("--readonly", action="store_true", help="no key changes anything")
    parser.add_argument("--svg", metavar="DIRECTORY", help="write pictures of screens 1 to 6 instead, and end")
    options = parser.parse_args()
    try:
        from torpor.console.app import Console
    except ImportError:
        print("torpor.console needs Textual: pip install torpor[console]; or use: torpor console", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        try:
            path = _mock(stack) if options.mock else options.path or str(console.default_directory())
            source = Recording(options.replay) if options.replay else Live(path)
            app = Console(source, options.readonly or bool(options.replay))
            if options.svg:
                asyncio.run(pictures(app, Path(options.svg)))
            else:
                app.run()
        except Error as problem:
            print(f"torpor: {problem}", file=sys.stderr)
            return 3
    return 0


def _mock(stack: contextlib.ExitStack) -> str:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="torpor-mock-", dir="/dev/shm"))
    engine = subprocess.Popen([inspector(), "mock", directory], stdout=subprocess.PIPE)
    stack.callback(engine.wait)
    stack.callback(engine.terminate)
    assert engine.stdout is not None  # a pipe
    engine.stdout.readline()
    return directory


async def pictures(app, directory: Path) -> None:
    """A file a screen, of 1 to 6. Live: of what there is now; of a recording: of the moment before the first sleep or
    wake, but memory and operations of its end."""
    directory.mkdir(parents=True, exist_ok=True)
    async with app.run_test(size=_SIZE) as pilot:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and not (app.process and app.process["slots"] and app.process["operations"]):
            await pilot.pause(0.1)  # an engine that has just begun has nothing to show
        if app.process is None:
            raise NotFound(f"no engine publishes events in {app.source.path}", "start one with the option events_dir")
        begun = _operations(app.source) if isinstance(app.source, Recording) else []
        for keys, moment in ((_THEN, begun[0] - app.began - 1e-6 if begun else None), (_AT_LAST, None)):
            if moment is not None:
                app.go_to(moment)
            else:
                app.action_now()
            for key, name in keys:
                if key == "2":
                    await pilot.press("1", *["down"] * _busiest(app))
                await pilot.press(key)
                await pilot.pause()
                picture = app.export_screenshot(title=f"torpor: {name}")
                (directory / f"{name}.svg").write_text(_FONTS.sub("", picture))


def _operations(source) -> list[float]:
    """When each began."""
    return [event["time"] for event in source.events("--type", "operation") if event.get("to") == "begin"]


def _busiest(app) -> int:
    """Which row's request went through the most states: it shows the most."""
    events = app.source.events("--type", "slot")
    names = [slot["request"] for slot in app.process["slots"]] if app.process else []
    counts = [len({event["to"] for event in events if event.get("request") == name}) for name in names]
    return counts.index(max(counts)) if counts else 0


if __name__ == "__main__":
    sys.exit(main())
