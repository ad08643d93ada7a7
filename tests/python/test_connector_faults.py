"""The KV connector under a load: requests of a trace, scaled down, concurrent, aborted, preempted and reset on a device pool
that is far too small; disks that are full and gone; a killed process. No answer differs from one without a connector."""

from pathlib import Path

import pytest
from conftest import result_of

PROCESS = Path(__file__).parent / "connector_trace_process.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[60, pytest.param(210, marks=pytest.mark.long)])
def load(request, zygote, tiny_model, tmp_path_factory):
    """What came of the load in a mode."""

    def run(mode: str, folder: Path | None = None) -> dict:
        folder = folder or tmp_path_factory.mktemp(mode)
        return result_of(zygote.run([PROCESS, mode, tiny_model, folder, request.param], timeout=200))

    run.requests = request.param
    run.expected = run("without")
    assert len(run.expected["answers"]) == request.param and not run.expected["aborted"]
    return run


def check(result: dict, load) -> None:
    """Every answer that was not aborted is there, and right; nothing is left held."""
    assert set(map(str, range(load.requests))) - set(result["aborted"]) <= result["answers"].keys()
    differing = [i for i, tokens in result["answers"].items() if tokens != load.expected["answers"][i]]
    assert differing == []
    stats = result["stats"]
    assert stats["held_blocks"] == stats["loading_requests"] == 0 and stats["free"] == 59
    assert stats["up_transferred"] > 0 and stats["down_transferred"] > 100


@pytest.fixture(scope="module")
def killed(load, tmp_path_factory) -> tuple[dict, Path]:
    """A process that was killed at the end, and where its disk is."""
    folder = tmp_path_factory.mktemp("killed")
    return load("with", folder), folder


def test_host_budget_is_what_is_mapped(killed):
    """And what batches of the disk lie in for a moment; the arena takes memory from the system 64 MiB at a time."""
    result, _ = killed
    assert result["stats"]["host_blocks"] <= 64
    assert 0 <= result["arena"]["used"] - (8 << 20) <= 2 << 20
    assert result["arena"]["held"] == 64 << 20


def test_no_token_differs_under_a_load_and_a_killed_process_leaves_its_blocks(load, killed):
    first, folder = killed
    check(first, load)
    assert first["aborted"] or first["stats"]["resets"]
    again = load("after", folder)
    check(again, load)
    assert again["stats"]["recovered_blocks"] > 50
    assert again["cached"] > 0.05 * again["prompt_tokens"]


def test_a_disk_that_is_full_and_then_gone_costs_time_only(load):
    result = load("faults")
    check(result, load)
    assert result["stats"].get("on_failed", 0) + result["stats"].get("on_degraded", 0) > 0


def test_without_host_memory_blocks_go_to_disk(load):
    result = load("disk_only")
    check(result, load)
    assert result["stats"]["host_blocks"] == 0 and result["stats"]["disk_blocks"] > 0
