# SPDX-License-Identifier: Apache-2.0
"""What only vLLM's GPU path has: batches in flight, slots, seeds; and what shows that they matter.

The reference of a run that paused once is a run that did nothing else: a drain lets the scheduler see finished
requests a step earlier than a run that never stops, and on a GPU other batches may round otherwise.
"""

import json
import os
from pathlib import Path

import gpu_path
import pytest
from conftest import result_of, tags
from features import FEATURES
from requests_of_tests import REQUESTS, run
from vllm.lora.request import LoRARequest

from torpor import errors
from torpor.vllm import runner_v2

pytestmark = [
    pytest.mark.gpu_path,
    pytest.mark.skipif(not gpu_path.active(), reason="the GPU path is another process's"),
]
HERE = Path(__file__).parent


def paused(one, steps: int) -> dict:
    """The answers of a run that only stood still after so many steps."""
    answers = one.begin(steps)
    one.llm.sleep(level=0)
    answers |= one.stopped()
    one.llm.wake_up()
    return one.finish(answers)


@pytest.mark.core
def test_torpor_has_its_memory_of_a_gpu(one):
    """Five tags, and what torch's pools have of the model: several tensors in a segment, several segments in a tag."""
    from gpu_path import pools

    worker = one.core.model_executor.driver_worker.worker
    assert type(worker.torpor_memory).__name__ == "GpuWorkerMemory"
    assert one.llm.torpor.state().tags == tags("attached", "attached")
    places = {parameter.untyped_storage().data_ptr() for parameter in one.runner.model.parameters()}
    segments = [
        [at for at in places if segment.address <= at < segment.address + segment.size]
        for pool in pools.alive()
        for segment in pool.segments
    ]
    assert sum(map(len, segments)) == len(places)
    assert len([inside for inside in segments if inside]) > 1 and max(map(len, segments)) > 1


@pytest.mark.core
@pytest.mark.parametrize("steps", [*(pytest.param(steps, marks=pytest.mark.long) for steps in (2, 15, 17)), 16])
def test_a_sleep_with_a_batch_in_flight_equals_a_pause(one, steps):
    reference = paused(one, steps)
    answers = one.begin(steps)
    assert len(one.core.batch_queue) == 1
    made = {request_id: request.num_output_tokens for request_id, request in one.core.scheduler.requests.items()}
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    assert not one.core.batch_queue
    left = one.core.scheduler.requests
    grown = [i for i, count in made.items() if i not in left or left[i].num_output_tokens > count]
    assert grown, "the batch in flight gave nobody a token"
    answers |= one.stopped()
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    assert one.llm.wake_up(from_checkpoint=path)
    assert one.finish(answers) == reference
    assert one.llm.torpor.state().recomputed_tokens == 0


@pytest.mark.skipif(not gpu_path.pretends_cuda(), reason="a CPU has no pools")
def test_what_torch_gives_back_around_a_sleep_is_neither_saved_nor_kept(one):
    """A whole pool, and a segment of one that is in use otherwise; before the sleep, and while it saves."""
    import torch
    from gpu_path import pools

    from torpor import memory

    def held() -> int:
        return memory.ledger()[0]["tags"]["runtime"]["region_bytes"]

    def fresh(mebibytes: int) -> torch.Tensor:
        return torch.ones(mebibytes << 20, dtype=torch.uint8)

    worker = one.core.model_executor.driver_worker.worker
    answers = one.begin(9)
    for released in (worker.torpor_settle, worker.torpor_release_derived):
        memory.release_unused()
        before = held()
        with memory.region("runtime", engine=True):
            unused, used = [fresh(3)], fresh(1)
        with memory.region("runtime", engine=True):
            unused.append(fresh(3))

        def letting_go(*arguments, released=released, unused=unused):
            unused.clear()
            return released(*arguments)

        setattr(worker, released.__name__, letting_go)
        try:
            one.llm.sleep(level=1, preserve_state=True)
        finally:
            delattr(worker, released.__name__)
        kept = 1 << 20 if released.__name__ == "torpor_settle" else 4 << 20  # torch asks once for a segment's memory
        assert held() - before == kept, released.__name__
        pools.fill_cache(1 << 20)
        answers |= one.stopped()
        one.llm.wake_up()
        assert not pools.cached()
        assert used.eq(1).all()
        del used
        memory.release_unused()
        assert held() == before
    assert one.finish(answers) == one.expected


def test_no_output_of_a_batch_in_flight_is_lost_or_comes_twice(one):
    expected = {(name, choice[0]): choice[1] for name, value in one.expected.items() for choice in value[1]}
    for steps in (3, 20):
        one.begin(0)
        tokens = {}
        for number in range(200):
            if not one.engine.has_unfinished_requests():
                break
            if number % steps == steps - 1:
                one.llm.sleep(level=0)
                one.llm.wake_up()
            for output in one.engine.step():
                for choice in output.outputs:
                    name, given = (output.request_id, choice.index), list(choice.token_ids)
                    assert len(given) > len(tokens.get(name, ())) or output.finished
                    tokens[name] = given
        assert {name: tokens.get(name) for name in expected} == expected


def test_requests_that_were_preempted_with_a_batch_in_flight_sleep(one):
    """vLLM takes their slots away; they get others when they run again, and requests without a seed draw new ones."""

    def preempted(to: str | None) -> dict:
        answers = one.begin(9)
        one.core.reset_prefix_cache(reset_running_requests=True)
        assert one.core.batch_queue and not one.core.scheduler.running
        report = one.llm.sleep(level=1, preserve_state=True, to=to) if to else one.llm.sleep(level=0)
        answers |= one.stopped()
        one.llm.wake_up()
        if to == "disk":
            run(one.engine)
            one.llm.reset_prefix_cache()
            one.llm.wake_up(from_checkpoint=report.checkpoint)
        return one.finish(answers)

    reference = preempted(None)
    assert preempted("host") == reference and preempted("disk") == reference
    assert reference["greedy"] == one.expected["greedy"]


def test_a_request_that_is_aborted_with_its_batch_in_flight_is_gone(one):
    answers = one.begin(12)
    one.engine.abort_request(["greedy", "long"])
    assert one.core.batch_queue
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    answers |= one.stopped()
    one.llm.wake_up()
    run(one.engine)
    assert len(one.runner.req_states.free_indices) + len(one.runner.req_states.req_id_to_index) == 16
    one.llm.reset_prefix_cache()
    one.llm.wake_up(from_checkpoint=path)
    finished = one.finish(answers)
    assert not finished.keys() & {"greedy", "long"}
    assert finished["seeded"] == one.expected["seeded"]


@pytest.mark.parametrize("options", [{"preserve_state": True}, {"mode": "keep"}])
def test_no_time_for_the_batches_in_flight_changes_nothing(one, options):
    answers = one.begin(12)
    with pytest.raises(errors.TimedOut, match="in flight") as caught:
        one.llm.sleep(level=1, timeout=0, **options)
    assert not caught.value.state_changed and not one.llm.is_sleeping()
    assert not one.core.scheduler.torpor_frozen and one.core.scheduler.pause_state.name == "UNPAUSED"
    assert one.core.batch_queue
    assert one.finish(answers) == one.expected


def test_what_vllm_keeps_beside_the_weights_is_rebuilt_after_level_2(one, tiny_model):
    """Penalty counts, bias tables and the rest of the sampler: vLLM makes them while it loads the model."""
    answers = one.begin(12)
    one.llm.sleep(level=2, preserve_state=True, weights="reload")
    answers |= one.stopped()
    one.llm.wake_up()
    sampler, states = one.runner.sampler, one.runner.req_states
    bias, penalties, bad_words = sampler.logits_processors
    lost = [penalties.prompt_bin_mask, penalties.output_bin_counts, bias.logit_bias_token_ids.gpu, bias.logit_bias.gpu]
    lost += [bias.stop_token_ids.gpu, bias.allowed_token_ids.gpu, bad_words.bad_word_token_ids.gpu]
    lost += [sampler.logprob_token_ids_state.token_ids.gpu, states.last_sampled_tokens, states.next_prefill_tokens]
    for tensor in lost:
        tensor.fill_(7)
    one.llm.collective_rpc("reload_weights")
    assert one.llm.wake_up(kv="keep")
    assert one.finish(answers) == one.expected


def test_an_adapter_is_not_loaded_into_memory_that_sleeps(one):
    """The engine has no slots for adapters; vLLM says so when it is awake."""
    adapter = LoRARequest("adapter", 1, "/nowhere")
    answers = one.begin(12)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.stopped()
    for call in (lambda: one.engine.add_lora(adapter), lambda: one.engine.pin_lora(1)):
        with pytest.raises(errors.WrongState, match=r"(add|pin)_lora\(\): the weights are detached"):
            call()
    one.llm.wake_up(tags=["weights"])
    with pytest.raises(RuntimeError, match="LoRA is not enabled"):
        one.engine.add_lora(adapter)
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.long) for n in ("BHLNC", "LBHNC", "BLNHC", "BLHNC")]
)
@pytest.mark.slow
def test_every_kv_layout_sleeps(zygote, tiny_model, tmp_path, layout):
    result = variant(zygote, tiny_model, tmp_path, {}, gpu_path.environment(kv_layout=layout))
    assert result["differing"] == [] and result["recomputed"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_layout_whose_blocks_are_scattered_is_refused_by_name(zygote, tiny_model, tmp_path):
    result = variant(zygote, tiny_model, tmp_path, {}, gpu_path.environment(kv_layout="LHBNC"))
    assert "the KV cache layout LHBNC" in result["refused"]


@pytest.mark.core
@pytest.mark.long
@pytest.mark.slow
def test_blocks_that_attention_divides_sleep(zygote, tiny_model, tmp_path):
    result = variant(zygote, tiny_model, tmp_path, {"block_size": 64}, gpu_path.environment(kernel_block=32))
    assert result["differing"] == [] and result["recomputed"] == 0


@pytest.mark.slow
def test_nothing_is_read_before_the_device_has_written_it(zygote, tiny_model, tmp_path):
    result = variant(zygote, tiny_model, tmp_path, {}, gpu_path.environment(slow_copies=True))
    assert result["differing"] == [] and result["recomputed"] == 0


def test_pruned_videos_are_refused(one, monkeypatch):
    monkeypatch.setattr(one.runner.model_state, "mm_pruner", object(), raising=False)
    with pytest.raises(errors.Unsupported, match="pruned videos"):
        one.llm.sleep(preserve_state=True)


@pytest.mark.slow
def test_no_block_is_stored_before_the_drafting_model_has_written_it(zygote, real_model, tmp_path):
    """vLLM hands over a step's tokens before its drafts are made."""
    feature = "speculation, EAGLE"
    FEATURES[feature].model(tmp_path / "model", real_model)
    options = {"host_bytes": "64MiB", "sync_load_budget_bytes": 0}
    process = HERE / "connector_models_process.py"
    words = [process, "torpor", feature, tmp_path / "model", tmp_path / "store", json.dumps(options), "as_written"]
    result = result_of(zygote.run(words, env=os.environ | gpu_path.environment(slow_copies=True)))["as_written"]
    assert result["loaded"] > 1 and all(result["same"])


def variant(zygote, model, folder, options: dict, variables: dict) -> dict:
    words = [HERE / "variant_process.py", model, folder / "store", json.dumps(options | {"sleep_at": [9]})]
    return result_of(zygote.run(words, env=os.environ | variables))


def test_slots_that_contradict_each_other_are_refused(one):
    """A new engine takes none of such a checkpoint."""
    answers = one.begin(9, ["greedy", "seeded"])
    [value] = one.core.collective_rpc("torpor_capture", args=({},))
    greedy, seeded = value["rows"]
    value["engine"]["slots"][greedy] = value["engine"]["slots"][seeded]
    with pytest.raises(errors.Incompatible, match="slots"):
        runner_v2.restore(one.runner, value, [], {})
    assert one.finish(answers)["greedy"] == one.expected["greedy"]


def test_state_that_is_not_preserved_is_refused_by_name(one):
    class CustomProcessor:
        pass

    answers = one.begin(5)
    processors = one.runner.sampler.logits_processors
    processors.append(CustomProcessor())
    try:
        with pytest.raises(errors.Unsupported, match="the logits processor CustomProcessor"):
            one.llm.torpor.call("sleep", {"level": 1, "preserve_state": True, "to": "host", "in_flight": "freeze"})
    finally:
        processors.pop()
    assert one.finish(answers) == one.expected


# --- what shows that the comparisons above can fail -------------------------------------------------------------------


def seeds(runner, slot):
    runner.sampler.sampling_states.seeds.np[slot] += 1


def last_tokens(runner, slot):
    runner.req_states.last_sampled_tokens[slot] = 300


@pytest.mark.parametrize("lost", [seeds, last_tokens])
def test_control_a_slot_that_comes_back_otherwise_changes_tokens(one, monkeypatch, lost):
    correct = runner_v2._correct_slot

    def spoil(runner, slot, item, given):
        correct(runner, slot, item, given)
        lost(runner, slot)

    monkeypatch.setattr(runner_v2, "_correct_slot", spoil)
    answers = one.begin(12)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.stopped()
    one.llm.wake_up()
    assert one.finish(answers) != one.expected


def test_control_a_lost_state_of_numpy_changes_requests_that_have_not_begun(one):
    import numpy

    def late(options: dict, asleep: int | None, awake: int | None) -> list:
        """The answer of a request that had no slot yet; numpy is seeded otherwise meanwhile, and after the wake."""
        answers = one.begin(5, ["greedy"])
        prompt, params = REQUESTS["unseeded"]
        one.engine.add_request("late", prompt, params)
        one.llm.sleep(**options)
        answers |= one.stopped()
        if asleep is not None:
            numpy.random.seed(asleep)
        one.llm.wake_up()
        if awake is not None:
            numpy.random.seed(awake)
        return one.finish(answers)["late"]

    preserved = {"level": 1, "preserve_state": True}
    reference = late({"level": 0}, None, None)
    assert late(preserved, 99, None) == reference != late(preserved, 99, 98)


@pytest.mark.skipif(not gpu_path.pretends_cuda(), reason="on a CPU each engine has memory of its own")
def test_a_second_engine_of_a_process_is_refused_on_the_same_device(one):
    """Their tags have the same names: a sleep of one would take the other's memory, and use its options."""
    from torpor import memory
    from torpor.vllm.gpu_memory import GpuWorkerMemory

    device = one.core.model_executor.driver_worker.worker.device
    with pytest.raises(errors.Unsupported, match="another engine of this process has its memory on device 0"):
        GpuWorkerMemory(device, {"arena_budget_bytes": 1})
    assert memory.ledger()[0]["arena_budget_bytes"] != 1
    assert one.finish(one.begin()) == one.expected
