# SPDX-License-Identifier: Apache-2.0
"""Front ends of engines that ask, and of others in the same process, made by hand: no engine runs."""

from types import SimpleNamespace

import pytest
from vllm import LLM
from vllm.v1.engine.llm_engine import LLMEngine

from torpor.errors import Unsupported
from torpor.vllm import front_ends, plugin
from torpor.vllm.mixed_in import mix_in_behind


@pytest.fixture(autouse=True)
def active():
    assert plugin.activate()


def test_an_llm_has_loses_and_gives_up_its_engine_as_without_torpor():
    llm = LLM.__new__(LLM)
    with pytest.raises(AttributeError, match="llm_engine"):
        _ = llm.llm_engine
    for engine in (SimpleNamespace(), None):
        llm.llm_engine = engine
        assert llm.llm_engine is engine and vars(llm) == {"llm_engine": engine}
    del llm.llm_engine
    assert vars(llm) == {} and type(llm) is LLM
    with pytest.raises(AttributeError):
        del llm.llm_engine


def engine(**additional) -> LLMEngine:
    one = LLMEngine.__new__(LLMEngine)
    one.vllm_config = SimpleNamespace(additional_config=additional)
    one.engine_core = None
    return one


@pytest.mark.parametrize("additional", [{}, {"torpor": {"enabled": False}}])
def test_the_llm_of_an_engine_that_did_not_ask_stays_vllms(additional):
    llm, plain = LLM.__new__(LLM), engine(**additional)
    llm.llm_engine = plain
    front_ends.adopt(plain, plain.vllm_config)
    assert type(llm) is LLM and type(plain) is LLMEngine


@pytest.fixture
def not_held(monkeypatch) -> LLMEngine:
    monkeypatch.setattr(LLMEngine, "sleep", lambda self, level=1, mode="abort": ("slept", level, mode))
    monkeypatch.setattr(LLMEngine, "wake_up", lambda self, tags=None: ("woken", tags))
    one = engine(torpor={})
    mix_in_behind(one, front_ends.NotHeld, LLMEngine)
    return one


def test_where_torpor_does_not_hold_the_memory_vllms_calls_are_vllms(not_held):
    assert not_held.sleep() == ("slept", 1, "abort") and not_held.sleep(2, mode="keep") == ("slept", 2, "keep")
    assert not_held.sleep(level=1, preserve_state=False, to="host", tags=None) == ("slept", 1, "abort")
    assert not_held.wake_up(["weights"], early=False) == ("woken", ["weights"])
    with pytest.raises(TypeError, match="prserve_state"):
        not_held.sleep(prserve_state=True)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda one: one.sleep(1, preserve_state=True, to="disk"), r"sleep\(preserve_state=…, to=…\)"),
        (lambda one: one.wake_up(early=True), r"wake_up\(early=…\)"),
        (lambda one: one.checkpoint(), r"checkpoint\(\)"),
        (lambda one: one.updating_weights("2"), r"updating_weights\(\)"),
        (lambda one: one.torpor.state(), r"torpor\.state\(\)"),
    ],
)
def test_and_what_is_torpors_is_refused_by_name(not_held, call, named):
    with pytest.raises(Unsupported, match=named):
        call(not_held)
    assert hasattr(not_held, "torpor")
