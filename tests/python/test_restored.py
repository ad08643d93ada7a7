# SPDX-License-Identifier: Apache-2.0
"""LLM's own calls beside requests that a wake from a checkpoint has restored: none is given another one's output."""

import pytest
from requests_of_tests import REQUESTS, answer, final, run
from vllm import SamplingParams

from torpor.errors import WrongState

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
