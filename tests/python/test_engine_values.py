# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself, in types: nothing that the engine core says is left out or made up."""

from dataclasses import asdict

import pytest

from torpor import errors
from torpor.vllm import data_parallel
from torpor.vllm.engine_values import SleepPlan


def plain(value: dict) -> dict:
    """As asdict() has it: tuples for lists."""
    return {
        name: plain(item) if isinstance(item, dict) else tuple(item) if isinstance(item, list) else item
        for name, item in value.items()
    }


def renamed_blocks(value: dict) -> dict:
    return plain({"skipped" if name == "skipped" else name: item for name, item in value.items()})


def test_the_types_have_what_the_engine_core_says(one):
    torpor = one.llm.torpor
    said = torpor.call("state")
    renamed = {"deferred": renamed_blocks(said.pop("deferred"))}
    assert asdict(torpor.state()) == plain(said) | renamed
    assert asdict(torpor.plan_sleep(level=1, preserve_state=True)) == plain(
        torpor.call("plan_sleep", {"level": 1, "preserve_state": True})
    )
    assert asdict(torpor.continue_wake()) == renamed_blocks(torpor.call("continue_wake"))
    [typed], [said] = torpor.ledger(), torpor.call("ledger")
    assert typed.tags.keys() == said["tags"].keys() == {"weights", "kv_cache"}
    assert asdict(typed).keys() == said.keys()
    assert asdict(typed.tags["weights"]) == said["tags"]["weights"]


def test_a_plan_of_several_engines_is_their_sum(one):
    plan = one.llm.torpor.call("plan_sleep", {"level": 1, "preserve_state": True})
    both = SleepPlan.from_value(data_parallel._merged_plans([plan, plan]))
    assert both.host_bytes == 2 * plan["host_bytes"] > 0 and both.disk_bytes == 0
    assert both.save_bytes == {tag: 2 * size for tag, size in plan["save_bytes"].items()}


def test_they_follow_the_engine(one):
    assert one.llm.torpor.state().engine == "awake" and one.llm.torpor.state().level == -1
    one.llm.sleep(level=1, preserve_state=True)
    state = one.engine.torpor.state()
    assert (state.engine, state.level, state.tags) == ("asleep", 1, {"weights": "detached", "kv_cache": "detached"})
    assert sum(tag.physical_bytes for tag in one.llm.torpor.ledger()[0].tags.values()) == 0
    one.llm.wake_up()


def test_a_wrong_option_of_a_plan_is_named(one):
    with pytest.raises(TypeError, match="prserve_state"):
        one.llm.torpor.plan_sleep(prserve_state=True)
    with pytest.raises(errors.InvalidArgument, match="mode is 'later'"):
        one.llm.torpor.plan_sleep(mode="later")
