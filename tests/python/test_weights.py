# SPDX-License-Identifier: Apache-2.0
"""Weights that change while requests are kept: what may still be found, what must be loaded first, and who may load."""

from types import SimpleNamespace

import gpu_path
import pytest
import torch
from conftest import tags
from requests_of_tests import REQUESTS, SHARED, run
from safetensors.torch import load_file
from tiny_model import make_model
from vllm import SamplingParams

from torpor import errors
from torpor.vllm import frontend
from torpor.vllm.weight_updates import Updates, Updating

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
    version = one.engine.get_weight_version()
    yield load
    one.llm.wake_up(tags=["weights"])
    with one.llm.updating_weights(version=version):
        load(tiny_model)
    one.llm.wake_up(kv="keep")
    run(one.engine)
    one.llm.reset_prefix_cache()


def model_of(one) -> torch.nn.Module:
    return one.core.model_executor.driver_worker.worker.model_runner.model


def generate(one, prompt):
    [output] = one.llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.gpu_path
def test_new_requests_do_not_find_kv_of_old_weights_that_running_ones_keep(one, weights, other_model, level):
    half_done = one.begin(12, ["prefix-a"])
    one.llm.sleep(level=level, preserve_state=True)
    if level:
        one.llm.wake_up(tags=["weights"])
    weights(other_model)
    with pytest.raises(errors.WrongState, match=r'KV of the old ones.*"recompute", "keep" or "abort"'):
        one.llm.wake_up()
    report = one.llm.wake_up(kv="keep")
    assert report and "written" in report.note
    finished = run(one.engine)["prefix-a"][1][0][1]
    assert one.llm.torpor.state().recomputed_tokens == 0
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


@pytest.mark.parametrize("kv", ["recompute", "keep", "abort"])
@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.gpu_path
def test_weights_are_updated_under_half_done_answers(one, weights, other_model, level, kv):
    names = ["greedy", "prefix-a"]
    half_done = one.begin(12, names)
    one.llm.sleep(level=level, preserve_state=True, weights="reload" if level else None)
    half_done |= one.stopped()
    if level:
        assert one.llm.wake_up(tags=["weights"]).reload == ["weights"]
    with one.llm.updating_weights(version="17"):
        with pytest.raises(errors.WrongState, match="under way"):
            one.llm.wake_up(kv=kv)
        weights(other_model)
    report = one.llm.wake_up(tags=["kv_cache"] if level else None, kv=kv)
    assert report and one.engine.get_weight_version() == "17"
    so_far = {name: half_done[name][1][0][1] for name in names}
    if kv == "abort":
        tokenizer = one.llm.get_tokenizer()
        assert {
            each["request_id"]: (each["prompt_token_ids"], each["token_ids"], each["weight_versions"])
            for each in report.aborted
        } == {
            name: (tokenizer(REQUESTS[name][0]).input_ids, tokens, [["default", 0, len(tokens)]])
            for name, tokens in so_far.items()
        }
        assert not one.engine.has_unfinished_requests()
        return
    recomputed = one.llm.torpor.state().recomputed_tokens
    completions = {}
    while one.engine.has_unfinished_requests():
        completions |= {output.request_id: output.outputs[0] for output in one.engine.step() if output.finished}
    for name, completion in completions.items():
        drawn, all_drawn = len(so_far[name]), len(completion.token_ids)
        assert list(completion.token_ids)[:drawn] == so_far[name] and drawn < all_drawn
        spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
        assert spans == [("default", 0, drawn), ("17", drawn, all_drawn)]
    assert (one.llm.torpor.state().recomputed_tokens > recomputed) == (kv == "recompute")


class _Failed(Exception):
    pass


def _sleep_inside(one, load):
    with one.llm.updating_weights():
        load()
        one.llm.sleep(preserve_state=True)
    one.llm.wake_up()


def _sleep_after_a_failure(one, load):
    with pytest.raises(_Failed), one.llm.updating_weights():
        load()
        raise _Failed
    one.llm.sleep(preserve_state=True)
    one.llm.wake_up(tags=["weights"])
    with one.llm.updating_weights():
        load()
    one.llm.wake_up()


def _checkpoint_inside(one, load):
    with one.llm.updating_weights():
        load()
        saved = one.llm.checkpoint()
    one.llm.reset_prefix_cache()
    one.llm.wake_up(from_checkpoint=saved.checkpoint)


@pytest.mark.parametrize("update", [_sleep_inside, _sleep_after_a_failure, _checkpoint_inside])
@pytest.mark.gpu_path
def test_prefixes_of_old_weights_are_not_found_after_a_sleep_or_checkpoint_during_their_update(
    one, weights, other_model, update
):
    generate(one, SHARED)
    assert generate(one, SHARED)[0] > 0
    update(one, lambda: weights(other_model))
    found = generate(one, SHARED)
    one.llm.reset_prefix_cache()
    assert found == generate(one, SHARED) and found[0] == 0


def test_no_request_runs_on_weights_whose_update_has_failed(one, weights, tiny_model):
    def refused(why: str) -> None:
        with pytest.raises(errors.WrongState, match=why), one.llm.updating_weights():
            raise AssertionError("not refused")

    answers = one.begin(10)
    refused("requests run on these weights")
    one.llm.sleep(level=1, preserve_state=True)
    refused("the weights are detached")
    one.llm.wake_up(tags=["weights"])
    with pytest.raises(RuntimeError, match="half-way"), one.llm.updating_weights(version="18"):
        raise RuntimeError("half-way")
    with pytest.raises(errors.WrongState, match="has failed"):
        one.llm.wake_up(kv="keep")
    with one.llm.updating_weights():
        weights(tiny_model)
    assert one.llm.wake_up(kv="keep") and one.engine.get_weight_version() == "default"
    assert one.finish(answers) == one.expected
    for arguments in ({"kv": "drop"}, {"kv": "keep", "weights_changed": True}):
        with pytest.raises(errors.InvalidArgument, match="kv"):
            one.llm.wake_up(**arguments)


@pytest.mark.gpu_path
def test_after_a_failed_update_a_wake_of_both_named_tags_is_refused_as_one_of_all(one, weights, tiny_model):
    with pytest.raises(_Failed), one.llm.updating_weights():
        raise _Failed
    one.llm.sleep(preserve_state=True)
    for named in (None, ["weights", "kv_cache"]):  # the wake brings all other tags back too
        with pytest.raises(errors.WrongState, match="has failed"):
            one.llm.wake_up(tags=named)
    assert not one.llm.wake_up(tags=["weights"])
    with pytest.raises(errors.WrongState, match="has failed"):
        one.llm.wake_up(tags=["kv_cache"])
    with one.llm.updating_weights():
        weights(tiny_model)
    assert one.llm.wake_up()


def test_after_a_failed_update_and_a_wake_of_the_kv_cache_alone_the_error_names_a_way_out(one, weights, tiny_model):
    with pytest.raises(_Failed), one.llm.updating_weights():
        raise _Failed
    one.llm.sleep(preserve_state=True)
    assert not one.llm.wake_up(tags=["kv_cache"])
    with pytest.raises(errors.WrongState, match="has failed") as refused:
        one.llm.wake_up(tags=["weights"])
    assert refused.value.next_step == (
        'call sleep(tags=["kv_cache"], preserve_state=True), then wake_up(tags=["weights"]), '
        "and load them in updating_weights()"
    )
    one.llm.sleep(tags=["kv_cache"], preserve_state=True)
    assert not one.llm.wake_up(tags=["weights"])
    with one.llm.updating_weights():
        weights(tiny_model)
    assert one.llm.wake_up()


def _updates_of(state: dict) -> tuple[Updates, SimpleNamespace]:
    """Return the updates of an engine in this state, without requests; and its scheduler."""
    scheduler = SimpleNamespace(requests={})
    core = SimpleNamespace(scheduler=scheduler)
    hooks = SimpleNamespace(core=core, scheduler=scheduler, retire_prefix=lambda: None)
    controller = SimpleNamespace(state=lambda: state, is_sleeping=lambda: state["engine"] != "awake")
    return Updates(SimpleNamespace(controller=controller, hooks=hooks)), scheduler


def test_an_update_that_is_refused_does_not_undo_the_failure_of_an_earlier_one():
    state = {"engine": "asleep", "tags": {"weights": "detached"}}
    updates, scheduler = _updates_of(state)
    state["tags"]["weights"] = "attached"
    updates.begin({"update": "a"})
    updates.end({"update": "a", "outcome": "failed"})
    state["tags"]["weights"] = "detached"
    with pytest.raises(errors.WrongState, match="the weights are detached"):
        updates.begin({"update": "b"})
    updates.end({"update": "b", "outcome": "not begun"})  # as AsyncLLM's block says then
    with pytest.raises(errors.WrongState, match="has failed"):
        updates.check_none()
    assert scheduler.torpor_updates_weights
    state["tags"]["weights"] = "attached"
    updates.begin({"update": "c"})  # on one engine, while another refuses it
    updates.end({"update": "c", "outcome": "not begun"})
    with pytest.raises(errors.WrongState, match="has failed"):
        updates.check_none()


def test_an_update_that_is_interrupted_while_it_begins_locks_nothing():
    updates, scheduler = _updates_of({"engine": "awake", "tags": {}})

    def call(_, method, options):
        if method == "end_weight_update":
            return updates.end(options)
        updates.begin(options)
        raise KeyboardInterrupt  # while the front end waits for the answer

    with pytest.raises(KeyboardInterrupt), Updating(call, SimpleNamespace(), None):
        pass
    updates.check_none()
    assert not scheduler.torpor_updates_weights
    updates.begin({"update": "another"})


def test_an_engine_that_never_slept_has_its_weights():
    updates, scheduler = _updates_of({"engine": "awake", "tags": {}})  # nobody has asked the ranks yet
    updates.begin({"update": "a"})
    assert scheduler.torpor_updates_weights


def test_an_update_does_not_end_another_one():
    updates, scheduler = _updates_of({"engine": "asleep", "tags": {"weights": "attached"}})
    updates.begin({"update": "a"})
    with pytest.raises(errors.WrongState, match="is under way"):
        updates.begin({"update": "b"})
    updates.end({"update": "b", "outcome": "not begun"})
    assert scheduler.torpor_updates_weights
    with pytest.raises(errors.WrongState, match="is under way"):
        updates.check_none()


def test_an_engine_without_requests_gets_new_weights_awake(one, weights, other_model):
    one.begin()
    one.finish({})
    generate(one, SHARED)
    assert generate(one, SHARED)[0] > 0
    with one.llm.updating_weights():
        with pytest.raises(errors.WrongState, match="an update of the weights is under way"):
            frontend.refuse_while_asleep(one.engine)  # as LLM.generate() does
        weights(other_model)
    frontend.refuse_while_asleep(one.engine)
    found = generate(one, SHARED)
    one.llm.reset_prefix_cache()
    assert found == generate(one, SHARED) and found[0] == 0


@pytest.mark.parametrize("kv", [None, "keep"])
@pytest.mark.gpu_path
def test_requests_are_kept_while_their_weights_are_dropped(one, weights, tiny_model, kv):
    answers = one.begin(10)
    one.llm.sleep(preserve_state=True)  # it has the digest of the weights
    answers |= one.stopped()
    one.llm.wake_up()
    report = one.llm.sleep(preserve_state=True, weights="reload")
    assert report.preserve_state and report.kept_blocks > 0
    assert report.ledgers[0]["tags"]["weights"]["backup_host_bytes"] == 0
    woken = one.llm.wake_up()
    assert not woken and woken.reload == ["weights"] and "load" in woken.note
    answers |= one.stopped()
    assert not one.llm.wake_up() and one.engine.step() == []
    weights(tiny_model)
    loaded = one.llm.wake_up(kv=kv)
    assert loaded and loaded.reload == [] and ("written" in loaded.note) == (kv == "keep")
    assert one.finish(answers) == one.expected
    assert one.llm.torpor.state().recomputed_tokens == 0
    assert (generate(one, SHARED)[0] > 0) == (kv is None)  # prefixes of the same weights are still found


@pytest.mark.gpu_path
def test_the_same_weights_in_vllms_own_order_are_no_new_ones(one, weights, tiny_model, other_model):
    answers = one.begin(10)
    one.llm.sleep(level=2, preserve_state=True)
    answers |= one.stopped()
    one.llm.wake_up(tags=["weights"])
    weights(other_model)
    with pytest.raises(errors.WrongState, match="KV of the old ones"):
        one.llm.wake_up(tags=["kv_cache"])
    weights(tiny_model)
    assert one.llm.wake_up(tags=["kv_cache"])
    assert one.finish(answers) == one.expected


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
@pytest.mark.gpu_path
def test_a_deeper_sleep_frees_what_it_says(one, first, second):
    answers = one.begin(10)
    one.llm.sleep(**first)
    report = one.llm.sleep(preserve_state=True, **second)
    assert report.changed and report.freed_bytes > 0
    others = "attached" if "tags" in second else "detached"
    assert one.llm.torpor.state().tags == tags("detached", "detached", others)
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
    assert one.llm.torpor.state().tags == tags("attached", "detached")
    with pytest.raises(RuntimeError, match="resident"):
        one.llm.release_kv_cache_memory()
    answers |= one.stopped()
    assert one.llm.wake_up(tags=["kv_cache"])
    finished = one.finish(answers)
    for name in names:
        assert finished[name][1][0][1] == one.expected[name][1][0][1], name


@pytest.mark.gpu_path
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


class Transfer:
    """A backend of vLLM's weight transfer that calls no load_weights(), as sparse_nccl. It counts calls."""

    def __init__(self):
        self.begun = self.received = 0

    def start_weight_update(self) -> None:
        self.begun += 1

    def update_weights(self, info) -> None:
        self.received += 1

    def finish_weight_update(self) -> None:
        pass

    def reset_weight_update_target(self) -> None:
        pass


def transfer(one) -> None:
    one.llm.collective_rpc("start_weight_update")
    one.llm.collective_rpc("update_weights", kwargs={"update_info": {}})
    one.llm.collective_rpc("finish_weight_update")


@pytest.mark.gpu_path
def test_vllms_own_weight_transfer_is_noticed_and_refused_while_weights_sleep(one, weights, monkeypatch):
    backend = Transfer()
    monkeypatch.setattr(one.core.model_executor.driver_worker.worker, "weight_transfer_engine", backend)
    answers = one.begin(12, ["prefix-a"])
    one.llm.sleep(preserve_state=True)
    with pytest.raises(errors.WrongState, match="weights are detached"):
        transfer(one)
    assert backend.begun == 0, "vLLM has replaced the parameters"
    assert one.llm.wake_up()
    one.llm.sleep(level=0)
    transfer(one)
    with pytest.raises(errors.WrongState, match="the weights were written meanwhile"):
        one.llm.wake_up()
    assert one.llm.wake_up(kv="keep")
    assert one.finish(answers)["prefix-a"] == one.expected["prefix-a"]
    one.begin(12, ["prefix-a"])
    one.llm.sleep(preserve_state=True, weights="reload")
    assert one.llm.wake_up(tags=["weights"]).reload == ["weights"]
    transfer(one)
    woken = one.llm.wake_up(tags=["kv_cache"], kv="abort")
    assert woken and not woken.reload and backend.received == 2


def test_weights_that_were_written_without_a_word_are_noticed(one, weights):
    answers = one.begin(12, ["prefix-a"])
    one.llm.sleep(preserve_state=True)
    one.llm.wake_up(tags=["weights"])
    for parameter in model_of(one).parameters():
        parameter.data.mul_(1.5)
    with pytest.raises(errors.WrongState, match="KV of the old ones"):
        one.llm.wake_up()
    assert "written" in one.llm.wake_up(kv="keep").note
    one.finish(answers)
    assert generate(one, SHARED)[0] == 0


@pytest.mark.skipif(gpu_path.active(), reason="there the new one stays where it is, and nothing has to save it")
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
