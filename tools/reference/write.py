# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference, or says which of its pages differ from the code. For tools/dev reference and lint.

It takes the Python of this checkout, as it is now, with the compiled module and the program in `--site`.
Exit codes: 0 done, or nothing differs; 1 a page differs, or something lacks a text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/reference"
PACKAGE = ROOT / "bindings/python/torpor"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/reference/write.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--site", type=Path, required=True, help="where torpor is installed from this checkout")
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--without-program", action="store_true", help="leave out the pages of `torpor`")
    options = parser.parse_args(arguments)
    take_package(options.site)
    program = None if options.without_program else options.site / "bin/torpor"
    problems: list[str] = []
    made = pages(program, problems)
    if options.check:
        problems += differing(made, PAGES, complete=program is not None)
    elif not problems:
        PAGES.mkdir(exist_ok=True)
        for name, text in made.items():
            (PAGES / name).write_text(text)
        for stale in {path.name for path in PAGES.glob("*.md")} - made.keys():
            (PAGES / stale).unlink()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def take_package(site: Path) -> None:
    """Import `torpor` from the sources of this checkout, with the compiled module of `site`."""
    spec = importlib.util.spec_from_file_location(
        "torpor", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE), str(site / "torpor")]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["torpor"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def pages(program: Path | None, problems: list[str]) -> dict[str, str]:
    """Return the pages by name. `program`: the compiled `torpor`; None: without the pages that it describes."""
    sys.path.insert(0, str(ROOT / "tools"))
    from reference import command_page, errors_page, http_page, metrics_page, option_pages, python_page

    made = {
        "options.md": option_pages.options_page(problems),
        "environment.md": option_pages.environment_page(ROOT, problems),
        "http.md": http_page.http_page(problems),
        "metrics.md": metrics_page.metrics_page(problems),
        "python.md": python_page.python_page(ROOT, problems),
    }
    if program is not None:
        asked = subprocess.run([program, "man", "--json"], capture_output=True, text=True, check=True).stdout
        manual = json.loads(asked)
        made["cli.md"] = command_page.command_page(manual, command_page.examples(program, ROOT), problems)
        made["errors.md"] = errors_page.errors_page(manual, problems)
    return made


def differing(made: dict[str, str], folder: Path, complete: bool) -> list[str]:
    """Return a line for each page that differs. `complete`: `made` has all pages, so that others are stale."""
    there = {path.name: path.read_text() for path in folder.glob("*.md")}
    names = [name for name, text in made.items() if there.get(name) != text]
    if complete:
        names += sorted(there.keys() - made.keys())
    return [f"docs/reference/{name} differs from the code: run tools/dev reference" for name in names]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
