# SPDX-License-Identifier: Apache-2.0
"""Structured output: a grammar cannot be copied. It is compiled again, and given the tokens that it has taken."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from torpor.errors import Incompatible


def params_to_value(params: StructuredOutputsParams) -> dict:
    """All fields by name. A schema is kept as the text that vLLM gives to the grammar's compiler."""
    value = {f.name: getattr(params, f.name) for f in fields(params)}
    if isinstance(value["json"], dict):
        value["json"] = json.dumps(value["json"])
    return value


def params_from_value(value: dict) -> StructuredOutputsParams:
    settled = {f.name for f in fields(StructuredOutputsParams) if not f.init}
    params = StructuredOutputsParams(**{name: item for name, item in value.items() if name not in settled})
    for name in settled & value.keys():
        setattr(params, name, value[name])
    return params


def new_to_value(request: EngineCoreRequest) -> dict | None:
    """What a request brings besides its parameters: where its reasoning stands, and options of the reasoning parser."""
    if request.sampling_params.structured_outputs is None:
        return None
    return _to_value(True, request.reasoning_ended, request.reasoning_parser_kwargs)


def to_value(request: Request, compiling: bool) -> dict | None:
    """The same of a request in the engine core. Its tokens tell the rest."""
    if (structured := request.structured_output_request) is None:
        return None
    began = getattr(structured, "torpor_reasoning_ended", structured.reasoning_ended)
    return _to_value(compiling, began, structured.reasoning_parser_kwargs)


def _to_value(compiling: bool, reasoning_ended: bool | None, parser_options: dict | None) -> dict:
    return {
        "compiling": compiling,
        "reasoning_ended": reasoning_ended,
        "parser_options": None if parser_options is None else json.dumps(parser_options),
    }


def from_value(value: dict | None) -> dict:
    """Arguments of Request."""
    if value is None:
        return {}
    options = value["parser_options"]
    return {
        "reasoning_ended": value["reasoning_ended"],
        "reasoning_parser_kwargs": None if options is None else json.loads(options),
    }


def remember_beginning(request: Request) -> None:
    """Called before a request's first step: vLLM changes in place, in a step, what to_value() needs. Only the first
    call counts."""
    structured = request.structured_output_request
    if structured is not None and not hasattr(structured, "torpor_reasoning_ended"):
        structured.torpor_reasoning_ended = structured.reasoning_ended


@dataclass
class _Replayed:
    """What StructuredOutputManager.accept_tokens() reads of a request, at a moment that has passed."""

    request_id: str
    prompt_token_ids: list[int] | None
    structured_output_request: StructuredOutputRequest
    all_token_ids: list[int]
    use_structured_output: bool = field(default=True, init=False)


def replay(manager: StructuredOutputManager, request: Request) -> None:
    """Waits for the grammar, and gives it the output tokens one by one, as the reasoning parser saw them.

    Raises what the compiler did, or Incompatible when the grammar does not take them.
    """
    structured = request.structured_output_request
    if not structured.is_grammar_ready:
        structured.grammar = structured._grammar.result()
    if isinstance(structured.grammar, Exception):
        raise structured.grammar
    of_prompt = list(request.all_token_ids[: request.num_prompt_tokens])  # zeros where it has embeddings
    past = _Replayed(request.request_id, request.prompt_token_ids, structured, of_prompt)
    for token in request.output_token_ids:
        past.all_token_ids.append(token)
        if not manager.accept_tokens(past, [token]):
            raise Incompatible(
                f"request {request.request_id}: its grammar does not take its tokens in this engine",
                "use the versions of vLLM and of its grammar compiler that it slept with",
            )
