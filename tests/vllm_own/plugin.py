# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest for vLLM's own tests, in their three runs: `python -m pytest -p plugin`.

VLLM_OWN_RUN says which run it is, `without` (torpor is not installed), `unused` or `used`. counting.py has the record:
each test's outcome, and each first run of a method of the scheduler's mixin.

`used`: TORPOR_ENABLED=1 asks for torpor for all engines, and whatever makes a scheduler, such as `create_scheduler` of
vLLM's tests, gets torpor's mixin in front of the class that it names, as engines do (torpor.vllm.scheduler.choose).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import types

import counting
import pytest
from counting import record

RUN = os.environ["VLLM_OWN_RUN"]
TEST_SECONDS = 900  # a busy machine may take ten times as long as an idle one
# Tests of engines that vLLM runs on a GPU alone: their modules skip themselves elsewhere. VLLM_OWN_GPU_ENGINES=1 has
# them run on a CPU.
OF_GPUS = (
    "test_abort_final_step.py",
    "test_engine_core.py",
    "test_engine_core_client.py",
    "test_streaming_input.py",
)
# Modules that import ray for one test, or import another one that does.
NAMES_RAY = ("test_bidirectional_kv_transfer.py", "test_nixl_connector.py")


def pytest_configure(config) -> None:
    if "VLLM_OWN_FORKED" in os.environ:
        fork_what_is_spawned(config)
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as every process of an engine does
    installed = importlib.util.find_spec("torpor") is not None
    if installed != (RUN != "without"):
        raise pytest.UsageError(f"torpor is {'installed' if installed else 'not installed'} in the run {RUN!r}")
    if RUN == "used":
        use_mixin()


def fork_what_is_spawned(config) -> None:
    """Engine cores and workers that tests spawn are forked from one process that has imported vLLM, and not torpor.

    That takes a tenth of the time. VLLM_OWN_FORKED is the folder that has zygote.py.
    """
    sys.path.append(os.environ["VLLM_OWN_FORKED"])
    try:
        from zygote import Zygote
    finally:
        sys.path.pop()
    zygote = Zygote(env=dict(os.environ))
    spawning = zygote.spawning()
    spawning.__enter__()
    config.add_cleanup(lambda: (spawning.__exit__(None, None, None), zygote.close()))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # vLLM's tests collect garbage after each test: what was imported needs no look each time
    gc.unfreeze = lambda: None  # which they call before


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    with contextlib.ExitStack() as meanwhile:
        name = collector.path.name if isinstance(collector, pytest.Module) else None
        if name in NAMES_RAY:
            meanwhile.enter_context(empty_ray())
        if name in OF_GPUS and "VLLM_OWN_GPU_ENGINES" in os.environ:
            meanwhile.enter_context(platform_of_a_gpu(str(collector.path)))
        yield


@contextlib.contextmanager
def empty_ray():
    """A module in the place of ray that has nothing: what calls it fails. Others find ray missing, as it is."""
    if importlib.util.find_spec("ray") is not None:
        yield
        return
    sys.modules["ray"] = types.ModuleType("ray")
    sys.modules["ray"].__spec__ = importlib.machinery.ModuleSpec("ray", None)
    try:
        yield
    finally:
        del sys.modules["ray"]


@contextlib.contextmanager
def platform_of_a_gpu(path: str):
    """The look at the platform of the module at `path`, and no other, finds a GPU."""
    from vllm.platforms import current_platform

    def found(stock):
        return lambda: sys._getframe(1).f_globals.get("__file__") == path or stock()

    names = ("is_cuda", "is_cuda_alike")
    for name in names:
        setattr(current_platform, name, found(getattr(current_platform, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(current_platform, name)


def use_mixin() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from torpor.vllm import plugin, scheduler

    plugin.require()  # raises, and says why, where torpor is inactive
    counting.count_methods(scheduler.SchedulerMixin)

    def new(cls, *_, **__):
        with_mixin = cls if issubclass(cls, scheduler.SchedulerMixin) else scheduler.over(cls)
        return object.__new__(with_mixin)  # a subclass of `cls`: Python calls its __init__

    Scheduler.__new__ = new


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """A test that hangs fails: the alarm ends what it waits for."""
    counting.begin_test(item.nodeid)

    def late(*_):
        raise TimeoutError(f"the test took more than {TEST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    counting.begin_test("")


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
