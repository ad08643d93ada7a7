# SPDX-License-Identifier: Apache-2.0
"""The record of a run of vLLM's own tests, to which all its processes append: VLLM_OWN_RECORD, a JSON object a line.

count() is an entry point of vLLM's group `vllm.general_plugins` (devtool/vllm_tests.py writes it), so vLLM calls it in
each process of an engine, those that it spawns too. The process of pytest names the present test in a file beside the
record. An engine that serves several tests is counted in the one that is running.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

_seen: set[tuple[str, str]] = set()
_counted: set[type] = set()


def record(**what) -> None:
    with open(os.environ["VLLM_OWN_RECORD"], "a") as file:  # one write for a line: processes do not mix theirs
        file.write(json.dumps(what) + "\n")


def _test_file() -> Path:
    return Path(os.environ["VLLM_OWN_RECORD"] + ".test")


def begin_test(test: str) -> None:
    """Name the test that runs from now on; "" where none does."""
    new = _test_file().with_suffix(".new")
    new.write_text(test)
    new.replace(_test_file())  # a reader sees the one or the other


def present_test() -> str:
    """Return the test that runs, or "" between tests."""
    try:
        return _test_file().read_text()
    except FileNotFoundError:
        return ""


def count() -> None:
    """Count in this process, in the run that uses torpor, once torpor makes a scheduler with its mixin."""
    if os.environ.get("VLLM_OWN_RUN") != "used":
        return
    from torpor.vllm.named_mixins import NamedMixins

    if hasattr(NamedMixins.over, "__wrapped__"):
        return
    stock = NamedMixins.over

    @functools.wraps(stock)
    def over(self, base: type) -> type:
        if self._mixin.__name__ == "SchedulerMixin":
            count_methods(self._mixin)
        return stock(self, base)

    NamedMixins.over = over


def count_methods(mixin: type) -> None:
    """Record the first run of each method of `mixin` in each test."""
    if mixin in _counted:
        return
    _counted.add(mixin)
    for name, method in list(vars(mixin).items()):
        if callable(method) and not isinstance(method, type):
            setattr(mixin, name, _counting(name, method))


def _counting(name: str, method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        test = present_test()
        if test and (test, name) not in _seen:
            _seen.add((test, name))
            record(test=test, method=name)
        return method(*args, **kwargs)

    return call
