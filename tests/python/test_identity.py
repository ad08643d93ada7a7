# SPDX-License-Identifier: Apache-2.0
"""After any kind of sleep at any step, every answer equals that of an uninterrupted run to the last digit."""

import time
from array import array

import pytest
from conftest import LONG_ON_GPU_PATH, kept_tags
import gpu_path
import torch
from requests_of_tests import REQUESTS, run
from torpor.errors import Error
from torpor.vllm import engine_core, frontend, kept, pool_values

STEPS = [pytest.param(1, marks=LONG_ON_GPU_PATH), 8, 20] if gpu_path.active() else [1, 3, 8, 20, 47]
pytestmark = [pytest.mark.gpu_path, pytest.mark.core]


def test_two_uninterrupted_runs_are_the_same(one):
    assert one.finish(one.begin()) == one.expected
    assert len(one.expected) == len(REQUESTS)


@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("steps", STEPS)
def test_a_sleep_at_any_step_changes_nothing(one, steps, to):
    expected = one.expected
    answers = one.begin(steps)
    report = one.llm.sleep(level=1, preserve_state=True, to=to)
    assert report.changed and one.llm.is_sleeping()
    answers |= one.stopped()
    torch.manual_seed(99)  # whatever else draws in this process meanwhile
    assert one.llm.wake_up()
    assert one.finish(answers) == expected
    assert one.llm.torpor.state().recomputed_tokens == 0


@pytest.mark.parametrize("steps", [pytest.param(3, marks=LONG_ON_GPU_PATH), 20 if gpu_path.active() else 35])
def test_a_checkpoint_puts_an_engine_that_has_nothing_left_back_to_where_it_was(one, steps):
    """As in a new process, and besides the answers everything that the adapter captures is the same again."""
    answers = one.begin(steps)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    before = _captured(one)
    if steps > 3:  # requests have ended, and their blocks are given out again in another order than by their numbers
        assert list(before["pool"]["free_order"]) != sorted(before["pool"]["free_order"])
    answers |= one.stopped()
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    assert one.llm.wake_up(from_checkpoint=report.checkpoint)
    after = _captured(one)
    assert after["scheduler"] == before["scheduler"]
    for name, value in before["pool"].items():
        assert after["pool"][name] == value, name
    assert one.finish(answers) == one.expected
    assert one.llm.torpor.state().recomputed_tokens == 0


@pytest.mark.skipif(gpu_path.active(), reason="runner V2 keeps it with a request's slot")
def test_a_checkpoint_has_how_many_drafts_each_request_has_accepted(one):
    """Of the states that a request has in a layer with speculation, that is the one to go on from."""
    one.begin(10)
    batch = one.runner.input_batch
    [greedy] = one.engine.output_processor.external_req_ids["greedy"]
    batch.num_accepted_tokens_cpu[batch.req_id_to_index[greedy]] = 3
    path = one.llm.checkpoint().checkpoint
    one.begin()
    one.finish({})
    one.llm.reset_prefix_cache()
    one.llm.wake_up(from_checkpoint=path)
    found = {request: int(batch.num_accepted_tokens_cpu[row]) for request, row in batch.req_id_to_index.items()}
    assert found.pop(greedy) == 3 and {*found.values()} == {1}
    one.finish({})


def test_in_these_tests_what_is_kept_of_a_request_is_compared_with_what_it_has(one):
    answers = one.begin(8)
    one.llm.checkpoint()
    request = next(iter(one.core.scheduler.requests.values()))
    of_request = vars(request)[kept.ATTRIBUTE]
    source, right = of_request["i"]
    of_request["i"] = source, array("i", [7] * len(right))
    with pytest.raises(Error, match="prompt_token_ids"):
        one.llm.checkpoint()
    of_request["i"] = source, right
    assert one.finish(answers) == one.expected


def _captured(one) -> dict:
    from torpor.vllm import pool_values
    from torpor.vllm import scheduler_values as values

    scheduler = one.core.scheduler
    return {"scheduler": values.scheduler_to_value(scheduler), "pool": pool_values.pool_to_value(scheduler)}


def test_a_sleep_after_every_step_changes_nothing(one):
    expected = one.expected
    answers = one.begin()
    for number in range(200):
        if not one.engine.has_unfinished_requests():
            break
        answers |= run(one.engine, 1)
        one.llm.sleep(level=1, preserve_state=True, to="host" if number % 3 else "disk")
        assert one.llm.wake_up()
    assert one.finish(answers) == expected


@pytest.mark.gpu_path
def test_a_second_sleep_copies_only_kv_that_changed(one):
    expected = one.expected
    for _ in range(2):  # the second time each block has the hash that it had, but was computed again
        pool_values.empty_pool(one.core.scheduler)
        answers = one.begin(20)
        first = _sleep_and_wake(one)
        assert first["reused_bytes"] == 0 < first["backup_host_bytes"]
        for _ in range(2):
            again = _sleep_and_wake(one)
            assert again["reused_bytes"] == again["backup_host_bytes"] == first["backup_host_bytes"]
        answers |= run(one.engine, 3)
        after_steps = _sleep_and_wake(one)
        copied = after_steps["backup_host_bytes"] - after_steps["reused_bytes"]
        block = after_steps["backup_host_bytes"] / after_steps["blocks"]
        assert 0 < copied <= 2 * block * len(one.core.scheduler.running)
        assert after_steps["reused_bytes"] > 0
        assert one.finish(answers) == expected
        assert one.llm.torpor.state().recomputed_tokens == 0


def _sleep_and_wake(one) -> dict:
    report = one.llm.sleep(level=1, preserve_state=True)
    one.llm.wake_up()
    kv = report.ledgers[0]["tags"]["kv_cache"]
    assert report.reused_bytes == kv["reused_bytes"]
    return kv | {"blocks": report.kept_blocks}


@pytest.mark.gpu_path
def test_a_second_sleep_to_disk_reads_and_writes_only_kv_that_changed(one):
    expected = one.expected
    answers = one.begin(20)
    first = _sleep_to_disk_and_wake(one)
    # Of what a GPU's engine has besides nobody knows what changed.
    regions = first.ledgers[0]["tags"]
    always, chunks = sum(regions[tag]["region_bytes"] for tag in kept_tags()), None
    for _ in range(2):
        again = _sleep_to_disk_and_wake(one)
        assert _changed(again) == always < _unchanged(again) == first.saved_bytes + first.reused_bytes - always
        assert chunks in (None, chunks := _moved_chunks(again) - _moved_chunks(one.before))
        assert bool(chunks) == bool(always)
    answers |= run(one.engine, 3)
    after_steps = _sleep_to_disk_and_wake(one)
    weights = after_steps.ledgers[0]["tags"]["weights"]
    kv = after_steps.saved_bytes + after_steps.reused_bytes - weights["region_bytes"] - always
    assert weights["reused_bytes"] == weights["region_bytes"]
    saved_kv = after_steps.saved_bytes - always
    changed_kv = saved_kv - after_steps.compacted_bytes
    assert 0 < changed_kv <= 2 * kv / after_steps.kept_blocks * len(one.core.scheduler.running)
    assert _moved_chunks(after_steps) - _moved_chunks(one.before) - chunks == saved_kv * after_steps.kept_blocks / kv
    # Who calls methods of the workers may have written weights.
    one.llm.collective_rpc(lambda worker: None)
    doubted = _sleep_to_disk_and_wake(one)
    assert _changed(doubted) == weights["region_bytes"] + always and _unchanged(doubted) == kv
    # While serving it is the same, and the weights are handed on to the next sleep.
    one.llm.checkpoint()
    plan = one.llm.torpor.plan_sleep(preserve_state=True, to="disk")
    assert sum(plan.save_bytes.values()) == always and plan.reused_bytes == kv + weights["region_bytes"]
    assert _changed(_sleep_to_disk_and_wake(one)) == always
    served = one.llm.checkpoint()
    assert _changed(served) == always and _unchanged(served) == kv + weights["region_bytes"]
    # As in a new process: what it has woken from is known.
    run(one.engine)
    one.llm.reset_prefix_cache()
    assert one.llm.wake_up(from_checkpoint=served.checkpoint)
    assert _changed(one.llm.checkpoint()) == always
    assert one.finish(answers) == expected
    assert one.llm.torpor.state().recomputed_tokens == 0


def test_the_pause_of_a_checkpoint_has_both_stops(one, monkeypatch):
    answers = one.begin(6)
    hooks = engine_core._side(one.core).hooks
    stock = hooks.kv_contents

    def slow() -> dict:
        time.sleep(0.5)
        return stock()

    def go_beyond(stage: str) -> None:
        while one.engine.torpor.call("continue_checkpoint") == stage:
            time.sleep(0.001)

    one.engine.torpor.call("begin_checkpoint")
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "kv_contents", slow)  # C++ asks for them in the first stop
        go_beyond("copying")
    taken = frontend.finish(frontend.while_frozen(frontend.BlockingSide(one.engine), "take_checkpoint", {}))
    go_beyond("writing")
    assert taken["pause_seconds"] >= one.engine.torpor.call("end_checkpoint")["seconds"] > 0.5
    assert one.finish(answers) == one.expected


def _changed(report) -> int:
    return report.saved_bytes - report.compacted_bytes


def _unchanged(report) -> int:
    return report.reused_bytes + report.compacted_bytes


def _sleep_to_disk_and_wake(one):
    one.before = one.llm.torpor.call("ledger")[0]
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    one.llm.wake_up()
    return report


def _moved_chunks(of) -> int:
    """All that went through the transfer engine since the start, also for a digest."""
    ledger = of.ledgers[0] if hasattr(of, "ledgers") else of
    return sum(ledger["chunks_by_outcome"].values())


def test_the_prefix_cache_survives(one):
    """After a sleep a request with a known prefix hits the same blocks, and its answer is the same."""
    one.begin()
    one.finish({})
    one.llm.sleep(level=1, preserve_state=True, to="host")
    one.llm.wake_up()
    prompt, params = REQUESTS["prefix-a"]
    one.engine.add_request("again", prompt, params)
    while not (outputs := one.engine.step()):
        pass
    [output] = outputs
    assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 32 * 32 >= 64  # all full blocks
    assert one.finish({})["again"] == one.expected["prefix-a"]


# --- what shows that the comparison above can fail --------------------------------------------------------------------


def test_control_lost_kv_changes_tokens(one):
    expected = one.expected
    answers = one.begin(20)
    one.llm.sleep(level=1, preserve_state=True, to="host")
    one.llm.wake_up()
    for cache in one.runner.kv_caches:
        cache.zero_()
    assert one.finish(answers) != expected


def test_control_a_lost_generator_changes_unseeded_tokens_only(one):
    expected = one.expected
    answers = one.begin(20)
    one.llm.sleep(level=1, preserve_state=True, to="host")
    one.llm.wake_up()
    torch.manual_seed(12345)
    if hasattr(one.runner, "req_states"):  # model runner V2 has a seed for each request instead
        seeds = one.runner.sampler.sampling_states
        seeds.seeds.np[~seeds.seeds_set] = 12345
        seeds.seeds.copy_to_uva()
    answers = one.finish(answers)
    assert answers["unseeded"] != expected["unseeded"]
    assert answers["greedy"] == expected["greedy"]
