# SPDX-License-Identifier: Apache-2.0
"""LLM's own calls beside requests that a wake from a checkpoint has restored: none is given another one's output. And
what vLLM counts of these requests, and which engine takes them."""

import time

import pytest
from requests_of_tests import REQUESTS, SHARED, answer, final, run
from vllm import SamplingParams
from vllm.config import MultiModalConfig, ReasoningConfig, SpeculativeConfig, StructuredOutputsConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import llm_engine
from vllm.v1.metrics.stats import IterationStats

from torpor.errors import Incompatible, WrongState
from torpor.vllm import fingerprint, outputs, runner_v1
from torpor.vllm.values import sampling_to_value

NAMES = ("greedy", "seeded", "two")
PROMPTS = ["The sea", "The sky"]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def generate(one, tokens: int) -> list:
    outputs = one.llm.generate(PROMPTS, greedy(tokens), use_tqdm=False)
    return [(output.prompt, list(output.outputs[0].token_ids)) for output in outputs]


@pytest.fixture
def restore(one):
    """Puts the engine where a new process would be: with some requests of another one, and what each had been given."""

    def restored() -> tuple[dict, str]:
        answers = one.begin(10, NAMES)
        like_the_next = str(one.llm.request_counter.counter)  # the id that LLM gives its next request
        prompt, params = REQUESTS["prefix-a"]
        one.engine.add_request(like_the_next, prompt, params)
        path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
        answers |= one.stopped()
        one.llm.wake_up()
        run(one.engine)
        one.llm.reset_prefix_cache()
        one.llm.wake_up(from_checkpoint=path)
        return answers, like_the_next

    return restored


def of_names(one, like_the_next: str) -> dict:
    expected = {name: one.expected[name] for name in NAMES} | {like_the_next: one.expected["prefix-a"]}
    return {name: [choice[1:3] for choice in choices] for name, (_, choices, _) in expected.items()}


def given(answers: dict) -> dict:
    return {name: [choice[1:3] for choice in choices] for name, (_, choices, _) in final(answers).items()}


@pytest.mark.gpu_path
@pytest.mark.parametrize("tokens", [3, 60], ids=["which end later", "which end meanwhile"])
def test_generate_returns_its_own_outputs_beside_restored_requests(one, restore, tokens):
    expected = of_names(one, "restored")
    run(one.engine)
    alone = generate(one, tokens)
    answers, like_the_next = restore()
    assert generate(one, tokens) == alone and [prompt for prompt, _ in alone] == PROMPTS
    answers |= run(one.engine)  # LLMEngine.step() gives the others, also those that have ended
    expected[like_the_next] = expected.pop("restored")
    assert given(answers) == expected


@pytest.mark.gpu_path
def test_wait_for_completion_gives_the_restored_requests_and_those_that_were_enqueued(one, restore):
    answers, like_the_next = restore()
    one.llm.enqueue(PROMPTS, greedy(3), use_tqdm=False)
    outputs = one.llm.wait_for_completion(use_tqdm=False)
    own = outputs[-2:]
    assert [output.prompt for output in own] == PROMPTS
    answers |= {output.request_id: answer(output) for output in outputs[:-2]}
    assert given(answers) == of_names(one, like_the_next)
    assert one.llm.wait_for_completion(use_tqdm=False) == []


def test_no_call_waits_for_restored_requests_of_an_engine_that_is_asleep(one, restore):
    restore()
    one.llm.sleep(level=1, preserve_state=True)
    with pytest.raises(WrongState, match="asleep"):
        one.llm.wait_for_completion(use_tqdm=False)
    one.llm.wake_up()
    assert len(one.llm.wait_for_completion(use_tqdm=False)) == len(NAMES) + 1


@pytest.fixture
def counts(one, monkeypatch) -> list[IterationStats]:
    """Of each step, what vLLM counts for its metrics."""
    seen: list[IterationStats] = []

    def counted() -> IterationStats:
        seen.append(IterationStats())
        return seen[-1]

    for each in (one.engine, one.engine.output_processor, one.core.scheduler):
        monkeypatch.setattr(each, "log_stats", True)
    monkeypatch.setattr(Scheduler, "make_stats", lambda *args, **kwargs: None)  # of its caches
    monkeypatch.setattr(llm_engine, "IterationStats", counted)
    return seen


def test_vllms_metrics_count_no_time_before_a_restored_request_came(one, counts):
    began = time.monotonic()
    one.begin(2, ("greedy", "seeded", "long", "long-seeded"))  # some have tokens, a prompt is half computed, one waits
    assert {request.num_output_tokens > 0 for request in one.core.scheduler.requests.values()} == {True, False}
    [of_greedy] = [
        s.stats for s in one.engine.output_processor.request_states.values() if s.external_req_id == "greedy"
    ]
    of_greedy.first_token_ts -= 1000.0
    of_greedy.num_preemptions = 2
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    one.llm.wake_up(from_checkpoint=path)
    counts.clear()
    answers = one.finish({})
    longest = time.monotonic() - began
    latencies = [latency for step in counts for latency in step.inter_token_latencies_iter]
    assert latencies and max(latencies) < longest and min(latencies) >= 0
    finished = {each.request_id: each for step in counts for each in step.finished_requests}
    assert finished.keys() == answers.keys()
    assert finished["greedy"].num_preemptions == 2
    assert 1000.0 < finished["greedy"].decode_time < 1000.0 + longest
    for name, each in finished.items():
        times = [each.queued_time, each.inference_time]
        times += [each.prefill_time, each.decode_time] if name != "greedy" else []
        assert all(0 <= time_ < longest for time_ in times), (name, each)
        _, [[_, tokens, *_]], _ = answers[name]
        assert each.num_generation_tokens == len(tokens)
    assert finished["long-seeded"].queued_time > 0


@pytest.mark.parametrize("older", ["stats", "past"])
def test_a_request_of_an_older_checkpoint_or_of_a_response_log_begins_in_vllms_metrics_when_it_comes(
    one, counts, older
):
    one.begin(3, ["greedy"])
    processor = one.engine.output_processor
    [state], [request] = processor.request_states.values(), one.core.scheduler.requests.values()
    value = outputs.state_to_value(state) | {
        "prompt_token_ids": request.prompt_token_ids,
        "token_ids": list(request.output_token_ids),
        "sampling": sampling_to_value(request.sampling_params),
        "arrival_time": request.arrival_time,
    }
    if older == "stats":
        del value["stats"]
    else:
        value["stats"]["past"] = {}
    before = time.monotonic()
    stats = outputs.state_from_value(processor, value).stats
    moments = (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts)
    assert all(before <= moment <= time.monotonic() for moment in moments)
    assert stats.num_generation_tokens == request.num_output_tokens > 0
    came_back = outputs.state_from_value(processor, value | {"status": "waiting"}).stats  # it waits, and ran before
    assert came_back.scheduled_ts >= before
    run(one.engine)


def test_cached_tokens_of_a_prompt_that_slept_half_computed_are_counted(one):
    def cached(sleep: bool) -> int:
        run(one.engine)
        one.llm.reset_prefix_cache()
        one.llm.generate([SHARED], greedy(1), use_tqdm=False)
        one.engine.add_request("half", SHARED + "foo bar " * 250, greedy(3))
        run(one.engine, 1)
        [request] = one.core.scheduler.requests.values()
        assert 0 < request.num_computed_tokens < request.num_prompt_tokens
        if sleep:
            path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
            one.llm.wake_up()
            run(one.engine)
            one.llm.reset_prefix_cache()
            one.llm.wake_up(from_checkpoint=path)
        found = 0
        while one.engine.has_unfinished_requests():
            found = max([found, *(output.num_cached_tokens for output in one.engine.step())])
        return found

    assert cached(sleep=True) == cached(sleep=False) > 0


@pytest.mark.parametrize(
    ("config", "field", "value", "named"),
    [
        ("model_config", "logprobs_mode", "processed_logits", "logprobs_mode"),
        (
            "structured_outputs_config",
            "reasoning_parser",
            "qwen3",
            "reasoning_parser: checkpoint has nothing, this engine has qwen3",
        ),
    ],
)
def test_an_engine_with_another_setting_restores_no_request(one, monkeypatch, config, field, value, named):
    one.begin(3, ["greedy"])
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(getattr(one.core.vllm_config, config), field, value)
        with pytest.raises(Incompatible, match=named):
            one.llm.wake_up(from_checkpoint=path)
    assert one.llm.wake_up(from_checkpoint=path).requests == 1
    run(one.engine)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"rejection_sample_method": "block"}, "block"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.25]}, "synthetic, rates [0.5,"),
        ({"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}, "[(1, 8, 3)] by batch size"),
    ],
)
def test_how_drafts_are_accepted_is_part_of_the_fingerprint(setting, named):
    def fingerprint_of(**values) -> str:
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3, prompt_lookup_min=1)
        for name, value in values.items():
            setattr(config, name, value)
        return fingerprint._speculation(config)

    assert fingerprint_of() == "ngram, 2, greedy, 1 to 3"  # as of older checkpoints
    assert named in fingerprint_of(**setting)


def with_tokens(start: int = 5) -> ReasoningConfig:
    """As vLLM makes it of a tokenizer."""
    config = ReasoningConfig()
    config._reasoning_start_token_ids, config._natural_reasoning_end_token_ids = [start], [7]
    config._reasoning_end_token_ids, config._enabled = [6, 7], True
    return config


@pytest.mark.parametrize(
    ("structured", "reasoning", "named"),
    [
        ({"reasoning_parser": "deepseek_r1"}, None, {"reasoning_parser": "deepseek_r1"}),
        ({"enable_in_reasoning": True}, None, {"structured_outputs": "enable_in_reasoning"}),
        (
            {"backend": "guidance", "disable_any_whitespace": True, "disable_additional_properties": True},
            None,
            {"structured_outputs": "disable_any_whitespace, disable_additional_properties"},
        ),
        ({}, with_tokens(), {"reasoning_tokens": "begins with [5], ends with [7], is ended with [6, 7]"}),
        ({}, with_tokens(4), {"reasoning_tokens": "begins with [4], ends with [7], is ended with [6, 7]"}),
    ],
)
def test_where_a_grammar_and_a_thinking_budget_begin_is_part_of_the_fingerprint(
    one, monkeypatch, structured, reasoning, named
):
    def fields() -> dict:
        return one.core.torpor_call("fingerprint", {})["result"]

    by_default = fields()  # as of older checkpoints
    assert by_default.keys().isdisjoint(("reasoning_parser", "structured_outputs", "reasoning_tokens"))
    config = one.core.vllm_config
    monkeypatch.setattr(config, "reasoning_config", ReasoningConfig())  # of which vLLM found no tokens
    assert fields() == by_default
    monkeypatch.setattr(config, "structured_outputs_config", StructuredOutputsConfig(**structured))
    monkeypatch.setattr(config, "reasoning_config", reasoning)
    assert fields() == by_default | named


def test_a_request_with_a_thinking_budget_fails_alone_in_an_engine_without_reasoning(one, monkeypatch):
    """As of a checkpoint that an older torpor wrote: its fingerprint does not tell."""
    expected = one.expected["greedy"]
    answers = one.begin(0, ["greedy"])
    params = greedy(30)
    params.thinking_token_budget = 9
    with monkeypatch.context() as patch:  # vLLM takes none without
        patch.setattr(one.engine.input_processor.vllm_config, "reasoning_config", with_tokens())
        one.engine.add_request("thinks", PROMPTS[0], params)
    answers |= run(one.engine, 3)
    with monkeypatch.context() as patch:
        patch.setattr(runner_v1, "_thinking_to_value", lambda runner, request_id: {"in_think": True})
        path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    answers |= one.stopped()
    one.llm.wake_up()
    run(one.engine)
    one.llm.reset_prefix_cache()
    [failed] = one.llm.wake_up(from_checkpoint=path).failed_requests
    assert "it has a thinking budget, and this engine has no reasoning_config" in failed["error"]
    found = one.finish(answers)
    assert found.pop("thinks")[1][0][3] == "error" and found == {"greedy": expected}


def test_how_images_become_inputs_is_part_of_keys_and_fingerprint(one, monkeypatch, tmp_path):
    """Of a model without such inputs they stay what they were."""
    core, model = one.core, one.core.vllm_config.model_config
    worker = core.model_executor.driver_worker.worker

    def described() -> tuple[str, dict]:
        return fingerprint.kv_namespace(worker), core.torpor_call("fingerprint", {})["result"]

    of_text = described()
    assert "multimodal" not in of_text[0] and "multimodal_inputs" not in of_text[1]
    scales = tmp_path / "scales.json"
    configuration = tmp_path / "preprocessor_config.json"
    scales.write_text("{}")
    configuration.write_text('{"do_normalize": true}')
    monkeypatch.setattr(model, "model", str(tmp_path))
    found = []

    def look(**values) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(model, "multimodal_config", MultiModalConfig(**values))
            key, fields = described()
        assert fields["multimodal_inputs"] in key and fields.keys() - of_text[1].keys() == {"multimodal_inputs"}
        found.append(fields["multimodal_inputs"])

    look()
    look(mm_processor_cache_gb=1)  # changes no input
    assert found[0] == found[1]
    look(mm_processor_kwargs={"do_normalize": False})
    look(video_pruning_rate=0.5)
    look(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    scales.write_text('{"layer": 1}')
    look(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales))
    configuration.write_text('{"do_normalize": false}')
    look()
    assert len(set(found)) == len(found) - 1


@pytest.mark.gpu_path
def test_requests_with_ids_of_the_caller_stay_out_of_what_llm_sorts_by_number(one):
    """As in the quickstart: vLLM alone would compute all of it and then raise."""
    alone = one.expected["greedy"]
    one.begin(6, ["greedy"])
    one.llm.sleep(level=1, preserve_state=True)
    one.llm.wake_up()
    assert [output.prompt for output in one.llm.generate(PROMPTS, greedy(3), use_tqdm=False)] == PROMPTS
    [output] = one.llm.wait_for_completion(use_tqdm=False)
    assert output.request_id == "greedy" and final({"greedy": answer(output)}) == {"greedy": alone}
    assert one.llm.wait_for_completion(use_tqdm=False) == []
