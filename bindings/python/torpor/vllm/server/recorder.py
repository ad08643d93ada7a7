# SPDX-License-Identifier: Apache-2.0
"""What each request of a server was given, recorded before it is delivered; and those who wait for more of it.

The record itself is C++ (engine/delivery/delivery_log.h). This listens to vLLM's OutputProcessor, in the server's event
loop. A step is written there; an fsync, where the operator wants one before tokens are sent, is waited for in another
thread, and the outputs are delivered after it, in their order.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from torpor import _core
from torpor.errors import Error, InvalidArgument, Unsupported, WrongState
from torpor.vllm.outputs import KnownEnd, state_from_value, state_to_value
from torpor.vllm.scheduler_values import (
    new_request_to_value,
    unrecordable,
    unrestorable_request_to_value,
    unstarted_request,
)

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

tenant_of_call: ContextVar[str] = ContextVar("torpor_tenant", default="")  # set by the Gate for each call
echo_of_call: ContextVar[Echo | None] = ContextVar("torpor_echo", default=None)  # set by the Gate, as the next
call_of_client: ContextVar[int] = ContextVar("torpor_call", default=0)  # a number of its own for each call, by the Gate
# Ids of the requests whose answers the present call gives: the Gate makes the set, others fill it.
answers_of_call: ContextVar[set[str] | None] = ContextVar("torpor_answers", default=None)
# Why requests of the present call did not come into the engine: the Gate makes the list, life.Server fills it.
refusals_of_call: ContextVar[list[str] | None] = ContextVar("torpor_refusals", default=None)

_TRUE = ("true", "1", "1.0", "yes", "y", "on", "t")  # as pydantic reads a bool
# What may stand before a client's X-Request-Id in the id of its response.
RESPONSE_ID_STARTS = ("chatcmpl-", "cmpl-", "resp_", "generate-tokens-")
# What an engine that goes on with a request says of it.
TAKEN_UP = ("prompt_token_ids", "token_ids", "sampling", "arrival_time", "status")


def new_call() -> int:
    return secrets.randbits(63) | 1


class Echo:
    """Read from the body of a call whether its answer begins with its prompt (`echo` of /v1/completions)."""

    def __init__(self, receive):
        self.asked = False
        self._receive = receive
        self._body = bytearray()

    async def receive(self) -> dict:
        message = await self._receive()
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            self.asked, self._body = self.asked or _asks_for_echo(self._body), bytearray()
        return message


def _asks_for_echo(body: bytearray) -> bool:
    if b'"echo"' not in body:
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):  # vLLM says what is wrong with it
        return False
    asked = isinstance(content, dict) and str(content.get("echo")).lower() in _TRUE
    return asked and str(content.get("return_token_ids")).lower() not in _TRUE  # vLLM gives it as token ids then


class Nobody:
    """The queue of a request whose client is not connected: what goes in is in the record anyway."""

    request_id = ""

    def put(self, output) -> None:
        pass


class Held:
    """The queue of a request, whose outputs wait until they are durable."""

    def __init__(self, queue, recorder: Recorder):
        self.request_id = queue.request_id
        self._queue, self._recorder = queue, recorder

    def put(self, output) -> None:
        self._recorder.deliver_when_durable(self._queue.put, output)


class Recorder:
    def __init__(
        self,
        processor: OutputProcessor,
        answers: _core.DeliveryLog,
        sync_always: bool,
        count_failure=None,
        count_dropped=None,
    ):
        """`count_failure` is called at each write of the log that fails, `count_dropped` with the number of ended
        answers that the log has dropped since, to stay within its limit in bytes."""
        self.answers = answers
        self.failures = 0  # of the log
        self._dropped = 0
        self._count_failure, self._count_dropped = count_failure, count_dropped
        self._processor = processor
        self._sync_always = sync_always
        self._closed = False
        self.server_ends = False  # what is aborted from now on goes on in the next server
        self._over: str | None = None  # why nobody gets more of an answer here
        self._changed: dict[str, asyncio.Event] = {}
        # Requests whose prompt comes in pieces: vLLM keeps their states when they end.
        self._in_pieces: set[str] = set()
        self._undelivered: list[tuple] = []  # (function, argument), in their order
        self._syncing: asyncio.Task | None = None
        self._stock_add, self._stock_process, self._stock_abort = (
            processor.add_request,
            processor.process_outputs,
            processor.abort_requests,
        )
        processor.add_request, processor.process_outputs, processor.abort_requests = (
            self._add,
            self._process,
            self._abort,
        )
        self._stock_error, processor.propagate_error = processor.propagate_error, self._engine_died

    # --- what the processor does, recorded ----------------------------------------------------------------------------

    def _add(self, request, prompt, parent_req=None, request_index=0, queue=None) -> None:
        if (
            request.sampling_params is None or request.request_id in self._processor.request_states
        ):  # the next piece of a prompt
            return self._stock_add(request, prompt, parent_req, request_index, queue)
        response, prompt_index = split_response_id(request.external_req_id or request.request_id)
        if (why := self.used_id(response)) is not None:
            raise GracefulHTTPError(why, HTTPStatus.CONFLICT)
        if self._sync_always and queue is not None:
            queue = Held(queue, self)
        self._stock_add(request, prompt, parent_req, request_index, queue)
        state = self._processor.request_states[request.request_id]
        state.__class__ = KnownEnd
        if (given := answers_of_call.get()) is not None:
            given.add(request.request_id)
        if getattr(state, "streaming_input", False):
            self._in_pieces.add(request.request_id)
        answer: dict[str, Any] = {
            "response": response,
            "tenant": tenant_of_call.get(),
            "call": call_of_client.get(),
            "choice": prompt_index * (parent_req or request).sampling_params.n + request_index,
        }
        echoes = echo_of_call.get()
        echo = {"echo": state.prompt or ""} if echoes is not None and echoes.asked else {}
        lost = unrecordable(request)
        if not lost:
            try:
                front: dict[str, Any] = {"state": state_to_value(state)} | echo
                return self._start(answer | {"request": new_request_to_value(request), "front": front})
            except (Unsupported, InvalidArgument) as problem:  # InvalidArgument: something of it is no plain value
                lost = [problem.what]
        # It is served and recorded, but a new process must not go on with it: it would be another request.
        front = {"state": None, "lost": ", ".join(lost)} | echo
        self._write(self._start, answer | {"request": unrestorable_request_to_value(request), "front": front})

    def _start(self, answer: dict) -> None:
        try:
            self.answers.start(answer)
        except InvalidArgument:
            raise
        except Error as problem:
            self._failed(problem)
        self._see_dropped()

    def _see_dropped(self) -> None:
        if (dropped := self.answers.dropped()) == self._dropped:
            return
        if self._dropped == 0:
            logger.warning(
                "torpor: the response log is full (--torpor-response-log-bytes): it drops the oldest ended answers "
                "before --torpor-response-log-seconds is over, and answers 410 to who asks for them"
            )
        if self._count_dropped is not None:
            self._count_dropped(dropped - self._dropped)
        self._dropped = dropped

    def used_id(self, response: str) -> str | None:
        """Why the present call may not begin an answer under this id: another one is being given under it.

        When that has ended, in whatever way, the id may be used again, and names the newest answer from then on: a
        service mesh has an application send one X-Request-Id with all calls that belong together.
        """
        parts = [self.answers.position(each) for each in self.answers.find(response, tenant_of_call.get())]
        if not any(part["state"] == "running" for part in parts) or parts[0]["call"] == call_of_client.get():
            return None
        return (
            f"an answer with the id {response} is being given: take it up at /torpor/requests/{response}/stream, "
            "or ask again with another id"
        )

    def used_request_id(self, request_id: str) -> str | None:
        """The same for an X-Request-Id, before vLLM has made a response's id of it."""
        return next(
            (why for start in RESPONSE_ID_STARTS if (why := self.used_id(start + request_id)) is not None), None
        )

    def _process(self, outputs, *args, **kwargs):
        if self.server_ends:  # vLLM's engine aborts all requests when it ends
            outputs = [output for output in outputs if output.finish_reason is not FinishReason.ABORT]
        known = self._processor.request_states
        states = [state for output in outputs if (state := known.get(output.request_id)) is not None]
        rejected = [
            (state, output.error.message)
            for output in outputs
            if getattr(output, "error", None) is not None and (state := known.get(output.request_id)) is not None
        ]
        result = self._stock_process(outputs, *args, **kwargs)
        for state, why in rejected:  # by the engine core: vLLM 0.33 makes no output of such an error
            if getattr(state, "torpor_finish", None) is None:
                state.torpor_finish = ("error", why)
        self._write(self.answers.step_states, states, known, self._in_pieces, FastIncrementalDetokenizer, self.step_of)
        if self._changed:
            for state in states:
                self._wake(state.request_id)
        return result

    def _wake(self, request_id: str) -> None:
        """Who waits for more of this answer looks again."""
        if (changed := self._changed.pop(request_id, None)) is not None:
            changed.set()

    def _abort(self, request_ids, internal):
        request_ids = list(request_ids)
        before = dict(self._processor.request_states)
        aborted = self._stock_abort(request_ids, internal)
        if not self.records_aborts:
            return aborted
        self._record(
            [
                step
                for request_id in aborted
                if request_id in before and (step := self.step_of(before[request_id])) is not None
            ]
        )
        return aborted

    def _engine_died(self, problem: Exception) -> None:
        self.close()  # what vLLM does to the requests now is not their fate: the next server goes on with them
        self._stock_error(problem)

    def step_of(self, state: RequestState) -> dict | None:
        """What `state` has beyond its record. Of states that run DeliveryLog.step_states() reads the same by itself."""
        if state.detokenizer is None:
            return None
        try:
            known = self.answers.position(state.request_id)
        except Error:  # not one of ours: pooling, or from before
            return None
        if known["state"] != "running":
            return None
        finish = getattr(state, "torpor_finish", None)
        tokens = list(state.detokenizer.output_token_ids[known["tokens_end"] :])
        step = {
            "id": state.request_id,
            "at": known["tokens_end"],
            "tokens": tokens,
            "text": visible_text(state, finish is not None, known["text_end"]),
        }
        if finish is not None:
            self._in_pieces.discard(state.request_id)
            reason, stop = finish
            ended = {"abort": "aborted", "error": "failed"}.get(reason, "finished")
            step |= {"state": ended, "finish_reason": reason, "stop_reason": stop}
        return step if finish is not None or step["tokens"] or step["text"] else None

    def _record(self, steps: list[dict]) -> None:
        if not steps:
            return
        self._write(self.answers.step, steps)
        for step in steps:
            self._wake(step["id"])

    def _write(self, method, *args) -> None:
        """A log that cannot be written stops nobody: answers go on, and the state says that they are not safe."""
        try:
            method(*args)
        except Error as problem:
            self._failed(problem)

    def _failed(self, problem: Exception) -> None:
        self.failures += 1
        if self._count_failure is not None:
            self._count_failure()
        logger.error("torpor: the response log cannot be written, a crash now would lose them: %s", problem)

    # --- nothing is delivered before it is durable --------------------------------------------------------------------

    def deliver_when_durable(self, deliver, output) -> None:
        """Calls deliver(output) when all that is recorded by now is durable, and after what waits already."""
        self._undelivered.append((deliver, output))
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync_and_deliver())

    async def _sync_and_deliver(self) -> None:
        try:
            while self._undelivered:
                # process_outputs() fills the queues before its step is recorded. This runs after it, and what comes in
                # from here on waits for the next round.
                waiting, self._undelivered = self._undelivered, []
                await self.sync()
                for deliver, output in waiting:
                    try:
                        deliver(output)
                    except Exception:  # of one reader; the others get theirs
                        logger.exception("torpor: an output could not be delivered")
        finally:
            self._syncing = None

    async def sync(self) -> None:
        """Returns when all that is recorded by now is durable, or cannot be; the event loop goes on meanwhile."""
        try:
            await asyncio.to_thread(self.answers.sync)
        except Exception as problem:
            self._failed(problem)

    async def durable(self) -> None:
        """For those who read elsewhere than in their queue: waits, where nothing is sent before it is durable."""
        if self._sync_always:
            done = asyncio.get_running_loop().create_future()
            self.deliver_when_durable(_set_done, done)
            await done

    # --- those who read -----------------------------------------------------------------------------------------------

    async def more(self, request_id: str, from_token: int, from_text: int = 0) -> dict:
        """The answer from there on, as soon as there is any, or its end."""
        while True:
            part = self.answers.part(request_id, from_token, from_text)
            if part["tokens"] or part["text"] or part["state"] != "running":
                await self.durable()
                return part
            if self._over is not None:
                raise WrongState(self._over, "take up this answer from the next one")
            await self._changed.setdefault(request_id, asyncio.Event()).wait()

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._closed

    @property
    def records_aborts(self) -> bool:
        """Whether an abort ends an answer; else the next server goes on with it."""
        return not self._closed and not self.server_ends

    def close(self) -> None:
        """The process is about to end: nothing is recorded any more, and nobody waits."""
        self.answers.close()
        self._closed = True
        self.end_reading("the server ends")

    def end_reading(self, why: str) -> None:
        """Nobody waits for more of an answer, because there will be none here. What is recorded can be read."""
        self._over = why
        for changed in self._changed.values():
            changed.set()

    def end(self, request_id: str, state: str, reason: str, why: str | None) -> None:
        part = self.answers.position(request_id)
        if part["state"] == "running":
            self._record(
                [
                    {
                        "id": request_id,
                        "at": part["tokens_end"],
                        "tokens": [],
                        "text": "",
                        "state": state,
                        "finish_reason": reason,
                        "stop_reason": why,
                    }
                ]
            )

    def adopt(self, state: RequestState, answer: dict) -> None:
        """Record a request that came from elsewhere, or from a fork, and what it has been given so far.

        `answer`: response, tenant, choice and echo, and of `request` what is known of how it was made: sampling and
        arrival_time at least.
        """
        state.__class__ = KnownEnd
        known, tokens = answer["request"], list(state.prompt_token_ids or [0])
        request = unstarted_request(state.request_id, tokens, known["sampling"], known["arrival_time"]) | known
        request |= {"id": state.request_id, "prompt_token_ids": tokens, "output_token_ids": []}
        front = {"state": _without_outputs(state_to_value(state))}
        if answer.get("echo"):
            front["echo"] = answer["echo"]
        kept = {name: answer[name] for name in ("response", "tenant", "choice")}
        self._write(self._start, kept | {"request": request, "front": front})
        if (step := self.step_of(state)) is not None:
            self._record([step])

    def adopt_ended(self, answer: dict) -> None:
        """Record an answer that has ended on another server. `answer`: as sessions.ServerSide.capture() keeps it."""
        request, kept = answer["request"], {name: answer[name] for name in ("response", "tenant", "choice", "front")}
        self._write(self._start, kept | {"request": request | {"output_token_ids": []}})
        end = {name: answer[name] for name in ("text", "state", "finish_reason", "stop_reason")}
        self._record([end | {"id": request["id"], "at": 0, "tokens": request["output_token_ids"]}])

    # --- a new process goes on ----------------------------------------------------------------------------------------

    def take_up(self, restored: list[dict], outputs: dict) -> list[str]:
        """Fills the empty processor with requests that an engine goes on with. Returns ids of those it should not."""
        fronts = {item["id"]: item for item in (outputs or {}).get("requests", [])}
        unwanted = []
        for item in restored:
            answer = self.answers.get(item["id"])
            front = fronts.get(item["id"])
            if answer is None:  # of an engine without a record, or from before power was lost
                if front is None:
                    unwanted.append(item["id"])  # nobody asked for it
                    continue
                response, choice = place_of(front, outputs["parents"])
                request = unstarted_request(
                    item["id"], item["prompt_token_ids"], item["sampling"], item["arrival_time"]
                )
                self._write(
                    self.answers.start,
                    {
                        "request": request,
                        "response": response,
                        "tenant": "",
                        "choice": choice,
                        "front": {"state": _without_outputs(front)},
                    },
                )
                answer = self.answers.get(item["id"])
            state = state_from_value(
                self._processor,
                answer["front"]["state"] | {name: item[name] for name in TAKEN_UP} | {"text": None},
            )
            state.is_prefilling = not item["token_ids"]
            if not visible_text(state, False).startswith(answer["text"]):
                self.end(item["id"], "failed", "error", "this tokenizer makes another text of its tokens")
                unwanted.append(item["id"])
                continue
            state.queue = Nobody()
            self._processor.request_states[state.request_id] = state
            self._processor.external_req_ids[state.external_req_id].append(state.request_id)
            if (step := self.step_of(state)) is not None:
                self._record([step])
        return unwanted


def _set_done(future: asyncio.Future) -> None:
    if not future.done():  # its reader may be gone
        future.set_result(None)


def split_response_id(external_id: str) -> tuple[str, int]:
    """vLLM's id of a request: that of the response, and, for completions, the number of the prompt."""
    if external_id.startswith("cmpl-"):
        response, _, number = external_id.rpartition("-")
        if number.isdigit():
            return response, int(number)
    return external_id, 0


def place_of(front: dict, parents: list[dict]) -> tuple[str, int]:
    """The id of the response that a request of an engine without a record is part of, and the number of its choice."""
    response, prompt_index = split_response_id(front["external_id"])
    n = next((parent["sampling"]["n"] for parent in parents if parent["id"] == front["parent"]), 1)
    return response, prompt_index * n + front["index"]


def visible_text(state: RequestState, finished: bool, start: int = 0) -> str:
    """The text that vLLM would have delivered, from `start` on: what may yet become a stop string is held back."""
    text = getattr(state.detokenizer, "output_text", "")
    held_back = 0 if finished else getattr(state.detokenizer, "stop_buffer_length", 0)
    return text[start : max(len(text) - held_back, 0)]


def _without_outputs(front: dict) -> dict:
    return {name: value for name, value in front.items() if name not in TAKEN_UP} | {
        "logprobs": None,
        "prompt_logprobs": None,
        "cumulative_logprob": None,
    }
