# SPDX-License-Identifier: Apache-2.0
"""What cannot be preserved is refused by its name before anything is touched, alone where it is of one request."""

from pathlib import Path
from types import SimpleNamespace

import gpu_path
import pytest
from conftest import result_of
from requests_of_tests import SAID, run, said_of
from vllm import SamplingParams

from torpor import errors
from torpor.vllm.engine_core import EngineCoreMixin
from torpor.vllm.scheduler_values import not_taken
from torpor.vllm.support import unsupported_engine, unsupported_scheduler

HERE = Path(__file__).parent
OF_V1 = "the class that has changed is model runner V1's; a worker with V2 looks at its own when it starts"


@pytest.mark.gpu_path
def test_a_request_that_no_checkpoint_can_hold_sleeps_here_and_ends_alone_elsewhere(one):
    """It lives on in memory over each sleep; whoever goes on from a checkpoint ends it by name."""
    names = ["greedy", "seeded"]

    def asked() -> dict:
        answers = one.begin(4, names)
        odd = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, extra_args={"x": object()})
        one.engine.add_request("odd", "a b a b", odd)
        transfers = {"kv_transfer_params": {"a": 1}}
        hinted = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, extra_args=transfers)
        one.engine.add_request("hinted", "la la", hinted, **SAID)
        return answers | run(one.engine, 3)

    expected = one.finish(asked())
    answers = asked()
    report = one.llm.sleep(level=1, preserve_state=True)
    assert [each["id"].split("-")[0] for each in report.bound_requests] == ["odd"]
    before = said_of(one.core, "hinted")
    answers |= one.stopped()
    one.llm.wake_up()
    assert one.finish(answers) == expected

    answers = asked()
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    why = {each["id"].split("-")[0]: each["error"] for each in report.bound_requests}
    assert why.keys() == {"odd"} and "extra_args" in why["odd"]
    answers |= one.stopped()
    one.llm.wake_up()
    assert one.finish(answers) == expected

    one.llm.reset_prefix_cache()
    woken = one.llm.wake_up(from_checkpoint=report.checkpoint)
    why = {each["id"].split("-")[0]: each["error"] for each in woken.failed_requests}
    assert why.keys() == {"odd"} and "extra_args" in why["odd"]
    assert said_of(one.core, "hinted") == before and before["trace_headers"] == SAID["trace_headers"]
    assert before["kv_transfer_params"] == {"a": 1}
    finished = one.finish(answers)
    goes_on = [*names, "hinted"]
    assert {name: finished[name] for name in goes_on} == {name: expected[name] for name in goes_on}
    for name in why:  # their readers are told
        [[_, _, _, reason, text, *_]] = finished[name][1]
        assert reason == "error" and why[name] == text


@pytest.mark.parametrize("field", ["num_in_flight_tokens", "num_output_placeholders"])
def test_a_sleep_beside_a_step_of_another_thread_says_try_again(one, field):
    answers = one.begin(4, ["greedy"])
    [request] = one.core.scheduler.requests.values()
    of_own_steps = getattr(request, field)  # a sleep waits until these are over
    setattr(request, field, of_own_steps + 1)
    with pytest.raises(errors.WrongState, match=r"has tokens in flight.*: the engine is in a step") as refused:
        one.llm.sleep(level=1, preserve_state=True)
    assert "try again" in refused.value.next_step and not one.llm.is_sleeping()
    setattr(request, field, 0)
    assert one.llm.sleep(level=1, preserve_state=True).requests == 1
    one.llm.wake_up()
    one.finish(answers)


def test_what_this_engine_would_compute_otherwise_is_not_gone_on_with():
    model = SimpleNamespace(enable_prompt_embeds=False, enable_trace_replay=False)
    engine = SimpleNamespace(model_config=model, reasoning_config=None)

    def request(prompt_embeds=None, **params) -> SimpleNamespace:
        return SimpleNamespace(prompt_embeds=prompt_embeds, sampling_params=SamplingParams(max_tokens=3, **params))

    assert not_taken(request(), engine) is None
    assert not_taken(SimpleNamespace(prompt_embeds=None, sampling_params=None), engine) is None  # a pooling request
    assert "enable_prompt_embeds" in not_taken(request([0]), engine)
    assert "enable_trace_replay" in not_taken(request(trace_decode_token_ids=[1]), engine)
    thinks = request(thinking_token_budget=4)
    for reasoning in (None, SimpleNamespace(enabled=False)):
        engine.reasoning_config = reasoning
        assert "start it with reasoning_parser or reasoning_config" in not_taken(thinks, engine)
    engine.reasoning_config = SimpleNamespace(enabled=True)
    assert not_taken(thinks, engine) is None


def test_it_sleeps_without_preserving_them(one):
    one.begin(5)
    one.engine.add_request("special", "a b a b", SamplingParams(max_tokens=30, extra_args={"x": b"y"}))
    assert one.llm.sleep(level=1).changed
    one.llm.wake_up()
    assert one.finish(one.begin()) == one.expected


def changed(config, path: str, value):
    """A view of the configuration in which one field has another value."""
    first, *rest = path.split(".")

    class View:
        def __getattr__(self, name):
            found = getattr(config, name)
            if name != first:
                return found
            return changed(found, ".".join(rest), value) if rest else value

    return View()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("kv_transfer_config", object(), "KV connector"),
        ("ec_transfer_config", object(), "encoder cache connector"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ],
)
def test_a_configuration_with_such_a_feature_is_named(one, path, value, named):
    config = one.core.vllm_config
    assert unsupported_engine(config) == []
    [found] = unsupported_engine(changed(config, path, value))
    assert named in found


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("speculative_config", object(), "speculative decoding in a pipeline"),
        ("lora_config", object(), "LoRA in a pipeline"),
        ("model_config.is_multimodal_model", True, "multimodal models in a pipeline"),
    ],
)
def test_what_is_preserved_only_without_a_pipeline_is_named(one, path, value, named):
    staged = changed(one.core.vllm_config, "parallel_config.pipeline_parallel_size", 2)
    assert unsupported_engine(staged) == []
    assert unsupported_engine(changed(staged, path, value)) == [named]


def test_of_ranks_that_compute_for_each_other_none_is_stopped_alone(one):
    """With experts: unless all stand, whatever would have one stand still is refused before anything is touched."""
    core = SimpleNamespace(vllm_config=changed(one.core.vllm_config, "parallel_config.data_parallel_size", 2))
    for method in ("freeze", "sleep", "checkpoint", "wake_up"):
        error = EngineCoreMixin.torpor_call(core, method, {"level": 1})["error"]
        assert error["code"] == "unsupported" and "data parallelism with experts" in error["what"]


@pytest.mark.slow
def test_an_engine_with_such_a_feature_names_it_and_serves_on(zygote, tiny_model, tmp_path):
    """The same on a real engine, which has one of them."""
    result = result_of(zygote.run([HERE / "refused_process.py", tiny_model, tmp_path / "store"]))
    assert "a KV connector" in result["what"]
    assert "preserve_state=False" in result["next_step"] and not result["state_changed"] and not result["asleep"]
    assert result["served_on"] and result["without_state"] and result["woken"]


def test_a_field_of_vllm_that_the_adapter_does_not_know_is_named(one):
    answers = one.begin(5)
    request = next(iter(one.core.scheduler.requests.values()))
    request.brand_new_field = 1
    said = ["unknown field brand_new_field of vLLM's Request"]
    assert unsupported_scheduler(one.core.scheduler, for_new_process=True) == said
    assert unsupported_scheduler(one.core.scheduler, for_new_process=False) == []
    with pytest.raises(errors.Unsupported, match="brand_new_field"):
        one.llm.sleep(level=1, preserve_state=True, to="disk")
    assert one.llm.sleep(level=1, preserve_state=True)  # in this process it lives on
    answers |= one.stopped()
    one.llm.wake_up()
    assert request.brand_new_field == 1
    assert one.finish(answers) == one.expected


@pytest.fixture(scope="module")
def doctored(zygote) -> dict[str, dict]:
    """What a vLLM shows that differs in what one tier alone needs, by that tier; by "" one that does not differ."""
    return result_of(zygote.run([HERE / "tiers_process.py"]))


@pytest.mark.core
@pytest.mark.parametrize(
    ("tier", "named"),
    [
        ("early_wake", "KVCacheManager.get_computed_blocks takes (self, brand_new)"),
        ("new_process", "CachedRequestState has a field brand_new"),
        ("connector", "KVConnectorBase_V1.get_block_ids_with_load_errors takes (self, brand_new)"),
        ("hibernate", "MultiConnector.get_num_new_matched_tokens takes (self, brand_new)"),
        ("fork", "PrefillStats.set takes (self, brand_new)"),
        ("other_connectors", "KVConnectorFactory.get_connector_class takes (self, brand_new)"),
        ("server", "run_server"),
    ],
)
def test_what_one_tier_alone_needs_switches_off_that_tier_alone(doctored, tier, named):
    if tier == "new_process" and gpu_path.active():
        pytest.skip(OF_V1)
    found, stock = doctored[tier], doctored[""]
    assert set(stock["tiers"].values()) == {None} and stock["said"] == []
    assert found["tiers"].keys() == stock["tiers"].keys()
    assert [each for each, why in found["tiers"].items() if why is not None] == [tier], found
    [line] = found["said"]
    assert named in found["tiers"][tier] and named in line


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.skipif(gpu_path.active(), reason=OF_V1)
def test_what_a_vllm_has_otherwise_switches_off_only_what_needs_it(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([HERE / "doctored_process.py", tiny_model, tmp_path / "store"]))
    assert result["slept"] and result["identical"] and result["served_on"]
    tiers = result["tiers"]
    assert result["parts"] == {"connector": False, "server": False}
    assert tiers["requests"] is None
    assert "CachedRequestState has a field brand_new" in tiers["new_process"]
    assert "build_connector_meta" in tiers["connector"] and "run_server" in tiers["server"]
    for refusal in (result["to_disk"], result["from_disk"]):
        assert "CachedRequestState has a field brand_new that torpor does not know" in refusal
    for text in (tiers["early_wake"], result["early"]):
        assert "BlockPool.get_new_blocks takes (self, num_blocks, also=None)" in text
    [line] = result["said"]
    assert "checkpoints and new processes" in line and "brand_new" in line
    assert "post-copy wakes" in line and "get_new_blocks" in line
