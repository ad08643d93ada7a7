# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest for vLLM's own tests, in their three runs: `python -m pytest -p plugin`.

VLLM_OWN_RUN says which run it is, `without` (torpor is not installed), `unused` or `used`; VLLM_OWN_RECORD is the
file to which each test's outcome and each first run of a method of the scheduler's mixin is appended, a JSON object a
line. Processes that a test forks append to it, too.

`used`: TORPOR_ENABLED=1 asks for torpor for all engines, and whatever makes a scheduler, such as `create_scheduler` of
vLLM's tests, gets torpor's mixin in front of the class that it names, as engines do (torpor.vllm.scheduler.choose).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import signal

import pytest

RUN = os.environ["VLLM_OWN_RUN"]
RECORD = os.environ["VLLM_OWN_RECORD"]
TEST_SECONDS = 120

_test: str | None = None
_seen: set[tuple[str | None, str]] = set()


def record(**what) -> None:
    with open(RECORD, "a") as file:  # one write for a line: processes do not mix theirs
        file.write(json.dumps(what) + "\n")


def pytest_configure(config) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as every process of an engine does
    installed = importlib.util.find_spec("torpor") is not None
    if installed != (RUN != "without"):
        raise pytest.UsageError(f"torpor is {'installed' if installed else 'not installed'} in the run {RUN!r}")
    if RUN == "used":
        use_mixin()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # vLLM's tests collect garbage after each test: what was imported needs no look each time
    gc.unfreeze = lambda: None  # which they call before


def use_mixin() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from torpor.vllm import plugin, scheduler

    plugin.require()  # raises, and says why, where torpor is inactive
    count_methods(scheduler.SchedulerMixin)

    def new(cls, *_, **__):
        with_mixin = cls if issubclass(cls, scheduler.SchedulerMixin) else scheduler.over(cls)
        return object.__new__(with_mixin)  # a subclass of `cls`: Python calls its __init__

    Scheduler.__new__ = new


def count_methods(mixin: type) -> None:
    for name, method in list(vars(mixin).items()):
        if callable(method) and not isinstance(method, type):
            setattr(mixin, name, counted(name, method))


def counted(name: str, method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        if (_test, name) not in _seen:
            _seen.add((_test, name))
            record(test=_test, method=name)
        return method(*args, **kwargs)

    return call


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """A test that hangs fails: the alarm ends what it waits for."""
    global _test
    _test = item.nodeid

    def late(*_):
        raise TimeoutError(f"the test took more than {TEST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    _test = None


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        record(test=report.nodeid, when=report.when, outcome=outcome_of(report), text=shortened(report))


def outcome_of(report) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.outcome == "skipped" else "xpassed"
    return report.outcome


def shortened(report) -> str:
    """The last line of what went wrong."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0][:200]


def pytest_collectreport(report) -> None:
    if report.outcome != "passed":
        record(test=report.nodeid, when="collect", outcome=report.outcome, text=shortened(report))


def pytest_sessionfinish(exitstatus) -> None:
    if RUN == "unused":
        from torpor.vllm import plugin

        if "has asked" not in (plugin.inactive() or ""):
            record(test="torpor", when="finish", outcome="failed", text=f"not unused: {plugin.inactive()}")
    record(finished=int(exitstatus))
