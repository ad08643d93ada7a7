# SPDX-License-Identifier: Apache-2.0
"""The KV connector under a load: requests of a trace, scaled down, concurrent, aborted, preempted and reset on a far
too small device pool; disks that are full and gone; a killed process, and a killed worker. All answers are those
without a connector."""

from pathlib import Path

import pytest
from conftest import result_of
from connector_served import CONVERSATIONS

KILLED_PROCESS = Path(__file__).parent / "connector_killed_process.py"
PROCESS = Path(__file__).parent / "connector_trace_process.py"
pytestmark = pytest.mark.slow


def loads(requests: int, model: str, most_blocks: int, *marks):
    """The real model computes far longer for a token, so its prompts are shorter; still the pool is too small."""
    return pytest.param((requests, model, most_blocks), id=f"{requests}-{model}", marks=marks)


@pytest.fixture(
    scope="module",
    params=[
        loads(60, "tiny_model", 14),
        loads(210, "tiny_model", 14, pytest.mark.long),
        loads(210, "real_model", 5, pytest.mark.long),
    ],
)
def load(request, zygote, tmp_path_factory):
    """What came of the load in a mode."""
    requests, model, most_blocks = request.param
    model = request.getfixturevalue(model)
    computed = tmp_path_factory.mktemp("computed") / "kv"

    def run(mode: str, folder: Path | None = None) -> dict:
        folder = folder or tmp_path_factory.mktemp(mode)
        return result_of(zygote.run([PROCESS, mode, model, folder, requests, most_blocks, computed], timeout=1500))

    run.requests = requests
    run.expected = run("without")
    assert len(run.expected["answers"]) == requests and not run.expected["aborted"]
    return run


def check(result: dict, load) -> None:
    """Every answer that was not aborted is there, and right; nothing is left held; every block that was loaded has what
    prefill writes."""
    checked = result["checked"]
    assert checked["compared"] > 10 and checked["unknown"] == 0 and checked["difference"] < 1e-4
    assert checked["apart"] > 0.1  # the check sees a block of other tokens
    assert set(map(str, range(load.requests))) - set(result["aborted"]) <= result["answers"].keys()
    differing = [i for i, tokens in result["answers"].items() if tokens != load.expected["answers"][i]]
    assert differing == []
    assert len(result["again"]) == 6
    assert all(tokens == load.expected["answers"][i] for i, tokens in result["again"].items())
    stats = result["stats"]
    assert stats["held_blocks"] == stats["loading_requests"] == 0 and stats["free"] == 59
    assert stats["onboard_transferred"] > 0 and stats["offload_transferred"] > 30  # a slow disk takes fewer


@pytest.fixture(scope="module")
def killed(load, tmp_path_factory) -> tuple[dict, Path]:
    """A process that was killed at the end, and where its disk is."""
    folder = tmp_path_factory.mktemp("killed")
    return load("with", folder), folder


def test_host_budget_is_what_is_mapped(killed):
    """And what batches of the disk lie in meanwhile, two places a lane; the arena takes 64 MiB at a time at most."""
    result, _ = killed
    assert result["stats"]["host_blocks"] <= 64
    assert 0 <= result["arena"]["used"] - 64 * result["block_bytes"] <= 32 * result["block_bytes"]
    assert 0 <= result["arena"]["held"] - result["arena"]["used"] < 64 << 20


def test_no_token_differs_under_a_load_and_a_killed_process_leaves_its_blocks(load, killed):
    first, folder = killed
    check(first, load)
    assert first["aborted"] or first["stats"]["resets"]
    again = load("after", folder)
    check(again, load)
    assert again["stats"]["recovered_blocks"] > 50
    assert again["cached"] > 0.05 * again["prompt_tokens"]


def test_refused_host_memory_and_a_disk_that_is_full_and_then_gone_cost_time_only(load):
    result = load("faults")
    check(result, load)
    assert result["host_slots"] == 40  # of 80
    assert result["stats"].get("demote_failed", 0) + result["stats"].get("demote_degraded", 0) > 0


@pytest.mark.long
def test_a_disk_that_is_full_at_the_start_costs_hits_only(load):
    result = load("full")
    check(result, load)
    assert result["stats"]["disk_blocks"] == 0 and result["stats"]["recovered_blocks"] == 0
    assert result["stats"].get("demote_failed", 0) + result["stats"].get("demote_degraded", 0) > 0


@pytest.mark.long
def test_without_host_memory_blocks_go_to_disk(load):
    result = load("disk_only")
    check(result, load)
    assert result["stats"]["host_blocks"] == 0 and result["stats"]["disk_blocks"] > 0


@pytest.mark.long
def test_a_killed_worker_ends_serving_by_name_and_its_disk_is_found_again(zygote, tiny_model, tmp_path):
    first, again = (result_of(zygote.run([KILLED_PROCESS, whom, tiny_model, tmp_path])) for whom in ("worker", "none"))
    ended = first["ended"]
    # vLLM ends what waits for its worker.
    assert ended["loading"] > 0 and ended["error"] == "RuntimeError: cancelled"
    assert again["stats"]["recovered_blocks"] > CONVERSATIONS
    assert again["tokens"] == first["tokens"] and again["cached"] > first["cached"] + CONVERSATIONS * 32
