# SPDX-License-Identifier: Apache-2.0
"""Hooks of the controller that raise: whatever it is, it is torpor's error to the caller, and the sleep is undone."""

import pytest

from torpor import _core, errors

HOOKS = ("unfinished_requests", "quiesce", "release_derived", "drop_requests", "call_ranks")


class WithoutWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words either")


class Hooks:
    """An engine without requests on one rank. `raising` is raised by the hook `name`, once."""

    name, raising = "", None

    def __init__(self):
        self.memory = _core.RankMemory({"copy_threads": 1})
        self.memory.allocate("weights", "w", 1 << 16)
        self.frozen = False

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "name"):
            self.name = ""
            raise object.__getattribute__(self, "raising")
        return object.__getattribute__(self, name)

    def unsupported(self) -> list[str]:
        return []

    def unfinished_requests(self) -> int:
        return 0

    def quiesce(self, timeout) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False

    def drop_requests(self, mode: str) -> None:
        pass

    def retire_prefix(self) -> None:
        pass

    def release_derived(self) -> None:
        pass

    def rebuild_derived(self) -> None:
        pass

    def call_ranks(self, order: bytes) -> list[bytes]:
        return [self.memory.call(order)]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "raised",
    [RuntimeError("a"), KeyboardInterrupt(), SystemExit(3), MemoryError(), GeneratorExit(), WithoutWords()],
    ids=lambda raised: type(raised).__name__,
)
def test_whatever_a_hook_raises_is_an_error_and_undone(hook, raised):
    hooks = Hooks()
    controller = _core.SleepController(hooks)
    options = {"level": 1, "in_flight": "abort"}
    hooks.name, hooks.raising = hook, raised
    with pytest.raises(errors.Error) as failed:
        controller.sleep(options)
    assert not failed.value.state_changed
    assert controller.state()["engine"] == "awake"
    assert not hooks.frozen
    assert controller.sleep(options)["changed"]
    assert controller.wake_up()["fully_awake"]
    assert controller.state() == {"engine": "awake", "tags": {"weights": "attached"}, "level": -1, "checkpoint": ""}


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), WithoutWords()], ids=lambda raised: type(raised).__name__)
def test_an_engine_that_cannot_be_resumed_says_that_it_is_lost(raised):
    hooks = Hooks()
    controller = _core.SleepController(hooks)
    controller.sleep({"level": 1, "in_flight": "abort"})
    hooks.name, hooks.raising = "resume", raised
    with pytest.raises(errors.Error) as failed:
        controller.wake_up()
    assert failed.value.state_changed
    assert controller.state()["engine"] == "unrecoverable"


def test_a_hook_that_gives_something_else_is_named():
    hooks = Hooks()
    hooks.call_ranks = lambda order: ["no bytes"]
    with pytest.raises(errors.Error, match="reply of a rank"):
        _core.SleepController(hooks).sleep({"level": 1, "in_flight": "abort"})
