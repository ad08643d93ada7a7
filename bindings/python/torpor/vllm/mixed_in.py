# SPDX-License-Identifier: Apache-2.0
"""Objects of vLLM that get a mixin of torpor, for an engine that asks: front ends, engine cores, clients, requests.

vLLM has extension points for schedulers and workers only (named_mixins.py). What else torpor does otherwise stands in
mixins, and an object gets one by its `__class__`. Classes of vLLM, and engines that did not ask, stay as they are.

Python allows that between classes whose objects are laid out alike. A mixin for an abstract class derives from it: an
object of `class C(abc.ABC)` has its `__dict__` elsewhere than that of a plain class.
"""

from __future__ import annotations

import functools
from typing import Any

# What a mixin has behind it: a class of vLLM, so type checkers let it have all that such a class may have.
Stock: Any = object


def mix_in(one: Any, mixin: type) -> None:
    """Put `mixin` in front of the class of `one`. Doing it again changes nothing."""
    if not isinstance(one, mixin):
        stock: Any = type(one)
        one.__class__ = _in_front(mixin, stock)


def mix_in_behind(one: Any, mixin: type, stock: type) -> None:
    """Put `mixin` in front of vLLM's class `stock`, but behind a user's subclass of it: the user's methods go first."""
    if isinstance(one, mixin):
        return
    ours = _in_front(mixin, stock)
    own: Any = type(one)
    one.__class__ = ours if own is stock else _made(own, (own, ours), mixin)


@functools.cache
def _in_front(mixin: type, base: type) -> type:
    return _made(base, (mixin, base), mixin)


@functools.cache
def _made(like: type, bases: tuple[type, ...], mixin: type) -> type:
    names = {"__module__": mixin.__module__, "__qualname__": like.__qualname__, "__doc__": like.__doc__}
    return type(like.__name__, bases, names)
