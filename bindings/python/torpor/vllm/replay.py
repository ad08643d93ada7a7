# SPDX-License-Identifier: Apache-2.0
"""Gives the recorded requests of a vLLM engine to a new one, and compares the answers token by token.

    python -m torpor.vllm.replay RECORDING [--model MODEL] [--json]

RECORDING: a recording, or a directory of events, of an engine with the option record_inputs. Each request comes before
the same step as it did, so batches are what they were. Exit code 6 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torpor.console.source import lines_of, printable
from torpor.errors import Error, InvalidArgument, Unsupported, WrongState
from torpor.vllm import recorded_inputs
from torpor.vllm.options import VARIABLES
from torpor.vllm.recorded_inputs import ABORT, ANSWER, ENGINE, ENGINE_OPTIONS, NOT_GIVEN, REQUEST, TOKENS

_DIFFERS = 6
_ASKED = {"id", "step", "priority", "salt", "sampling", "tokens"}  # of a request that can be given again
_RECORD = "record an engine with the option record_inputs, from its start"


@dataclass
class Asked:
    """A request of a recording. tokens: of the answer, as far as they follow each other; None: it had not ended."""

    id: str
    step: int
    words: dict
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] | None = None
    answered: int = 0  # how many tokens the answer had
    status: str = ""
    aborted_at: int | None = None

    @property
    def not_replayable(self) -> str | None:
        if len(self.prompt) != self.words["tokens"]:
            return "a part of its prompt is missing"
        return self.words.get("not_replayable")

    @property
    def is_cut(self) -> bool:
        return self.tokens is not None and len(self.tokens) != self.answered


@dataclass
class Recorded:
    engine: dict
    requests: list[Asked]


def read(lines: Iterable[str]) -> Recorded:
    """Read the events of one process, as `torpor events --export ndjson` prints them.

    Raises InvalidArgument if they have no inputs of vLLM, those of several engines, or others than torpor writes.
    """
    try:
        return _read(lines)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise InvalidArgument(f"the recording has inputs that torpor did not write: {problem!r}", _RECORD) from problem


def _read(lines: Iterable[str]) -> Recorded:
    kinds: dict[tuple, str] = {}
    engines: list[dict] = []
    processes: set[tuple] = set()  # that have inputs of vLLM
    requests: dict[str, Asked] = {}
    writes: dict[str, list[int]] = {}  # where further tokens of a request belong
    for line in lines:
        event = json.loads(line)
        process = (event.get("process"), event.get("pid"))
        if event["type"] == "input":
            kinds[process, event["sequence"]] = event["from"]
        if event["type"] != "given":
            continue
        if not (kind := kinds.get((process, event["input"]), "")).startswith("vllm"):
            continue
        processes.add(process)
        words = json.loads(event["words"])
        if kind == ENGINE:
            engines.append(_checked(words))
            continue
        name = words["id"]
        if kind == REQUEST and name in requests:
            writes[name] = []  # it came back, as from an image; it began before
        elif kind == REQUEST:
            if "not_replayable" not in words and (missing := _ASKED - words.keys()):
                raise KeyError(min(missing))
            requests[name] = Asked(name, int(words["step"]), words)
            writes[name] = requests[name].prompt
        elif name not in requests:
            continue  # it is older than the recording
        elif kind == TOKENS:
            if words["first"] == len(writes[name]):  # else a part is missing before it
                writes[name] += words["tokens"]
        elif kind == ABORT:
            requests[name].aborted_at = words["step"]
        elif kind == ANSWER:
            requests[name].status = words["status"]
            requests[name].answered = int(words["tokens"])
            requests[name].tokens = writes[name] = []
    if not engines:
        raise InvalidArgument("the recording has no inputs of vLLM", _RECORD)
    if len(engines) > 1 or len(processes) > 1:  # their options may be equal; their steps and ids are not one engine's
        raise InvalidArgument(
            "the recording has several engines", "name one of its files, or record an engine alone in its process"
        )
    return Recorded(engines[0], sorted(requests.values(), key=lambda each: each.step))


def _checked(engine: dict) -> dict:
    """Nothing of a recording names code that its replay would load."""
    parts = {
        "": (engine.keys(), {*ENGINE_OPTIONS, NOT_GIVEN}),
        "structured_outputs_config.": (
            engine.get("structured_outputs_config", {}).keys(), {*recorded_inputs.STRUCTURED_FIELDS}
        ),
        "speculative_config.": (engine.get("speculative_config", {}).keys(), {*recorded_inputs.SPECULATION_FIELDS}),
    }  # fmt: skip
    for part, (named, known) in parts.items():
        if unknown := named - known:
            raise ValueError(f"an engine with {part}{min(unknown)}")
    if "speculative_config" in engine:
        method = engine["speculative_config"]["method"]
        if method not in recorded_inputs.SPECULATION_METHODS:
            raise ValueError(f"an engine with speculation by {method}")
    if names := engine.get(NOT_GIVEN):
        raise InvalidArgument(
            f"the recorded engine had {', '.join(map(str, names))}, which no replay gives to another",
            "record one without",
        )
    return engine


def replay(recorded: Recorded, engine: Any) -> dict:
    """Give the requests to an LLMEngine whose core is in this process, and compare the answers."""
    from torpor.vllm.values import sampling_from_value

    given = [each for each in recorded.requests if each.not_replayable is None]
    found: dict[str, list[int]] = {}
    refused: dict[str, str] = {}
    step, begun = (given[0].step if given else 0), []
    waiting = list(given)

    def one_step() -> None:
        nonlocal step
        for output in engine.step():
            found[output.request_id] = [*found[output.request_id], *output.outputs[0].token_ids]
        step += 1

    while waiting or engine.has_unfinished_requests():
        if waiting and not engine.has_unfinished_requests():
            step = max(step, waiting[0].step)  # nothing happened until then
        while waiting and waiting[0].step <= step:
            asked = waiting.pop(0)
            prompt = {"prompt_token_ids": asked.prompt}
            if asked.words["salt"] is not None:
                prompt["cache_salt"] = asked.words["salt"]
            try:
                sampling = sampling_from_value(asked.words["sampling"])
                sampling.output_kind = type(sampling.output_kind).DELTA
                sampling.stop = []  # the recorded abort ends it; this engine's own front end would in an earlier step
                engine.add_request(asked.id, prompt, sampling, priority=asked.words["priority"])
            except ValueError as problem:
                refused[asked.id] = f"vLLM refuses it: {problem}"
                continue
            found[asked.id] = []
            begun.append(asked)
        for asked in [each for each in begun if each.aborted_at is not None and each.aborted_at <= step]:
            engine.abort_request([asked.id])
            begun.remove(asked)
        one_step()
    return _compared(recorded, [each for each in given if each.id in found], found, refused)


def _compared(recorded: Recorded, given: list[Asked], found: dict[str, list[int]], refused: dict[str, str]) -> dict:
    differing, tokens = [], 0
    for asked in given:
        before, now = asked.tokens or [], found[asked.id]
        # How many tokens came before the end of one that was aborted is chance.
        if asked.tokens is None or asked.aborted_at is not None or asked.is_cut:
            size = min(len(before), len(now))
            before, now = before[:size], now[:size]
        tokens += len(before)
        if before != now:
            at = next((i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(before), len(now)) if at is None else at
            differing.append({"id": asked.id, "at": at, "recorded": before[at : at + 8], "replayed": now[at : at + 8]})
    skipped = {each.id: each.not_replayable for each in recorded.requests if each.not_replayable is not None}
    return {
        "requests": len(given), "tokens": tokens, "equal": not differing, "differing": differing,
        "skipped": skipped | refused, "cut": {each.id: len(each.tokens or []) for each in given if each.is_cut},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torpor.vllm.replay", description=__doc__.splitlines()[0])
    parser.add_argument("recording", help="a recording or a directory of events, with record_inputs")
    parser.add_argument("--model", help="instead of the recorded one, which may lie elsewhere now")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        recorded = read(lines_of("events", options.recording, "--export", "ndjson"))
        if not any(each.not_replayable is None for each in recorded.requests):
            raise WrongState("none of the recorded requests can be given again", "record from the engine's start")
        result = replay(recorded, _engine(recorded.engine, options.model))
        if not result["requests"]:
            id_of_one, why = next(iter(result["skipped"].items()))
            raise WrongState(f"no recorded request was given again; {id_of_one}: {why}", "give another --model")
    except Error as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result) if options.json else shown(result))
    return 0 if result["equal"] else _DIFFERS


def _engine(options: dict, model: str | None):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its steps are taken here
    for name in VARIABLES:  # else this engine would record, too, or have other options than vLLM's own
        os.environ.pop(name, None)
    from vllm import LLM

    try:
        return LLM(**(options | ({} if model is None else {"model": model}))).llm_engine
    except Exception as problem:
        raise Unsupported(
            f"vLLM does not start an engine as it was recorded: {problem}",
            "use the same vLLM on a machine that has what the model needs; --model names another place of it",
        ) from problem


def shown(result: dict) -> str:
    lines = [f"{each}: not given again: {why}" for each, why in result["skipped"].items()]
    for each, size in result["cut"].items():
        lines.append(f"{each}: a part of its answer is missing, compared are its first {size} tokens")
    for each in result["differing"]:
        lines += [f"{each['id']} differs from token {each['at']} on:", f"- {each['recorded']}", f"+ {each['replayed']}"]
    equal = "each equal" if result["equal"] else f"{len(result['differing'])} differ"
    lines.append(f"{result['requests']} requests, {result['tokens']} tokens: {equal}")
    return "\n".join(map(printable, lines))


if __name__ == "__main__":
    sys.exit(main())
