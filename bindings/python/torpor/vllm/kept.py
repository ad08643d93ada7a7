# SPDX-License-Identifier: Apache-2.0
"""What of a request stays as it is, as values made once, so that an engine stands still only for the rest.

Kept with vLLM's object of the request: another request of the same id has none of it. Beside a value is what it was
made from: it holds as long as the request has that very object.
"""

from __future__ import annotations

import os
from array import array
from contextlib import contextmanager

from torpor.vllm.inputs import token_ids
from torpor.vllm.values import sampling_to_value

ATTRIBUTE = "torpor_kept"  # of a request
CHECKED = os.environ.get("TORPOR_CHECK_CAPTURE") == "1"  # in tests: each capture is compared with one made anew

_anew = False


@contextmanager
def made_anew(really: bool = True):
    """Nothing that was kept is used, and nothing is kept."""
    global _anew
    before, _anew = _anew, really
    try:
        yield
    finally:
        _anew = before


def prompt(request, typecode: str) -> array:
    """The tokens of the prompt of any kind of request."""
    source = request.prompt_token_ids
    if source is None:
        return array(typecode, token_ids(request))
    made = _kept(request, typecode, source, lambda: array(typecode, source))
    if len(made) != len(source):  # it came in pieces
        del vars(request)[ATTRIBUTE]
        made = _kept(request, typecode, source, lambda: array(typecode, source))
    return made


def sampling(request) -> dict:
    """Its sampling parameters; vLLM changes none of a request that has begun."""
    return _kept(request, "sampling", request.sampling_params, lambda: sampling_to_value(request.sampling_params))


def _kept(request, name: str, source, make):
    if _anew:
        return make()
    kept = vars(request).setdefault(ATTRIBUTE, {})
    if (known := kept.get(name)) is None or known[0] is not source:
        known = kept[name] = (source, make())
    return known[1]


def difference(one, other, where: str = "state") -> str | None:
    """The first place where two values differ; None: nowhere."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (difference(one[key], other[key], f"{where}.{key}") for key in one)), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)), None)
    return None if one == other else f"{where}: {one!r:.200} and {other!r:.200}"
