# SPDX-License-Identifier: Apache-2.0
"""Values across the Python border: what goes in comes out, and what is missing, unknown or of another type is named."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/bench"))
from scheduler_state_bench import busy_scheduler

from torpor import EngineCheckpoint, errors


def test_what_is_encoded_is_decoded():
    values = busy_scheduler(5, 7)
    checkpoint = EngineCheckpoint.from_dict(values)
    checkpoint.validate()
    again = EngineCheckpoint.decode(checkpoint.encode(), values["fingerprint"])
    assert again == checkpoint
    assert EngineCheckpoint.from_dict(again.to_dict()) == checkpoint


def _set(values: dict, path: list, value) -> None:
    for step in path[:-1]:
        values = values[step]
    if value is None:
        del values[path[-1]]
    else:
        values[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["scheduler", "surprise"], 1, "scheduler.surprise must be left out"),
        (["scheduler", "requests", 0, "priority"], None, "priority must be given"),
        (["scheduler", "requests", 0, "sampling", "top_p"], "high", "sampling.top_p must be"),
        (["scheduler", "requests", 0, "sampling", "engine"], {"f": object()}, "object"),
        (["kv"], [], "kv must be a dict"),
        (["scheduler", "requests"], {}, "scheduler.requests must be a list"),
        (["scheduler", "requests", 0, "block_hashes"], "text", "block_hashes must be bytes"),
        (["scheduler", "requests", 0, "status"], "asleep", "status must be"),
        (["scheduler", "requests", 0, "priority"], 1 << 70, "priority must be"),
        (["scheduler", "requests", 0, "engine"], {"n": 1 << 70}, "a number in a value must be"),
        (["kv", "prefix_index"], [(b"key",)], "kv.prefix_index must be a list of pairs"),
        (["kv", "blocks", "hashes"], [], "kv.blocks must be four lists"),
    ],
)
def test_a_wrong_entry_is_named(path, value, named):
    values = busy_scheduler(2, 2)
    _set(values, path, value)
    with pytest.raises(errors.InvalidArgument, match=named):
        EngineCheckpoint.from_dict(values)


def test_numbers_that_vllm_takes_and_the_format_has_no_room_for_come_back():
    from types import SimpleNamespace

    from torpor.vllm import scheduler_values, values
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.request import Request

    assert values.sampling_to_value(SamplingParams(top_k=3_000_000_000))["top_k"] == 2**31 - 1
    wide = SamplingParams(
        max_tokens=2**33, min_tokens=2**32, seed=2**64 - 1, stream_interval=2**64 - 1, thinking_token_budget=2**70,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=2**65, min_count=2**66),
    )  # fmt: skip
    checkpoint = busy_scheduler(2, 2)
    checkpoint["scheduler"]["requests"][0] |= scheduler_values.request_to_value(Request("r", [1], wide, None))
    EngineCheckpoint.from_dict(checkpoint)
    params = values.sampling_from_value(values.sampling_to_value(wide))
    assert (params.max_tokens, params.min_tokens, params.seed) == (2**31 - 1, 2**31 - 1, 2**64 - 1)
    forked = values.sampling_from_value(values.sampling_to_value(wide) | {"seed": 5})
    assert forked.seed == 5
    for priority in (1_790_000_000_000, -(2**63)):
        request = SimpleNamespace(priority=priority)
        assert scheduler_values._wide_priority(request) == {"wide_priority": priority}
        assert -(2**31) <= scheduler_values._bounded(priority) < 2**31
    assert scheduler_values._wide_priority(SimpleNamespace(priority=-5)) == {}
    made = Request("r", [1, 2, 3], SamplingParams(max_tokens=4), None, priority=1_790_000_000_000)
    value = scheduler_values.request_to_value(made)
    assert value["priority"] == 2**31 - 1
    assert scheduler_values.request_from_value(value, None).priority == 1_790_000_000_000


def test_hostile_sections_are_refused():
    sections = EngineCheckpoint.from_dict(busy_scheduler(2, 2)).encode()
    for number in range(len(sections)):
        cut = [(name, content[:-1] if at == number else content) for at, (name, content) in enumerate(sections)]
        with pytest.raises(errors.Damaged, match=sections[number][0]):
            EngineCheckpoint.decode(cut)
