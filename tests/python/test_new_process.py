# SPDX-License-Identifier: Apache-2.0
"""The process that slept is gone; another goes on from its checkpoint."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import gpu_path
import torch
from conftest import result_of
from inspector import look
from requests_of_tests import OF_TRANSFERS, SAID, answer, final, run, said_of
from vllm import SamplingParams

from torpor.vllm import frontend, runner_v1, step_outputs
from torpor.vllm.compat import lookup

SPANS = lookup("vllm.outputs", "WeightVersionSpan")  # from vLLM 0.32 on
HERE = Path(__file__).parent
STEPS = [2, 12] if gpu_path.active() else [1, 2, 5, 12, 30, 50]


def as_json(value):
    return json.loads(json.dumps(value))


def wake_in_new_process(zygote, model, directory, paths) -> list[dict]:
    return result_of(zygote.run([HERE / "new_process.py", model, directory, *paths]))


@pytest.mark.gpu_path
@pytest.mark.core
def test_a_new_process_goes_on_with_the_very_next_token(one, zygote, tiny_model):
    expected = as_json(one.expected)
    delivered, paths, said = [], [], []
    for steps in STEPS:
        delivered.append(as_json(one.begin(steps)))
        said.append(as_json(said_of(one.core, "greedy")))
        paths.append(one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint)
        one.llm.wake_up()
    results = wake_in_new_process(zygote, tiny_model, one.directory, paths)
    assert [result["said"] for result in results] == said
    assert said[0] == as_json(msgspec.to_builtins(SAID | OF_TRANSFERS))
    for steps, answers, result in zip(STEPS, delivered, results, strict=True):
        assert final(answers | result["answers"]) == expected, f"differs after {steps} steps"
        assert result["recomputed"] == 0
        assert result["failed"] == []
        assert result["requests"] == len([a for a in expected if not answers.get(a, [False])[0]]) + (
            0 if answers.get("two", [False])[0] else 1
        )


@pytest.mark.gpu_path
def test_a_new_process_goes_on_from_a_checkpoint_that_was_written_while_the_engine_served(one, zygote, tiny_model):
    expected = as_json(one.expected)
    answers = one.begin(12)

    def serve_beyond(stage):
        served, steps = {}, 0
        while one.engine.torpor.call("continue_checkpoint") == stage:
            if steps < 4:  # beside other work the stage is long, and requests would end in it
                served |= run(one.engine, 1)
                steps += 1
        return served | run(one.engine, 3)

    one.engine.torpor.call("begin_checkpoint")
    answers |= serve_beyond("copying")
    frontend.finish(frontend.while_frozen(frontend.BlockingSide(one.engine), "take_checkpoint", {}))
    stash = step_outputs.of(one.engine).first  # what was in flight at the stop: the next step() returns it
    answers |= {output.request_id: answer(output) for output in stash}
    delivered, said = as_json(answers), as_json(said_of(one.core, "greedy"))
    answers |= serve_beyond("writing")
    report = one.engine.torpor.call("end_checkpoint")
    assert one.finish(answers) == one.expected
    _, save = [phase for phase in report["phases"] if phase["name"] == "save"]
    assert 0 < save["bytes"] < report["saved_bytes"] + report["reused_bytes"]  # the rest was not copied in the stop
    [result] = wake_in_new_process(zygote, tiny_model, one.directory, [report["checkpoint"]])
    assert final(delivered | result["answers"]) == expected and result["recomputed"] == 0
    assert result["said"] == said != {}
    assert look("verify", report["checkpoint"])["whole"]


def test_a_checkpoint_without_weights_wakes_too(one, zygote, tiny_model):
    expected = as_json(one.expected)
    answers = one.begin(15)
    for earlier in one.directory.glob("g-*"):  # with `incremental`, weights of the one before would be linked
        shutil.rmtree(earlier)
    metadata = {"run": "a", "step": 12, "loss": -0.5, "best": True, "parent": None, "tags": ["é", {"deep": [1]}]}
    report = one.llm.sleep(preserve_state=True, to="disk", weights="reload", metadata=metadata)
    assert "weights" not in report.checkpoint_parts
    assert report.metadata == metadata
    assert look("info", report.checkpoint)["metadata"] == metadata
    assert look("ls", one.directory)["checkpoints"][-1]["metadata"] == metadata
    woken = one.llm.wake_up()
    assert woken.reload == ["weights"]  # in this process the weights are gone: the caller loads them
    one.llm.collective_rpc("reload_weights")
    assert one.llm.wake_up()  # the checkpoint has their digest: they are the same
    assert one.finish(answers) == one.expected
    [result] = wake_in_new_process(zygote, tiny_model, one.directory, ["latest"])
    assert final(as_json(answers) | result["answers"]) == expected
    assert result["metadata"] == metadata


def test_requests_that_waited_for_their_weights_go_on_from_the_disk(one, zygote, tiny_model):
    answers = one.begin(10)
    one.llm.sleep(preserve_state=True)  # it has the digest of the weights
    one.llm.wake_up()
    one.llm.sleep(level=2, preserve_state=True, weights="reload")
    assert not one.llm.wake_up()
    one.llm.collective_rpc("reload_weights")
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    one.llm.wake_up()
    assert one.finish(answers) == one.expected
    [result] = wake_in_new_process(zygote, tiny_model, one.directory, [report.checkpoint])
    assert result["requests"] == report.requests > 0 and result["failed"] == []
    assert final(as_json(answers) | result["answers"]) == as_json(one.expected)


def test_an_error_while_a_wake_is_taken_back_does_not_leave_the_engine_waking(one, monkeypatch):
    one.begin(5, ["greedy"])
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()

    def fails(*_, **__):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(frontend.front_end, "restore", fails)
        patched.setattr(frontend.front_end, "forget", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            one.llm.wake_up(from_checkpoint=path)
    assert one.llm.torpor.state().engine == "awake"
    assert one.llm.wake_up(from_checkpoint=path)
    assert one.finish({})["greedy"] == one.expected["greedy"]


def test_the_version_of_the_weights_goes_with_them(one, zygote, tiny_model, monkeypatch):
    """vLLM's label of the weights, and which tokens of an answer they drew; a checkpoint from before has no label."""
    version = one.engine.get_weight_version()
    try:
        one.begin(8, ["greedy"])
        params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
        one.engine.add_request("pair", "a b a b", params)
        run(one.engine, 2)
        one.engine.set_weight_version("17")
        run(one.engine, 3)
        path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
        one.llm.wake_up()
        side, capture = one.core.torpor_side, type(one.core.torpor_side.hooks).capture

        def capture_as_before(hooks):
            state = capture(hooks)
            engine = {name: value for name, value in state["scheduler"]["engine"].items() if name != "weight_version"}
            return state | {"scheduler": state["scheduler"] | {"engine": engine}}

        monkeypatch.setattr(type(side.hooks), "capture", capture_as_before)
        old = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
        one.llm.wake_up()
    finally:
        one.engine.set_weight_version(version)
    run(one.engine)
    before, result = wake_in_new_process(zygote, tiny_model, one.directory, [old, path])
    assert before["version"] == version and before["failed"] == []
    assert result["version"] == "17"
    if SPANS is None:
        return
    # The step in flight when the label changes has it too; and answers are shorter there.
    changed, length = (9, 24) if gpu_path.active() else (10, 40)
    assert result["spans"]["greedy"] == [[[version, 0, changed], ["17", changed, length]]]
    # Of the choice that ended last.
    assert [spans[-1] for spans in result["spans"]["pair"]] == [["17", 1 if gpu_path.active() else 2, 20]]


@pytest.mark.skipif(SPANS is None, reason="this vLLM does not say which weights drew a token")
def test_the_version_of_the_weights_stays_with_an_answer_that_has_ended_beside_others():
    from vllm.outputs import CompletionOutput

    from torpor.vllm.values import completion_from_value, completion_to_value

    spans = [SPANS("a", 0, 2), SPANS("b", 2, 5)]
    output = CompletionOutput(0, "text", [1, 2], None, None, finish_reason="stop", weight_versions=spans)
    value = completion_to_value(output)
    assert completion_from_value(as_json(value)) == output
    del value["weight_versions"]  # a checkpoint from before
    assert completion_from_value(value).weight_versions is None


@pytest.mark.core
@pytest.mark.parametrize("precise", [False, True])
def test_a_seeded_request_that_was_given_more_draws_what_vllm_drew_for_it(one, precise):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler, words = TopKTopPSampler(use_fp64_gumbel=precise), 97
    theirs, ours = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(3):
        sampler.forward_cpu(torch.randn(1, words), {0: theirs}, None, None)
    batch = SimpleNamespace(vocab_size=words)
    runner_v1._draw(SimpleNamespace(sampler=SimpleNamespace(topk_topp_sampler=sampler), input_batch=batch), ours, 3)
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("count", [1, 256])
def test_the_inspector_finds_a_checkpoint_of_so_many_requests_whole(one, count):
    one.llm.wake_up()
    run(one.engine)  # what another test left
    for number in range(count):
        one.engine.add_request(
            f"r{number}", f"{number} is a number that", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        )
    run(one.engine, 37)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    found = look("verify", report.checkpoint)
    assert found["whole"] and found["hashes_not_checked"] is None and found["checked"]["hashes"] > 0
    requests = look("requests", report.checkpoint)["requests"]
    assert len(requests) == count and sum(r["queue"] == "running" for r in requests) == min(count, 16)
    one.llm.wake_up()
    run(one.engine)


@pytest.mark.slow
@pytest.mark.skipif(gpu_path.active(), reason="the shares of memory are those of the CPU path's model")
def test_a_new_engine_may_have_more_or_fewer_blocks(zygote, tiny_model, tmp_path):
    """Each is sized as vLLM sizes it, by the share of memory or by number."""
    process = [HERE / "kv_sizes_process.py", tiny_model, tmp_path / "store"]
    result = result_of(zygote.run(process))
    held = len(result["held"])
    more, fewer = result["more"], result["fewer"]
    assert fewer["blocks"] < result["saved"] < more["blocks"]
    for woken in (more, fewer):
        assert woken["same"] and woken["recomputed"] == 0 and woken["preempted"] == []
        assert woken["whole"]
    assert fewer["written"] == 0  # the checkpoint that it wakes from is the newest: its blocks are linked
    assert more["dropped"] == 0 and more["note"] == "" and more["largest"] == max(result["held"])
    assert fewer["dropped"] == result["cached"] - result["cached"] // 2 > 0
    assert max(result["held"]) >= fewer["blocks"] > fewer["largest"]
    assert "had no room" in fewer["note"]
    what, how = result["too few"]
    assert f"hold {held} KV blocks, and this engine has {held}" in what
    assert f"with {held + 1} KV blocks or more" in how and f"--num-gpu-blocks-override {held + 1}" in how
