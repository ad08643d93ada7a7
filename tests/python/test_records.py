# SPDX-License-Identifier: Apache-2.0
"""The server's recorder over vLLM's own OutputProcessor, without an engine: what it records and refuses, what waits."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from requests_of_tests import OF_TRANSFERS, SAID
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.counter import AtomicCounter
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from torpor import _core
from torpor.errors import FileError, Incompatible, Unsupported
from torpor.vllm import multimodal, plugin
from torpor.vllm.scheduler_values import request_from_value, unrecordable
from torpor.vllm.server.life import Server
from torpor.vllm.server.metrics import Metrics
from torpor.vllm.server.recorder import Echo, Recorder, call_of_client, echo_of_call, new_call, tenant_of_call

plugin.activate()  # as for an engine that asks


@pytest.fixture(scope="module")
def tokenizer(real_model):
    return get_tokenizer(str(real_model))


def new_request(number=0, response="chatcmpl-r", **fields) -> EngineCoreRequest:
    defaults = {
        "request_id": f"{response}-{number:08x}", "external_req_id": response, "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=20, output_kind=RequestOutputKind.DELTA), "pooling_params": None,
        "mm_features": None, "arrival_time": 1.0, "lora_request": None, "cache_salt": None, "data_parallel_rank": None,
    }  # fmt: skip
    return EngineCoreRequest(**(defaults | fields))


class Scene:
    """A recorder; `answers` may stand in for the record."""

    def __init__(self, tokenizer, directory=None, sync_always=False, wrap=lambda answers: answers):
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        options = {"engine": {"model": "a"}} | ({"directory": str(directory)} if directory else {})
        self.answers = wrap(_core.DeliveryLog(options))
        self.counted = 0
        self.recorder = Recorder(self.processor, self.answers, sync_always, self._count)

    def _count(self):
        self.counted += 1

    def add(self, request, call=None, **options):
        call_of_client.set(call or new_call())
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        self.processor.add_request(request, "prompt", queue=collector, **options)
        return collector

    def give(self, request, *tokens, finish=None):
        self.processor.process_outputs([EngineCoreOutput(request.request_id, list(tokens), finish_reason=finish)])


# Whatever a record cannot carry, and the words for it. With any of these a new process would go on as another request.
LOST = {
    "pooling": {"pooling_params": PoolingParams()},
    "its data parallel rank": {"data_parallel_rank": 1},
    "its prompt that comes in pieces": {"resumable": True},
    "options of a reasoning parser": {"reasoning_parser_kwargs": {"a": object()}},
    "its transfer of KV": {"abort_immediately": True},
    "its kv_hints": {"kv_hints": SimpleNamespace()},
    "sampling parameter extra_args": {"sampling_params": SamplingParams(max_tokens=20, extra_args={"x": {1, 2}})},
}  # fmt: skip


@pytest.mark.parametrize("words", LOST)
def test_a_request_that_a_record_cannot_carry_is_not_begun_again_as_another(words, tokenizer, tmp_path):
    scene = Scene(tokenizer, tmp_path / "answers")
    request = new_request(**LOST[words])
    scene.add(request)
    assert scene.counted == 0
    kept = scene.answers.get(request.request_id)
    assert kept["front"]["state"] is None and words in kept["front"]["lost"]
    scene.give(request, 5)  # it is served and recorded all the same
    assert scene.answers.get(request.request_id)["request"]["output_token_ids"].tolist() == [5]


def test_what_is_no_plain_value_is_recorded_as_lost(tokenizer):
    scene = Scene(tokenizer)
    request = new_request()
    request.sampling_params.bad_words = [object()]
    scene.add(request)
    assert scene.counted == 0
    assert scene.answers.get(request.request_id)["front"]["state"] is None


def test_what_a_record_carries_comes_back(tokenizer):
    scene = Scene(tokenizer)
    params = SamplingParams(max_tokens=20, extra_args=OF_TRANSFERS)
    request = new_request(cache_salt="salt", priority=3, session_id="s", sampling_params=params, **SAID)
    scene.add(request)
    kept = scene.answers.get(request.request_id)
    assert kept["front"]["state"] is not None
    assert (kept["request"]["cache_salt"], kept["request"]["priority"], kept["request"]["engine"]["session_id"]) == (
        "salt",
        3,
        "s",
    )
    made = request_from_value(kept["request"], None)
    assert {name: getattr(made, name) for name in (*SAID, *OF_TRANSFERS)} == SAID | OF_TRANSFERS


def test_what_its_grammar_and_its_adapter_are_comes_back(tokenizer):
    grammar = StructuredOutputsParams(json={"type": "object", "maxProperties": 2})
    grammar._backend = "xgrammar"
    scene = Scene(tokenizer)
    request = new_request(
        sampling_params=SamplingParams(max_tokens=20, structured_outputs=grammar),
        lora_request=LoRARequest("adapter", 2, "/adapter"),
        reasoning_ended=False,
        reasoning_parser_kwargs={"chat_template_kwargs": {"enable_thinking": True}},
    )
    scene.add(request)
    made = request_from_value(scene.answers.get(request.request_id)["request"], None)
    assert made.lora_request.lora_path == "/adapter" and made.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    structured = made.structured_output_request
    assert structured.structured_output_key[1] == json.dumps(grammar.json) and structured.params._backend == "xgrammar"
    assert (structured.reasoning_ended, structured.reasoning_parser_kwargs) == (False, request.reasoning_parser_kwargs)


def test_an_adapter_that_is_loaded_later_gets_another_number_than_those_in_use(tokenizer):
    scene = Scene(tokenizer)
    scene.add(new_request(lora_request=LoRARequest("adapter", 5, "/adapter")))
    models = SimpleNamespace(lora_id_counter=AtomicCounter(2))
    server = SimpleNamespace(recorder=scene.recorder, app_state=SimpleNamespace(openai_serving_models=models))
    Server._reserve_adapter_numbers(server)
    assert models.lora_id_counter.inc() == 6
    Server._reserve_adapter_numbers(server)
    assert models.lora_id_counter.inc() == 7


def test_images_are_not_read_where_vllm_would_unpickle(monkeypatch):
    assert multimodal.from_value(multimodal.to_value([])) == []
    monkeypatch.setattr(multimodal.envs, "VLLM_ALLOW_INSECURE_SERIALIZATION", True, raising=False)
    with pytest.raises(Unsupported, match="unpickle"):
        multimodal.from_value(b"\x90")
    assert "unpickle" in multimodal.unsupported([SimpleNamespace(data=b"")])[0]


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("images", {"mm_features": [SimpleNamespace(modality="image")]}),
        ("embeddings", {"prompt_embeds": torch.zeros(3, 8), "prompt_token_ids": None}),
    ],
)
def test_what_prompts_have_besides_tokens_is_not_in_the_record_and_a_checkpoint_must_have_it(tokenizer, what, fields):
    scene = Scene(tokenizer)
    request = new_request(**fields)
    scene.add(request)
    kept = scene.answers.get(request.request_id)
    assert kept["front"]["state"] is not None
    with pytest.raises(Incompatible, match=f"its {what} are in no checkpoint"):
        request_from_value(kept["request"], None)


def test_every_field_of_vllms_requests_is_decided_upon():
    """A field that a newer vLLM adds is refused by name as soon as a request uses it; here it is noticed before."""
    from torpor.vllm import scheduler_values as values

    known = values._CARRIED_NEW_FIELDS | values._IRRELEVANT_NEW_FIELDS | set(values._LOST_NEW_FIELDS)
    assert set(EngineCoreRequest.__struct_fields__) == known
    assert unrecordable(new_request()) == []


def test_an_id_is_of_one_call_until_its_answer_has_ended(tokenizer):
    scene = Scene(tokenizer)
    first, second, third, fourth = (new_request(number) for number in (1, 2, 3, 4))
    scene.add(first)
    scene.give(first, 4)
    refusal = "chatcmpl-r is being given.*/torpor/requests/chatcmpl-r/stream"
    with pytest.raises(GracefulHTTPError, match=refusal) as refused:
        scene.add(second)
    assert refused.value.http_status == 409
    assert scene.recorder.used_request_id("r") is not None and scene.recorder.used_request_id("other") is None
    assert second.request_id not in scene.processor.request_states
    tenant_of_call.set("another tenant")
    assert scene.recorder.used_request_id("r") is None
    tenant_of_call.set("")

    scene.give(first, 5, finish=FinishReason.STOP)
    assert scene.recorder.used_request_id("r") is None
    scene.add(second)  # the id names it from now on; who reads the first one already has its rest
    assert scene.answers.find("chatcmpl-r", "") == [second.request_id]
    assert scene.answers.part(first.request_id, 1)["tokens"] == [5]
    scene.give(second, 6)
    assert scene.recorder.used_request_id("r") is None  # of its own call
    call_of_client.set(new_call())
    assert scene.recorder.used_request_id("r") is not None
    scene.processor.abort_requests([second.request_id], internal=True)
    scene.add(third)
    scene.recorder.end(third.request_id, "failed", "error", "why")
    scene.processor.abort_requests([third.request_id], internal=True)
    scene.add(fourth)
    assert scene.answers.find("chatcmpl-r", "") == [fourth.request_id]


def reject(scene: Scene, request: EngineCoreRequest, why: str) -> None:
    """The engine core rejects the request, as vLLM 0.33 says it: by an error, without a last output."""
    if "error" in EngineCoreOutput.__struct_fields__:
        from vllm.outputs import RequestError

        error = RequestError(code="engine_paused", message=why, retryable=True)
        output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error)
    else:
        error = SimpleNamespace(message=why)
        output = SimpleNamespace(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error)
        scene.recorder._stock_process = lambda outputs: scene.processor.request_states.pop(request.request_id)
    scene.processor.process_outputs([output])
    assert request.request_id not in scene.processor.request_states


@pytest.mark.core
def test_a_request_that_the_engine_core_rejects_has_failed_and_its_id_is_free(tokenizer):
    scene = Scene(tokenizer)
    request = new_request()
    scene.add(request)
    call_of_client.set(new_call())
    assert scene.recorder.used_request_id("r") is not None
    reject(scene, request, "the engine is paused")
    part = scene.answers.part(request.request_id, 0)
    assert (part["state"], part["finish_reason"], part["stop_reason"]) == ("failed", "error", "the engine is paused")
    assert scene.recorder.used_request_id("r") is None


def test_choices_of_two_calls_are_not_mixed(tokenizer):
    scene = Scene(tokenizer)
    call, both = new_call(), SamplingParams(n=2, max_tokens=20)
    parent = ParentRequest(new_request(0, sampling_params=both))
    children = [new_request(number, sampling_params=both) for number in (1, 2)]
    for index, child in enumerate(children):
        scene.add(child, call, parent_req=parent, request_index=index)
    assert scene.answers.find("chatcmpl-r", "") == [child.request_id for child in children]
    scene.processor.abort_requests([child.request_id for child in children], internal=True)
    again = new_request(3)
    scene.add(again)
    assert scene.answers.find("chatcmpl-r", "") == [again.request_id]


def test_a_prompt_that_is_given_before_its_answer_is_in_the_record(tokenizer):
    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "prompt", "echo": true}'}

    async def scene_of_echo():
        scene, echo = Scene(tokenizer), Echo(receive)
        await echo.receive()
        echo_of_call.set(echo)
        plain, lost = new_request(1), new_request(2, "chatcmpl-2", data_parallel_rank=1)
        for request in (plain, lost):
            scene.add(request)
            assert scene.answers.get(request.request_id)["front"]["echo"] == "prompt"
        echo.asked = False
        scene.add(other := new_request(3, "chatcmpl-3"))
        assert "echo" not in scene.answers.get(other.request_id)["front"]

    asyncio.run(scene_of_echo())


class SlowSync:
    """A record whose sync waits, or fails, as the test wants."""

    def __init__(self, answers):
        self.answers, self.synced, self.may_end, self.problem = answers, 0, None, None

    def __getattr__(self, name):
        return getattr(self.answers, name)

    def sync(self):
        asyncio.run_coroutine_threadsafe(self.may_end.wait(), self.loop).result(600)
        self.synced += 1
        if self.problem is not None:
            raise self.problem


def test_with_log_sync_always_nothing_is_delivered_before_it_is_durable_and_the_loop_goes_on(tokenizer):
    async def scene_of_outputs():
        scene = Scene(tokenizer, sync_always=True, wrap=SlowSync)
        disk = scene.answers
        disk.loop, disk.may_end = asyncio.get_running_loop(), asyncio.Event()
        first, second = new_request(1, "chatcmpl-1"), new_request(2, "chatcmpl-2")
        queues = [scene.add(first), scene.add(second)]
        scene.give(first, 5)
        scene.give(second, 6)
        scene.give(first, 7)
        reader = asyncio.create_task(scene.recorder.more(first.request_id, 0))
        turns = 0
        while turns < 20:  # the loop is not blocked by the disk, and nothing comes before it
            await asyncio.sleep(0)
            turns += 1
        assert disk.synced == 0 and not reader.done()
        assert all(queue.get_nowait() is None for queue in queues)
        disk.may_end.set()
        outputs = [await asyncio.wait_for(queue.get(), 600) for queue in queues]
        assert list(outputs[0].outputs[0].token_ids) == [5, 7] and list(outputs[1].outputs[0].token_ids) == [6]
        assert (await asyncio.wait_for(reader, 600))["tokens"] == [5, 7]
        assert disk.synced >= 1

        disk.problem = FileError("the disk is broken")
        scene.give(first, 8, finish=FinishReason.STOP)  # a log that cannot be written stops nobody
        assert list((await asyncio.wait_for(queues[0].get(), 600)).outputs[0].token_ids) == [8]
        assert scene.counted == scene.recorder.failures == 1

    asyncio.run(asyncio.wait_for(scene_of_outputs(), 600))


def test_failures_of_the_log_are_a_counter():
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics = Metrics("model", registry)
    metrics.log_failures.inc()
    labels = {"model_name": "model", "engine": "0"}
    assert registry.get_sample_value("torpor_response_log_failures_total", labels) == 1


def test_a_failed_write_is_counted(tokenizer, caplog):
    class Full:
        def __init__(self, answers):
            self.answers = answers

        def __getattr__(self, name):
            return getattr(self.answers, name)

        def step_states(self, *given):
            self.answers.step_states(*given)
            raise FileError("the disk is full")

    scene = Scene(tokenizer, wrap=Full)
    request = new_request()
    queue = scene.add(request)
    with caplog.at_level(logging.ERROR):
        scene.give(request, 5)
    assert scene.counted == 1 and queue.get_nowait() is not None
