# SPDX-License-Identifier: Apache-2.0
"""A store of torpor's as a secondary tier of vLLM's OffloadingConnector: on disk, over restarts, damage, a full disk,
aborts and evictions, and shared by engines. All answers are those without a connector."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from conftest import result_of
from test_failures import flip

from torpor import _core
from torpor.errors import Error, FileError, InvalidArgument, Unsupported
from torpor.vllm import compat
from torpor.vllm.offloading_tier import TierOptions, TorporTier, kv_namespace

from redis_server import PASSWORD, RedisServer

PROCESS = Path(__file__).parent / "offloading_tier_process.py"
BLOCK = 128 << 10
PATIENT = {"kv_store_wait_ms": 60_000, "kv_store_timeout_ms": 60_000}  # a slow machine ends no transfer
FEW, ALL = 15 * BLOCK, 160 * BLOCK  # of host memory: a round has 72 blocks


@pytest.fixture(scope="module")
def run(zygote, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offloading")

    def run(tier: dict | None, host_bytes: int, *scenarios: str) -> dict:
        words = [PROCESS, tiny_model, folder, json.dumps(tier), host_bytes, *scenarios]
        done = zygote.run(words)
        assert PASSWORD not in done.stdout + done.stderr
        return result_of(done)

    run.folder = folder
    run.expected = run(None, 0, "first")["first"]["tokens"]
    return run


@pytest.fixture(scope="module")
def disk(run):
    """Engines one after the other over one directory: a host tier that is far too small, then a large one.

    In the small one blocks that are on their way leave no room for those from disk, so one round may find none there.
    """
    tier = {"disk_dir": str(run.folder / "disk"), "disk_bytes": "64MiB"}
    return {
        "began": run(tier, FEW, "first", "until_all_is_stored"),
        "restarted": run(tier | {"durable": True}, ALL, "aborted", "full", "again", "reset"),
    }


@pytest.mark.core
@pytest.mark.slow
def test_what_host_memory_lost_comes_from_disk(run, disk):
    began = disk["began"]
    again = began["until_all_is_stored"]
    assert began["recovered"] == 0 and began["first"]["cached"] == 0
    assert began["first"]["tokens"] == again["tokens"] == run.expected
    assert again["cached"] > 0 and again["stats"]["got_bytes"] > 0
    assert again["stats"]["blocks"] == 72


@pytest.mark.core
@pytest.mark.slow
def test_after_a_restart_all_comes_from_disk_also_beside_aborted_requests(run, disk):
    aborted = disk["restarted"]["aborted"]
    assert disk["restarted"]["recovered"] == 72
    assert aborted["gone"] > 0 and aborted["held"] == 0 and len(aborted["tokens"]) > 0
    assert all(tokens == run.expected[int(number)] for number, tokens in aborted["tokens"].items())
    assert aborted["again"]["tokens"] == run.expected and aborted["again"]["cached"] == 70 * 32
    assert aborted["again"]["stats"]["put_bytes"] == 0


@pytest.mark.slow
def test_a_disk_that_takes_nothing_costs_blocks_and_nothing_else(run, disk):
    full, after = disk["restarted"]["full"], disk["restarted"]["again"]
    assert full["others"]["stats"]["write_errors"] > 0 and full["others"]["stats"]["degraded"]
    assert full["again"]["tokens"] == after["tokens"] == run.expected
    assert full["again"]["cached"] == after["cached"] == 70 * 32


@pytest.mark.slow
def test_a_reset_keeps_what_is_on_disk_as_vllm_has_it(run, disk):
    reset = disk["restarted"]["reset"]
    assert reset["tokens"] == run.expected and reset["cached"] == 70 * 32


@pytest.mark.slow
def test_damage_is_found_and_computed(run):
    tier = {"disk_dir": str(run.folder / "damaged"), "disk_bytes": "64MiB"}
    assert run(tier, ALL, "first")["first"]["stats"]["blocks"] == 72
    flipped = 0
    for path in sorted(Path(tier["disk_dir"]).glob("store/r0/seg-*")):
        flip(path, BLOCK, 4 * BLOCK)  # of every fourth block or so
        flipped += len(range(BLOCK, path.stat().st_size, 4 * BLOCK))
    again = run(tier, ALL, "first", "again")
    assert flipped > 10 and again["first"]["tokens"] == again["again"]["tokens"] == run.expected
    assert 0 < again["first"]["cached"] < 60 * 32 and again["again"]["cached"] == 70 * 32


@pytest.mark.slow
def test_segments_go_while_their_blocks_are_wanted(run):
    tier = {"disk_dir": str(run.folder / "small"), "disk_bytes": 20 * BLOCK}
    result = run(tier, FEW, "first", "again", "others", "again")
    assert result["first"]["tokens"] == result["again"]["tokens"] == run.expected
    assert result["again"]["stats"]["blocks"] < 20 < result["again"]["stats"]["put_bytes"] / BLOCK


@pytest.mark.slow
def test_what_is_to_be_forgotten_on_a_reset_is_not_found_after_a_restart_neither(run):
    tier = {"disk_dir": str(run.folder / "forgotten"), "disk_bytes": "64MiB", "forget_on_reset": True}
    result = run(tier, ALL, "first", "reset")
    assert result["first"]["tokens"] == result["reset"]["tokens"] == run.expected and result["reset"]["cached"] == 0
    found = run(tier, ALL, "again")["again"]
    assert found["tokens"] == run.expected and found["cached"] == 70 * 32  # of what was stored since
    other = run(tier | {"weights": "of another day"}, ALL, "again")
    assert other["recovered"] == 0 and other["again"]["cached"] == 0


@pytest.mark.slow
def test_engines_share_blocks_through_redis(run):
    with RedisServer(run.folder / "redis", tls=True) as server:
        tier = {"kv_store": f"{server.url}/tests"} | PATIENT | server.options
        first = run(tier, ALL, "first")
        other = run(tier, ALL, "aborted", "again")
    assert first["first"]["cached"] == 0 and first["first"]["tokens"] == run.expected
    assert other["aborted"]["again"]["tokens"] == other["again"]["tokens"] == run.expected
    assert other["again"]["cached"] == 70 * 32
    short = {"kv_store_wait_ms": 2000, "kv_store_timeout_ms": 2000}
    gone = run(tier | short, ALL, "first", "again")  # nobody is there any more
    assert gone["first"]["tokens"] == gone["again"]["tokens"] == run.expected and gone["first"]["cached"] == 0


@pytest.mark.slow
def test_engines_share_blocks_through_an_object_store_also_when_objects_are_cut_damaged_and_gone(run):
    folder = run.folder / "objects"
    tier = {"kv_store": f"file://{folder}"} | PATIENT
    first = run(tier, ALL, "first")
    assert first["first"]["cached"] == 0 and first["first"]["stats"]["put_bytes"] >= 72 * BLOCK
    packs = sorted(folder.glob("kv1/*/r0/packs/*"))
    assert 0 < len(packs) < 72  # of several blocks
    other = run(tier, ALL, "aborted", "again")
    assert other["aborted"]["again"]["tokens"] == other["again"]["tokens"] == run.expected
    assert other["again"]["cached"] == 70 * 32 and sorted(folder.glob("kv1/*/r0/packs/*")) == packs
    for number, path in enumerate(packs):
        if number % 3 == 0:
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size - 1000)
        elif number % 3 == 1:
            flip(path, path.stat().st_size - 1000)
        elif number % 6 == 2:
            path.unlink()
    again = run(tier, ALL, "first", "again")
    assert again["first"]["tokens"] == again["again"]["tokens"] == run.expected
    assert again["first"]["cached"] < 70 * 32 == again["again"]["cached"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs disk_dir or kv_store"),
        ({"disk_dir": "/d", "disk_bytes": 1, "kv_store": "redis://h"}, "one of them"),
        ({"disk_dir": "/d"}, "disk_dir and disk_bytes go together"),
        ({"kv_store": "redis://h", "disk_bytes": 1}, "disk_dir and disk_bytes go together"),
        ({"kv_store": "redis://h", "encrypt": True}, "encrypt without key_file"),
        ({"disk_dir": "/d", "disk_bytes": 1, "root_dir": "/d"}, "unknown option root_dir of TorporTier"),
        ({"disk_dir": "/d", "disk_bytes": 1, "threads": 1}, "threads is 1"),
    ],
)
def test_options_of_the_tier_are_checked(options, words):
    with pytest.raises(InvalidArgument, match=words):
        TierOptions.of(options)


def test_engines_whose_blocks_lie_otherwise_share_none():
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False)
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("a layer",)),), parallel=parallel,
        model=SimpleNamespace(name="a model", dtype="bfloat16"), cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False, replicated_layout=False, kv_cache_layout="LBNHC",
    )  # fmt: skip
    spec, options = SimpleNamespace(config=config, blocks_per_chunk=1), TierOptions.of({"kv_store": "redis://h"})
    one = kv_namespace(spec, options)
    assert one == kv_namespace(spec, options)
    config.kv_cache_layout = "LBHNC"
    assert one != kv_namespace(spec, options)


def test_a_disk_that_fails_at_the_end_does_not_keep_vllms_memory():
    class Core:
        closed = 0

        def close(self):
            self.closed += 1
            raise FileError("the disk is gone", "look at it")

    tier, core = object.__new__(TorporTier), Core()
    tier._core = core
    tier.shutdown()
    tier.shutdown()
    assert core.closed == 1


def test_a_tier_that_is_closed_says_so(tmp_path):
    memory = memoryview(bytearray(4 << 12)).cast("B", (4, 1 << 12))
    options = {"rank": 0, "disk_bytes": 64 << 20, "directory": str(tmp_path), "durable": False, "threads": 2}
    core = _core.BlockTier(memory, "a space", options | {"kv_store_wait_ms": 1, "remembered_removals": 0})
    core.close()
    memory.release()  # nobody has it any more
    key = bytes(36)
    for call in (
        lambda: core.store(1, [key], [0]), lambda: core.load(1, "r", [key], [0]), lambda: core.lookup(key, "r"),
        core.wait, core.forget, core.finished,
    ):  # fmt: skip
        with pytest.raises(Error, match="the tier is closed"):
            call()
    core.close()


def test_a_tier_forgets_and_starts_again_where_its_epoch_cannot_be_written(tmp_path):
    memory = memoryview(bytearray(4 << 12)).cast("B", (4, 1 << 12))
    options = {"rank": 0, "disk_bytes": 64 << 20, "directory": str(tmp_path), "durable": False, "threads": 2}
    options |= {"kv_store_wait_ms": 1, "remembered_removals": 0}
    key = b"\1" * 32 + bytes(4)
    core = _core.BlockTier(memory, "a space", options)
    core.store(1, [key], [0])
    core.wait()
    assert core.finished()[0][1] == [True] and core.lookup(key, "r") == 1
    (tmp_path / "space-unfinished").mkdir()  # the place of the new word
    core.forget()
    assert core.lookup(key, "r") == 0
    core.close()
    (tmp_path / "space-unfinished").rmdir()
    (tmp_path / "space-1").write_bytes(b"0123")  # as torpor left it once on a full disk
    core = _core.BlockTier(memory, "a space", options)
    assert core.stats()["recovered_blocks"] == 0 and core.lookup(key, "r") == 0
    core.close()


def test_another_release_of_vllm_is_refused_by_name(monkeypatch):
    module = sys.modules["torpor.vllm.offloading_tier"]
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(Unsupported, match=r"this is 0\.34\.0"):
        importlib.reload(module)
    with pytest.raises(Unsupported, match=r"torpor is for vLLM 0\.31, 0\.32, 0\.33"):
        compat.check("0.30.0", "offloading_tier")
