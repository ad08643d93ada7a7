# SPDX-License-Identifier: Apache-2.0
"""Exceptions of torpor. Each says what was wrong (`what`), what to do (`next_step`), and whether anything changed
(`state_changed`); `code` is the machine-readable kind, the same in C++, in the command line and here.

An error is also the builtin that it resembles: `except TimeoutError` catches a TimedOut. InvalidArgument is no
ValueError: options are checked inside of vLLM's pydantic classes, which would put a ValidationError in its place.
"""

from __future__ import annotations


class Error(Exception):
    """Base of all. Attributes: code, what, next_step (str), origin (str), native (int), state_changed (bool)."""

    code = "internal"
    errno: int | None  # of those that are an OSError

    def __init__(
        self, what: str, next_step: str = "", *, origin: str = "torpor", native: int = 0, state_changed: bool = False
    ):
        super().__init__(f"{what} ({next_step})" if next_step else what)
        self.what = what
        self.next_step = next_step
        self.origin = origin
        self.native = native
        self.state_changed = state_changed

    def to_dict(self) -> dict:
        """Plain data, for a process border."""
        fields = ("code", "what", "next_step", "origin", "native", "state_changed")
        return {name: getattr(self, name) for name in fields}

    def __reduce__(self):
        return make, (self.code, self.what, self.next_step, self.origin, self.native, self.state_changed)


class InvalidArgument(Error):
    """The call is wrong; correct it."""

    code = "invalid_argument"


class WrongState(Error, RuntimeError):
    """The call does not fit the present state."""

    code = "failed_precondition"


class NotFound(Error, LookupError):
    """The named thing does not exist."""

    code = "not_found"


class NotEnoughRoom(Error, MemoryError):
    """Memory, disk space or a budget is exhausted; free some and call again."""

    code = "resource_exhausted"


class Busy(Error):
    """Another operation is in progress; call the same again."""

    code = "unavailable"


class Aborted(Error):
    """A larger operation was undone; start that again."""

    code = "aborted"


class Damaged(Error):
    """Stored bytes do not match their digest or description."""

    code = "corruption"


class Incompatible(Error):
    """A whole checkpoint, but made for something else; the message names the fields."""

    code = "incompatible"


class Unauthenticated(Error, PermissionError):
    """Sealed with a key that was not given, or another one; or a key was given and the checkpoint has no seal."""

    code = "unauthenticated"


class Unsupported(Error, NotImplementedError):
    """A feature in use that this version cannot do; the message names it."""

    code = "unsupported"


class TimedOut(Error, TimeoutError):
    """Not done in the given time."""

    code = "timeout"


class FileError(Error, OSError):
    """A system call on a file failed; `native` is errno."""

    code = "io"

    def __init__(self, what: str, next_step: str = "", *, native: int = 0, **more):
        super().__init__(what, next_step, native=native, **more)
        if native:
            self.errno = native  # with a `strerror` too, str() would leave `what` out


class DeviceError(Error, RuntimeError):
    """The device failed."""

    code = "device"


_BY_CODE = {cls.code: cls for cls in Error.__subclasses__()}


def make(
    code: str, what: str, next_step: str = "", origin: str = "torpor", native: int = 0, state_changed: bool = False
) -> Error:
    """The exception for an error value; unknown codes become the base class."""
    return _BY_CODE.get(code, Error)(what, next_step, origin=origin, native=native, state_changed=state_changed)


def from_dict(fields: dict) -> Error:
    """The reverse of Error.to_dict()."""
    return make(**fields)
