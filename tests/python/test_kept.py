# SPDX-License-Identifier: Apache-2.0
"""What is kept of a request: as long as it is what it was made from, and of no other request."""

from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from torpor.vllm import kept


def request(prompt, params=None):
    return SimpleNamespace(request_id="one", prompt_token_ids=prompt, sampling_params=params or SamplingParams())


def test_a_prompt_is_read_once():
    one = request([1, 2, 3])
    first = kept.prompt(one, "i")
    assert list(first) == [1, 2, 3]
    assert kept.prompt(one, "i") is first
    assert kept.prompt(one, "q").typecode == "q"


def test_a_prompt_that_is_another_one_is_read_again():
    one = request([1, 2, 3])
    kept.prompt(one, "i")
    one.prompt_token_ids = [4, 5, 6]
    assert list(kept.prompt(one, "i")) == [4, 5, 6]
    one.prompt_token_ids.append(7)  # it comes in pieces
    assert list(kept.prompt(one, "i")) == [4, 5, 6, 7]


def test_another_request_of_the_same_id_has_nothing_of_the_first():
    kept.prompt(request([1]), "i")
    kept.sampling(request([1], SamplingParams(temperature=0.5)))
    other = request([2], SamplingParams(temperature=0.25))
    assert list(kept.prompt(other, "i")) == [2]
    assert kept.sampling(other)["temperature"] == 0.25


def test_other_parameters_are_read_again():
    one = request([1], SamplingParams(temperature=0.5))
    first = kept.sampling(one)
    assert kept.sampling(one) is first
    one.sampling_params = SamplingParams(temperature=0.25)
    assert kept.sampling(one)["temperature"] == 0.25


def test_a_prompt_without_tokens_is_as_long_as_its_embeddings():
    one = SimpleNamespace(prompt_token_ids=None, prompt_embeds=[0.0] * 3)
    assert list(kept.prompt(one, "i")) == [0, 0, 0]


def test_anew_nothing_is_used_and_nothing_is_kept():
    one = request([1, 2])
    first = kept.prompt(one, "i")
    with kept.made_anew():
        assert kept.prompt(one, "i") is not first
        assert kept.prompt(one, "i") == first
    assert kept.prompt(one, "i") is first


@pytest.mark.parametrize(
    "other, place",
    [({"a": [1, {"b": 2}]}, None), ({"a": [1, {"b": 3}]}, "state.a[1].b: 2 and 3"), ({"a": [1]}, "state.a: ")],
)
def test_a_difference_is_said_by_its_place(other, place):
    found = kept.difference({"a": [1, {"b": 2}]}, other)
    assert found is None if place is None else found.startswith(place)
