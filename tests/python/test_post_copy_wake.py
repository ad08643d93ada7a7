# SPDX-License-Identifier: Apache-2.0
"""A post-copy wake: cached KV blocks come back while the engine runs, and no token is another one for it.

What comes late moves here only when somebody waits for it, a block at a time.
"""

import pytest
import gpu_path
from conftest import InProcess
from inspector import look
from requests_of_tests import SHARED, add_requests, run
from test_failures import flip
from vllm import SamplingParams

from torpor import _core, errors
from torpor.vllm import deferred_blocks


def _params(**options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "temperature": 0} | options))


OLD = "foo bar " * 100
REQUESTS = {
    "old": (OLD, _params(max_tokens=2)),  # it has ended when the engine falls asleep, and so has the next one
    "shared": (SHARED, _params(max_tokens=2)),
    "greedy": ("The capital of France is", _params()),
    "seeded": ("Once upon a time", _params(temperature=1.0, seed=7)),
    "unseeded": ("My name is", _params(temperature=1.0)),
    "hit": (OLD + "and more", _params(temperature=1.0)),  # after the wake, as is the next one
    "filler": ("and all is new " * 150, _params(max_tokens=30)),
}
RUNNING = ("greedy", "seeded", "unseeded")


@pytest.fixture(scope="session")  # until all end: an engine that goes ends those of its process
def early(tiny_model, tmp_path_factory) -> InProcess:
    if gpu_path.pretends_cuda():
        pytest.skip("engines of one process share a GPU's memory: this one beside another needs its own process")
    stock = _core.RankMemory
    options = {"deferred_thread": False, "deferred_job_bytes": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "RankMemory", lambda given: stock(given | options))
        return InProcess(
            tiny_model,
            tmp_path_factory.mktemp("early"),
            torpor={"retain_kv_bytes": 1 << 30, "incremental": True},
            requests=REQUESTS,
            num_gpu_blocks_override=32,
            max_model_len=768,
        )


class Run:
    """The requests of RUNNING after four steps, with what older ones left in the prefix cache."""

    def __init__(self, one: InProcess):
        self.one, self.llm, self.engine = one, one.llm, one.engine
        one.begin(0, ["old", "shared"])
        run(one.engine)
        add_requests(one.engine, RUNNING, requests=REQUESTS)
        self.answers = run(one.engine, 4)

    def add(self, *names: str) -> None:
        add_requests(self.engine, names, requests=REQUESTS)

    def step(self, count: int | None = None) -> dict:
        self.answers |= run(self.engine, count)
        return self.answers

    def deferred(self, wait: str = "none") -> dict:
        return self.llm.torpor.call("continue_wake", {"wait": wait})

    def sleep_and_wake(self, to: str = "host") -> int:
        slept = self.llm.sleep(level=1, preserve_state=True, to=to)
        assert slept.changed
        woken = self.llm.wake_up(early=True)
        assert woken and woken.deferred_blocks > 8 and woken.deferred_bytes > 0
        assert self.deferred()["pending"] == woken.deferred_blocks  # nothing comes by itself
        return woken.deferred_blocks


def expected_of(one: InProcess, *added: str) -> dict:
    known = one.__dict__.setdefault("of_early", {})
    if added not in known:
        plain = Run(one)
        plain.step(2)
        plain.add(*added)
        known[added] = plain.step()
    return known[added]


@pytest.mark.parametrize("to", ["host", "disk"])
def test_the_engine_runs_and_a_prefix_that_is_late_is_waited_for(early, to):
    expected = expected_of(early, "hit")
    now = Run(early)
    blocks = now.sleep_and_wake(to)
    now.step(2)
    assert now.deferred()["pending"] == blocks  # running requests needed none of them
    now.add("hit")
    now.step(1)
    counts = now.deferred()
    assert 4 < counts["arrived"] < blocks and counts["pending"] == blocks - counts["arrived"]
    assert now.step() == expected
    counts = now.deferred("all")
    assert counts == {"arrived": blocks, "unreadable": 0, "skipped": 0, "pending": 0, "recomputed": []}
    assert early.core.scheduler.torpor_deferred is None


def test_a_late_block_that_is_given_out_is_written_by_nobody_any_more(early):
    expected = expected_of(early, "filler")
    now = Run(early)
    blocks = now.sleep_and_wake()
    now.step(2)
    now.add("filler")
    now.step(8)
    counts = now.deferred("all")  # while it runs: what came now into its blocks would be seen
    assert counts["skipped"] > 0 and counts["skipped"] + counts["arrived"] == blocks
    assert now.step() == expected


def test_who_wanted_a_late_block_that_is_damaged_is_computed_and_named(early):
    expected = expected_of(early, "hit")
    now = Run(early)
    slept = now.llm.sleep(level=1, preserve_state=True, to="disk")
    cached = [block for block in look("blocks", slept.checkpoint)["blocks"] if not block["requests"]]
    for block in cached:
        flip(early.directory / slept.checkpoint / block["saved"][0]["file"], block["saved"][0]["offset"] + 7)
    assert now.llm.wake_up(early=True).deferred_blocks == len(cached) > 15
    now.step(2)
    now.add("hit")
    answers = now.step()
    assert {name: answers[name] for name in RUNNING[:2]} == {name: expected[name] for name in RUNNING[:2]}
    assert answers["hit"][0]
    counts = now.deferred("all")
    assert counts["unreadable"] == len(cached) and counts["pending"] == counts["arrived"] == 0
    assert [name.split("-")[0] for name in counts["recomputed"]] == ["hit"]
    assert early.finish(early.begin(0, RUNNING)).keys() == set(RUNNING)  # it serves on


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_second_sleep_and_a_checkpoint_wait_for_what_is_late(early, to):
    expected = expected_of(early, "hit")
    now = Run(early)
    now.sleep_and_wake()
    now.step(1)
    assert now.llm.checkpoint().checkpoint
    assert now.deferred()["pending"] == 0
    now.sleep_and_wake(to)
    now.sleep_and_wake(to)
    now.step(1)
    now.add("hit")
    assert now.step() == expected


def test_requests_end_and_the_prefix_cache_is_reset_in_the_middle(early):
    expected = expected_of(early, "hit")
    now = Run(early)
    now.sleep_and_wake()
    now.step(1)
    now.engine.abort_request(list(RUNNING))
    run(now.engine)
    assert now.llm.reset_prefix_cache()
    now.add("filler", "hit")
    answers = now.step()
    counts = now.deferred("all")
    assert counts["pending"] == 0 and counts["unreadable"] == 0 and counts["recomputed"] == []
    assert answers["filler"][0] and answers["hit"][0]
    after = Run(early)
    after.step(2)
    after.add("hit")
    assert after.step() == expected


def test_a_prefix_of_a_checkpoint_is_late_too(early):
    expected = expected_of(early, "hit")
    slept = Run(early)
    slept.step(2)
    path = slept.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    slept.llm.wake_up()
    before = dict(slept.answers)
    slept.step()
    slept.llm.reset_prefix_cache()
    woken = slept.llm.wake_up(from_checkpoint=path, early=True)
    assert woken.changed and woken.requests == len(RUNNING)
    assert slept.deferred()["pending"] == woken.deferred_blocks > 8
    slept.answers = before
    slept.add("hit")
    slept.step(1)
    assert 4 < slept.deferred()["arrived"] < woken.deferred_blocks
    assert slept.step() == expected
    assert slept.deferred("all")["pending"] == 0 and early.core.scheduler.torpor_deferred is None


def test_what_is_not_early_brings_all_back(early):
    expected = expected_of(early, "hit")
    now = Run(early)
    now.llm.sleep(level=1, preserve_state=True)
    now.llm.wake_up(["weights"], early=True)
    assert now.llm.wake_up(["kv_cache"], early=True).deferred_blocks > 0  # the last tag: all others are there
    now.deferred("all")
    now.llm.sleep(level=1, preserve_state=True)
    assert now.llm.wake_up(kv="keep", early=True).deferred_blocks == 0
    now.step(2)
    now.add("hit")
    assert now.step()["greedy"] == expected["greedy"]


@pytest.mark.parametrize(("took", "looks"), [(0.0, 101), (0.0001, 101), (0.002, 11), (0.05, 1)])
def test_looks_take_a_fiftieth_of_the_time_at_most(early, monkeypatch, took, looks):
    """Those before steps, 100 a second here; ranks in other processes answer when their step is over."""
    now, calls = [1000.0], []

    def advance(*wishes) -> None:
        calls.append(wishes)
        now[0] += took

    monkeypatch.setattr(deferred_blocks.time, "monotonic", lambda: now[0])
    blocks = deferred_blocks.DeferredBlocks(early.core.scheduler, [], advance)
    for step in range(101):
        now[0] = max(now[0], 1000.0 + step * 0.0100001)
        blocks.poll()
    blocks.release([], [], [], [])
    assert calls == [("none", [], [])] * looks and early.core.scheduler.torpor_deferred is None


def test_a_copy_that_is_not_proven_over_takes_its_block_for_ever(early, monkeypatch):
    scheduler = early.core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    now = Run(early)
    now.sleep_and_wake()
    free, block = pool.get_num_free_blocks(), max(early.core.scheduler.torpor_deferred._deferred)
    early.core.scheduler.torpor_deferred.release([], [], [], [block])
    assert pool.get_num_free_blocks() == free - 1 and pool.blocks[block].block_hash is None
    with pytest.raises(errors.Unsupported, match="1 KV blocks whose copies were never proven over"):
        now.llm.sleep(level=1, preserve_state=True)
    now.deferred("all")
    pool.blocks[block].ref_cnt = 0  # the engine is others' too
    pool.free_block_queue.append_n([pool.blocks[block]])
    monkeypatch.setattr(scheduler, "torpor_unproven", 0)
    now.step()
