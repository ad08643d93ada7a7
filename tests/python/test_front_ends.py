# SPDX-License-Identifier: Apache-2.0
"""Front ends of engines that ask, and of others in the same process, made by hand: no engine runs."""

import asyncio
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio
from vllm import LLM
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources, MPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

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


@pytest.fixture
def client_of(monkeypatch):
    """Clients as vLLM makes them, over sockets that lead to no engine core. What it sends is sent by `say`."""
    made, context = [], zmq.Context()

    def init(self, asyncio_mode, **_) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, enable_fault_tolerance=False)
        )
        self.ctx = zmq.asyncio.Context(context) if asyncio_mode else context
        self.resources = BackgroundResources(ctx=context)
        self._finalizer = weakref.finalize(self, self.resources)
        self.input_socket = self.resources.input_socket = self.ctx.socket(zmq.ROUTER)
        self.resources.output_socket = self.ctx.socket(zmq.PULL)
        self.resources.output_socket.bind("inproc://outputs")
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.core_engine, self.utility_results = b"0", {}
        made.append(self)

    monkeypatch.setattr(MPClient, "__init__", init)
    core = context.socket(zmq.PUSH)

    def make(kind):
        client = kind(vllm_config=None, executor_class=None, log_stats=False)
        front_ends.adopt_client(client)
        core.connect("inproc://outputs")
        return client, core.send

    yield make
    core.close(linger=0)
    for client in made:
        client.shutdown()


def test_a_call_ends_when_the_engine_core_says_that_it_ends(client_of):
    client, say = client_of(SyncMPClient)
    ended = []

    def call() -> None:
        try:
            client.call_utility("torpor_call", "sleep", {})
        except BaseException as problem:
            ended.append(problem)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    while not client.utility_results:
        time.sleep(0.001)
    say(EngineCoreProc.ENGINE_CORE_DEAD)
    caller.join(10)
    assert [type(problem) for problem in ended] == [EngineDeadError]
    with pytest.raises(EngineDeadError):
        client.get_output()


def test_an_awaited_call_ends_when_the_engine_core_says_that_it_ends(client_of):
    async def scene() -> None:
        client, say = client_of(AsyncMPClient)
        call = asyncio.create_task(client.call_utility_async("torpor_call", "sleep", {}))
        while not client.utility_results:
            await asyncio.sleep(0)
        say(EngineCoreProc.ENGINE_CORE_DEAD)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(call, 10)
        with pytest.raises(EngineDeadError):
            await client.get_output_async()

    asyncio.run(scene())
