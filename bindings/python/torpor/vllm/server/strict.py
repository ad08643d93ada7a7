# SPDX-License-Identifier: Apache-2.0
"""Routes that refuse what they do not know: a parameter with a typing error, or a body that nobody would read.

FastAPI ignores both, so that `POST /sleep?levle=2` would sleep at level 1. To a value that a parameter cannot have
FastAPI answers in a form of its own; these routes refuse it in the form of all their errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from torpor.errors import InvalidArgument
from torpor.vllm.near_names import meant
from torpor.vllm.server.refusals import content_of

_MOST_BYTES = 4096  # of a body that is read to say what is wrong with it
_TAKES_BODY, _TAKES_ANYTHING = "torpor_takes_body", "torpor_takes_anything"  # set on endpoints

Endpoint = TypeVar("Endpoint", bound=Callable)


def takes_body(endpoint: Endpoint) -> Endpoint:
    """Mark a route that reads its body, and says itself what is wrong with it."""
    setattr(endpoint, _TAKES_BODY, True)
    return endpoint


def as_vllm_has_it(endpoint: Endpoint) -> Endpoint:
    """Mark a route of vLLM's that takes nothing and changes nothing: probes add what they like to it."""
    setattr(endpoint, _TAKES_ANYTHING, True)
    return endpoint


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if getattr(self.endpoint, _TAKES_ANYTHING, False):
            return handler
        known = [field.alias for field in self.dependant.query_params]

        async def checked(request: Request) -> Response:
            name = f"{request.method} {request.url.path}"
            try:
                for given in request.query_params:
                    if given not in known:
                        raise InvalidArgument(f"{name} has no parameter {given!r}", _known(given, known))
                if not getattr(self.endpoint, _TAKES_BODY, False) and (body := await _body(request)):
                    raise _of_body(name, request.url.path, body, known)
                return await handler(request)
            except RequestValidationError as problem:
                return JSONResponse(content_of(_of_value(name, problem, known)), 400)
            except InvalidArgument as problem:
                return JSONResponse(content_of(problem), 400)

        return checked


def _known(given: str, known: list[str]) -> str:
    return f"{meant(given, known)}It has {', '.join(known)}" if known else "It has none: leave it out"


def _of_value(name: str, problem: RequestValidationError, known: list[str]) -> InvalidArgument:
    """Return the first of FastAPI's errors as torpor's."""
    first = problem.errors()[0]
    parameter = first["loc"][1] if len(first["loc"]) > 1 else first["loc"][0]
    if first["type"] == "missing":
        return InvalidArgument(f"{name} lacks the parameter {parameter}", f"It has {', '.join(known)}")
    return InvalidArgument(f"{name}: {parameter} is {first['input']!r}", first["msg"])


def _of_body(name: str, path: str, body: bytes, known: list[str]) -> InvalidArgument:
    try:
        values = json.loads(body)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not values:
        where = f"say parameters in the URL, as {path}?{known[0]}=…" if known else "It has no parameters: leave it out"
        return InvalidArgument(f"{name} takes no body, and this one has {len(body)} bytes", where)
    given = next((each for each in values if each not in known), next(iter(values)))
    if given in known:
        next_step = f"say it in the URL: {path}?{given}={values[given]}"
    else:
        next_step = _known(given, known) + (f". Say it in the URL, as {path}?{known[0]}=…" if known else "")
    return InvalidArgument(f"{name} takes no body, and this one has {given!r}", next_step)


async def _body(request: Request) -> bytes:
    """As much of it as is needed to say what is wrong with it. An empty object says nothing, and counts as none."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            break
    return b"" if body.strip() == b"{}" else body
