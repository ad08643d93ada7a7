"""What cannot be preserved yet is refused by its name before anything is touched, and the engine serves on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import result_of
from requests_of_tests import run
from vllm import SamplingParams

from torpor import errors
from torpor.vllm.engine_core import torpor_call
from torpor.vllm.support import unsupported_engine, unsupported_scheduler

HERE = Path(__file__).parent


def test_a_request_with_such_a_feature_is_named(one):
    answers = one.begin(5)
    one.engine.add_request(
        "special", "a b a b", SamplingParams(max_tokens=30, temperature=0, extra_args={"x": object()})
    )
    answers |= run(one.engine, 2)
    with pytest.raises(errors.Unsupported, match="extra_args") as caught:
        one.llm.sleep(level=1, preserve_state=True)
    assert "preserve_state=False" in caught.value.next_step and not caught.value.state_changed
    assert not one.llm.is_sleeping()
    assert one.finish(answers)["greedy"] == one.expected["greedy"]


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
        ("parallel_config.data_parallel_size", 2, "data parallelism with experts"),
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


def test_ranks_that_compute_for_each_other_are_not_stopped(one):
    """With experts: whatever would have one of them stand still is refused before anything is touched."""
    config = changed(one.core.vllm_config, "parallel_config.data_parallel_size", 2)
    core = SimpleNamespace(vllm_config=config)
    for method in ("freeze", "drain", "sleep", "checkpoint", "wake_up"):
        error = torpor_call(core, method, {"level": 1})["error"]
        assert error["code"] == "unsupported" and "data parallelism with experts" in error["what"]


@pytest.mark.slow
def test_an_engine_with_such_a_feature_names_it_and_serves_on(zygote, tiny_model, tmp_path):
    """The same on a real engine, which has one of them."""
    result = result_of(zygote.run([HERE / "refused_process.py", tiny_model, tmp_path / "store"], timeout=300))
    assert "a KV connector" in result["what"]
    assert "preserve_state=False" in result["next_step"] and not result["state_changed"] and not result["asleep"]
    assert result["served_on"] and result["without_state"] and result["woken"]


def test_a_field_of_vllm_that_the_adapter_does_not_know_is_named(one):
    answers = one.begin(5)
    request = next(iter(one.core.scheduler.requests.values()))
    request.brand_new_field = 1
    assert unsupported_scheduler(one.core.scheduler) == ["unknown field brand_new_field of vLLM's Request"]
    with pytest.raises(errors.Unsupported, match="brand_new_field"):
        one.llm.sleep(level=1, preserve_state=True)
    del request.brand_new_field
    assert one.finish(answers) == one.expected
