"""Weights that change while requests are kept: what may still be found, what has to be loaded first, and who may load."""

import pytest
import torch
from requests_of_tests import REQUESTS, SHARED, run
from safetensors.torch import load_file
from tiny_model import make_model
from vllm import SamplingParams

from torpor import errors

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def other_model(real_model, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other"), real_model, seed=8)


@pytest.fixture
def weights(one, tiny_model, other_model):
    """Loads the weights of a model as vLLM does. Those of `one` are back afterwards, and nothing is cached."""

    def load(model):
        one.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})

    _ = one.expected  # of the right weights
    yield load
    one.llm.wake_up()
    load(tiny_model)
    if one.llm.is_sleeping():
        one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()


def model_of(one) -> torch.nn.Module:
    return one.core.model_executor.driver_worker.worker.model_runner.model


def generate(one, prompt):
    [output] = one.llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.rig
def test_new_requests_do_not_find_kv_of_old_weights_that_running_ones_keep(one, weights, other_model, level):
    half_done = one.begin(12, ["prefix-a"])
    one.llm.sleep(level=level, preserve_state=True)
    if level:
        one.llm.wake_up(tags=["weights"])
    weights(other_model)
    report = one.llm.wake_up()
    assert report and "written" in report.note
    finished = run(one.engine)["prefix-a"][1][0][1]
    assert one.llm.torpor("state")["recomputed_tokens"] == 0
    before = half_done["prefix-a"][1][0][1]
    assert len(before) > 5 and finished[: len(before)] == before
    # A prompt that others have begun; then one that reaches into what the kept request computed since.
    tokenizer = one.llm.get_tokenizer()
    longer = {"prompt_token_ids": tokenizer(REQUESTS["prefix-a"][0]).input_ids + finished}
    found = [generate(one, SHARED), generate(one, longer)]
    assert found[0][0] == 0
    one.llm.reset_prefix_cache()
    clean = [generate(one, SHARED), generate(one, longer)]
    assert found == clean


@pytest.mark.parametrize("options", [{"level": 2}, {"level": 1, "weights": "reload"}])
@pytest.mark.rig
def test_requests_are_kept_while_their_weights_are_dropped(one, weights, tiny_model, options):
    answers = one.begin(10)
    report = one.llm.sleep(preserve_state=True, **options)
    assert report.preserve_state and report.kept_blocks > 0
    assert report.ledgers[0]["tags"]["weights"]["backup_host_bytes"] == 0
    woken = one.llm.wake_up()
    assert not woken and woken.reload == ["weights"] and "load" in woken.note
    answers |= one.stopped()
    assert not one.llm.wake_up() and one.engine.step() == []
    weights(tiny_model)
    assert one.llm.wake_up()
    assert one.finish(answers) == one.expected
    assert one.llm.torpor("state")["recomputed_tokens"] == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"level": 0}, {"to": "host"}),
        ({"level": 0}, {"to": "disk"}),
        ({"level": 0, "preserve_state": True}, {"to": "host"}),
        ({"tags": ["kv_cache"], "preserve_state": True}, {"tags": ["weights"]}),
        ({"tags": ["weights"], "preserve_state": True}, {"to": "host"}),
    ],
)
def test_a_deeper_sleep_frees_what_it_says(one, first, second):
    answers = one.begin(10)
    one.llm.sleep(**first)
    report = one.llm.sleep(preserve_state=True, **second)
    assert report.changed and report.freed_bytes > 0
    assert one.llm.torpor("state")["tags"] == {"weights": "detached", "kv_cache": "detached"}
    again = one.llm.sleep(level=0)
    assert not again.changed and again.note == "already asleep"
    assert not one.llm.wake_up(tags=["weights"])
    assert one.llm.wake_up(tags=["kv_cache"])
    assert one.finish(answers) == one.expected


def test_a_deeper_sleep_to_disk_holds_what_a_new_engine_needs(one):
    one.begin(10)
    one.llm.sleep(level=0)
    report = one.llm.sleep(preserve_state=True, to="disk")
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    assert one.llm.wake_up(from_checkpoint=report.checkpoint)
    assert one.finish({})["greedy"] == one.expected["greedy"]


@pytest.mark.parametrize("by_pause", [False, True])
def test_vllm_releases_its_kv_cache_memory(one, by_pause):
    names = ("greedy", "prefix-a", "long", "short")
    with pytest.raises(RuntimeError, match="pause"):
        one.llm.release_kv_cache_memory()
    answers = one.begin(20, names)
    if by_pause:
        one.core.pause_scheduler("keep", False)
        while one.core.batch_queue:
            answers |= run(one.engine, 1)
    else:
        one.llm.sleep(level=0)
    one.llm.release_kv_cache_memory()
    assert one.llm.torpor("state")["tags"] == {"weights": "attached", "kv_cache": "detached"}
    with pytest.raises(RuntimeError, match="resident"):
        one.llm.release_kv_cache_memory()
    answers |= one.stopped()
    assert one.llm.wake_up(tags=["kv_cache"])
    finished = one.finish(answers)
    for name in names:
        assert finished[name][1][0][1] == one.expected[name][1][0][1], name


@pytest.mark.parametrize("each", [True, False], ids=["one call a parameter", "one call"])
def test_trainers_load_weights_straight_into_the_model(one, weights, other_model, each):
    weights(other_model)
    one.llm.reset_prefix_cache()
    expected = generate(one, SHARED)
    trained = load_file(other_model / "model.safetensors")

    def push(tensors: dict) -> None:
        for items in [[item] for item in tensors.items()] if each else [list(tensors.items())]:
            model_of(one).load_weights(items)

    push({name: torch.zeros_like(tensor) for name, tensor in trained.items()})
    one.llm.reset_prefix_cache()
    assert generate(one, SHARED) != expected
    push(trained)
    one.llm.reset_prefix_cache()
    assert generate(one, SHARED) == expected
    one.llm.reset_prefix_cache()
    one.llm.sleep(level=2)
    with pytest.raises(errors.WrongState, match="weights are detached"):
        push(trained)
    assert one.llm.wake_up(tags=["weights"]).reload == ["weights"]
    push(trained)
    assert one.llm.wake_up(tags=["kv_cache"])
    assert generate(one, SHARED) == expected


def test_weights_that_were_written_without_a_word_are_noticed(one, weights):
    answers = one.begin(12, ["prefix-a"])
    one.llm.sleep(preserve_state=True)
    one.llm.wake_up(tags=["weights"])
    for parameter in model_of(one).parameters():
        parameter.data.mul_(1.5)
    assert "written" in one.llm.wake_up().note
    one.finish(answers)
    assert generate(one, SHARED)[0] == 0


def test_a_parameter_that_was_replaced_is_refused_by_name(one):
    answers = one.begin(10)
    norm = model_of(one).model.norm
    ours = norm.weight.data
    norm.weight.data = ours.clone()
    try:
        with pytest.raises(errors.Unsupported, match=r"model\.norm\.weight"):
            one.llm.sleep(preserve_state=True)
    finally:
        norm.weight.data = ours
    one.llm.sleep(preserve_state=True)
    one.llm.wake_up()
    assert one.finish(answers) == one.expected


def test_vllm_takes_its_sleep_mode_for_available(one, tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs(model=str(tiny_model), enable_sleep_mode=True).create_model_config().enable_sleep_mode
