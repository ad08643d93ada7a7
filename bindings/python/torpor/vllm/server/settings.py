"""What an operator may set of the server: --torpor-NAME of `python -m torpor.vllm.serve`, or TORPOR_SERVER_NAME (of the
admin key: TORPOR_ADMIN_KEY, TORPOR_ADMIN_KEY_FILE).

What concerns the engine (dir, key_file, encrypt, keep_checkpoints, …) stands in torpor.vllm.options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from torpor.errors import InvalidArgument
from torpor.vllm.connector_options import size
from torpor.vllm.options import switch

_MOST_KEY_CHARACTERS = 4096


def _setting(
    default,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    variable: str = "",
    secret: bool = False,
    in_bytes: bool = False,
    needs_log: tuple = (),
):
    """`needs_log`: values that mean nothing without the response log; (...,): all but the default."""
    about = {"help": text, "choices": choices, "variable": variable, "in_bytes": in_bytes, "needs_log": needs_log}
    return field(default=default, repr=not secret, metadata=about)


@dataclass(frozen=True)
class Settings:
    wake_from: str = _setting(
        "", "a checkpoint, or a directory of them, to wake from at the start; default: the newest one in --torpor-dir"
    )
    on_wake_error: str = _setting(
        "fail",
        "when that fails. fail: say so on /torpor/ready and serve nothing; recompute: go on from the answers' log "
        "alone; discard: serve without them",
        ("fail", "recompute", "discard"),
        needs_log=("recompute",),
    )
    remote: str = _setting(
        "",
        "an object store, s3://BUCKET/PREFIX or file:///DIRECTORY: checkpoints and answers are pushed there, and a "
        "server elsewhere goes on from them when this one has ended",
        needs_log=(...,),
    )
    remote_term: float = _setting(30.0, "seconds of silence after which another server takes over from this one")
    remote_address: str = _setting(
        "",
        "http://HOST:PORT at which clients find this server: another one that is not ready because this one owns sends "
        "them here; default: none",
        needs_log=(...,),
    )
    on_sigterm: str = _setting(
        "checkpoint", "checkpoint: sleep to disk, then end; stop: as vLLM does", ("checkpoint", "stop")
    )
    sigterm_seconds: float = _setting(25.0, "most that a checkpoint on SIGTERM may take")
    checkpoint_every: float = _setting(0.0, "seconds between checkpoints while serving; 0: none")
    new_requests: str = _setting("queue", "while asleep: queue or refuse (503 with Retry-After)", ("queue", "refuse"))
    queue_limit: int = _setting(256, "most requests that wait for a wake; more are refused")
    wake_on_request: bool = _setting(False, "a request that arrives while asleep wakes the engine")
    sleep_after: float = _setting(
        0.0, "seconds without a request after which the engine sleeps to host memory; 0: never"
    )
    sleep_to_disk_after: float = _setting(
        0.0, "seconds of such a sleep after which it goes on on disk, and host memory is given back; 0: never"
    )
    on_disconnect: str = _setting(
        "abort",
        "when a client goes away: abort its request, as vLLM does, or continue it to be taken up",
        ("abort", "continue"),
        needs_log=("continue",),
    )
    response_log: str = _setting(
        "on",
        "on: the server records what each client was sent, so that clients resume their answers and a new process goes "
        "on after a kill; off: it records nothing. Requests still go on over sleeps and from checkpoints",
        ("on", "off"),
    )
    response_log_bytes: int = _setting(
        256 << 20,
        "most bytes of ended answers in the response log, as 4GiB; beyond it the log drops the oldest ended answers. "
        "It never drops an answer that still runs",
        in_bytes=True,
        needs_log=(...,),
    )
    keep_answers: float = _setting(
        3600.0, "seconds for which ended answers can be asked for, within --torpor-response-log-bytes", needs_log=(...,)
    )
    log_sync: str = _setting(
        "second",
        "when the answers' log is made durable against loss of power: always (before tokens are sent), second, never; "
        "a kill loses nothing in any case",
        ("always", "second", "never"),
        needs_log=(...,),
    )
    tenant_header: str = _setting("", "a request header that tells tenants apart, besides the API key")
    admin_key: str = _setting(
        "",
        "key for what changes the engine: sleep, wake, checkpoints, and vLLM's routes of that kind. Who may list "
        "processes can read it here: better use the environment (TORPOR_ADMIN_KEY) or a file",
        variable="TORPOR_ADMIN_KEY",
        secret=True,
    )
    admin_key_file: str = _setting("", "a file with that key", variable="TORPOR_ADMIN_KEY_FILE")
    allow_unauthenticated: bool = _setting(
        False, "without any key, let whoever reaches the server change the engine; with one it means nothing"
    )

    def __post_init__(self):
        if self.response_log == "on":
            return
        for setting in fields(self):
            value, needing = getattr(self, setting.name), setting.metadata["needs_log"]
            if value in needing or (... in needing and value != setting.default):
                raise InvalidArgument(
                    f"{flag(setting)} {value} needs the response log, which --torpor-response-log off turns off",
                    f"leave out {flag(setting)}, or use --torpor-response-log on",
                )

    @staticmethod
    def from_environment() -> Settings:
        values = {f.name: _parse(f, os.environ[variable(f)]) for f in fields(Settings) if variable(f) in os.environ}
        return Settings(**values)

    def admin(self) -> str:
        """The admin key, from wherever it was given; empty: there is none."""
        if not self.admin_key_file:
            return _checked(self.admin_key, "the admin key") if self.admin_key else ""
        if self.admin_key:
            raise InvalidArgument("both an admin key and a file with it are given", "give one of them")
        try:
            with open(self.admin_key_file, encoding="utf-8") as file:
                content = file.read(_MOST_KEY_CHARACTERS)
        except (OSError, UnicodeDecodeError) as problem:
            raise InvalidArgument(f"the admin key's file cannot be read: {problem}", "name a readable file") from None
        return _checked(content.strip(), self.admin_key_file)


def flag(setting) -> str:
    return f"--torpor-{setting.name.replace('_', '-')}"


def variable(setting) -> str:
    return setting.metadata["variable"] or f"TORPOR_SERVER_{setting.name.upper()}"


def _checked(key: str, where: str) -> str:
    if not key:
        raise InvalidArgument(f"there is no key in {where}", "write one into it")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidArgument(f"{where} has white space or other than ASCII characters", "use a key without")
    return key


def _parse(setting, text: str):
    kind, choices = type(setting.default), setting.metadata["choices"]
    if setting.metadata["in_bytes"]:
        return size(variable(setting), text)
    try:
        value = switch(variable(setting), text, setting.default) if kind is bool else kind(text)
    except ValueError:
        raise InvalidArgument(f"{variable(setting)} is {text!r}", "use a number") from None
    if choices and value not in choices:
        raise InvalidArgument(f"{variable(setting)} is {text!r}", f"use one of {', '.join(choices)}")
    if kind in (int, float) and not value >= 0:
        raise InvalidArgument(f"{variable(setting)} is {text!r}", "use 0 or more")
    return value
