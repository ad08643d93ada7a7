# SPDX-License-Identifier: Apache-2.0
"""What an operator may set of the server: --torpor-NAME of `python -m torpor.vllm.serve`, or TORPOR_SERVER_NAME (of the
admin key: TORPOR_ADMIN_KEY, TORPOR_ADMIN_KEY_FILE).

torpor.vllm.options has the options of the engine (checkpoint_dir, key_file, encrypt, retain_checkpoints, …).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torpor.errors import InvalidArgument
from torpor.vllm.described import BYTES, NUMBER, PATH, SWITCH, TEXT, WHOLE, described, value_of
from torpor.vllm.options import VARIABLES
from torpor.vllm.variables import refuse_misspelt

_MOST_KEY_CHARACTERS = 4096


def _setting(default, kind: str, text: str, *choices: str, variable: str = "", needs_log: tuple = (), **more):
    """`needs_log`: values that mean nothing without the response log; (...,): all but the default."""
    least = more.pop("least", 0) if kind in (WHOLE, NUMBER) else None
    return described(default, kind, text, *choices, least=least, variable=variable, needs_log=needs_log, **more)


@dataclass(frozen=True)
class Settings:
    wake_from: str = _setting(
        "",
        TEXT,
        "a checkpoint, or a directory of them, to wake from at the start; default: the newest one in "
        "--torpor-checkpoint-dir",
    )
    on_wake_error: str = _setting(
        "fail",
        TEXT,
        "what to do when this wake fails. fail: report it on /torpor/ready and serve nothing; recompute: go on from "
        "the response log alone; discard: serve without the requests",
        "fail",
        "recompute",
        "discard",
        needs_log=("recompute",),
        details=(
            "fail removes nothing. recompute also takes up answers that another engine began. discard serves "
            "without the checkpoint and without the log. See [server.md](server.md#another-option-or-version)."
        ),
    )
    object_store: str = _setting(
        "",
        TEXT,
        "an object store, s3://BUCKET/PREFIX or file:///DIRECTORY. The server pushes checkpoints and the response log "
        "there, and a server on another machine goes on from them when this one has ended",
        needs_log=(...,),
        details="See [elsewhere.md](elsewhere.md#a-server-that-goes-on-elsewhere).",
    )
    ownership_term_seconds: float = _setting(
        30.0,
        NUMBER,
        "seconds without a heartbeat of this server after which another one may take over what it owns",
        least=1,  # a standby would end an owner that is well
    )
    standby_of: str = _setting(
        "",
        PATH,
        "the --torpor-checkpoint-dir of another server on this machine, which owns it. This server starts, sleeps with "
        "its device memory released, and takes over when that one has ended or gave no heartbeat for its "
        "--torpor-ownership-term-seconds",
    )
    standby_read_ahead_bytes: int = _setting(
        4 << 30,
        BYTES,
        "most bytes of the owner's newest checkpoint that a standby reads ahead into the system's page cache; 0: none",
    )
    standby_packed_weights: str = _setting(
        "keep",
        TEXT,
        "on a CPU, what a standby does with its linear weights as vLLM's matrix kernels need them. keep: they stay in "
        "memory, about as many bytes as the weights again, and a take-over is faster; release: a take-over packs them "
        "again",
        "keep",
        "release",
    )
    listen_fd: int = _setting(
        0,
        WHOLE,
        "file descriptor of a socket that listens, from the process that started this server: clients are accepted "
        "there, too, from the moment on when the server serves. torpor pair gives it; 0: none",
    )
    state_fd: int = _setting(
        0,
        WHOLE,
        "file descriptor of a pipe into which the server writes each of its states, a line each. torpor pair gives it; "
        "0: none",
    )
    advertise_address: str = _setting(
        "",
        TEXT,
        "http://HOST:PORT at which clients reach this server. Another server, which is not ready because this one "
        "owns the requests, redirects clients here; default: none",
        needs_log=(...,),
    )
    on_sigterm: str = _setting(
        "checkpoint",
        TEXT,
        "what to do on SIGTERM. checkpoint: sleep to disk, then end; stop: end as vLLM does",
        "checkpoint",
        "stop",
        details="Ctrl-C writes no checkpoint. Without one the next server computes running answers again.",
    )
    sigterm_seconds: float = _setting(
        25.0,
        NUMBER,
        "most seconds that a checkpoint on SIGTERM may take",
        details=(
            "After that the server ends without a checkpoint and says so. The response log still has every answer."
        ),
    )
    checkpoint_interval_seconds: float = _setting(
        0.0,
        NUMBER,
        "seconds from the begin of a checkpoint while serving to that of the next; 0: none",
        details=(
            "After one that takes longer than half of them, the server pauses for as long as that took, at most for so "
            "many seconds."
        ),
    )
    new_requests: str = _setting(
        "queue",
        TEXT,
        "what happens to new requests while the engine is asleep: queue, or refuse (503 with Retry-After)",
        "queue",
        "refuse",
    )
    queue_limit: int = _setting(
        256,
        WHOLE,
        "most requests that wait for a wake; the server refuses more",
        details="The answer is 503 with Retry-After.",
    )
    wake_on_request: bool = _setting(
        False,
        SWITCH,
        "a request that arrives while asleep wakes the engine",
        details="If the device has no room, the server tries the wake again every second while a request waits.",
    )
    sleep_after_seconds: float = _setting(
        0.0,
        NUMBER,
        "seconds without a request after which the engine sleeps to host memory; 0: never",
    )
    sleep_to_disk_after_seconds: float = _setting(
        0.0,
        NUMBER,
        "seconds of such a sleep after which the engine moves to disk and releases its host memory; 0: never",
        details=(
            "It needs `--torpor-checkpoint-dir`. The engine wakes on the way. If the device has no room for that, "
            "the engine stays in host memory, and the server tries again."
        ),
    )
    on_disconnect: str = _setting(
        "abort",
        TEXT,
        "what happens to the request of a client that disconnects. abort: it ends, as with vLLM; continue: it runs "
        "on, and the client may resume its answer; what is aborted or cancelled by a call ends all the same",
        "abort",
        "continue",
        needs_log=("continue",),
    )
    response_log: str = _setting(
        "on",
        TEXT,
        "on: the server records what it sent to each client, so that clients resume their answers and a new process "
        "goes on after a kill; off: it records nothing, and requests go on over sleeps and from checkpoints only",
        "on",
        "off",
        details="See [server.md](server.md#without-a-response-log).",
    )
    response_log_bytes: int = _setting(
        256 << 20,
        BYTES,
        "most bytes of ended answers in the response log, as 4GiB; beyond it the log drops the oldest ended answers. "
        "It never drops an answer that still runs",
        needs_log=(...,),
        details="See [server.md](server.md#the-limit-of-the-response-log).",
    )
    response_log_seconds: float = _setting(
        3600.0,
        NUMBER,
        "seconds for which clients can ask for ended answers, within --torpor-response-log-bytes",
        needs_log=(...,),
    )
    response_log_sync: str = _setting(
        "second",
        TEXT,
        "when the response log is made durable against a loss of power. always: before tokens are sent; second: each "
        "second; never. A kill loses nothing in any case",
        "always",
        "second",
        "never",
        needs_log=(...,),
    )
    tenant_header: str = _setting(
        "",
        TEXT,
        "a request header that separates tenants, besides the API key",
        details="A gateway sets it. See [server.md](server.md#authorization).",
    )
    admin_key: str = _setting(
        "",
        TEXT,
        "key for calls that change the engine: sleep, wake, checkpoints, and vLLM's routes of that kind. Users who "
        "may list processes can read it here: better use the environment (TORPOR_ADMIN_KEY) or a file",
        variable="TORPOR_ADMIN_KEY",
        secret=True,
        details="See [server.md](server.md#authorization).",
    )
    admin_key_file: str = _setting(
        "",
        TEXT,
        "a file with that key",
        variable="TORPOR_ADMIN_KEY_FILE",
    )
    allow_unauthenticated: bool = _setting(
        False,
        SWITCH,
        "without any key, let whoever reaches the server change the engine; it has no effect if there is a key",
    )

    def __post_init__(self):
        self._check_standby()
        if self.response_log == "on":
            return
        for setting in fields(self):
            value, needing = getattr(self, setting.name), setting.metadata["needs_log"]
            if value in needing or (... in needing and value != setting.default):
                raise InvalidArgument(
                    f"{flag(setting)} {value} needs the response log, which --torpor-response-log off turns off",
                    f"leave out {flag(setting)}, or use --torpor-response-log on",
                )

    def _check_standby(self) -> None:
        if not self.standby_of:
            return
        if self.object_store:
            raise InvalidArgument(
                "--torpor-standby-of and --torpor-object-store do not go together",
                "leave out one: a standby goes on from the owner's own directory",
            )
        if self.wake_from:
            raise InvalidArgument(
                "--torpor-standby-of and --torpor-wake-from do not go together",
                "leave out --torpor-wake-from: a standby wakes from the owner's newest checkpoint",
            )

    @staticmethod
    def from_environment(spelled: Mapping[str, str] | None = None) -> Settings:
        """spelled: what errors call a variable of the environment, if it was given otherwise, as by a flag."""
        refuse_misspelt(VARIABLES, map(variable, fields(Settings)))
        values = {
            f.name: value_of(f, os.environ[variable(f)], (spelled or {}).get(variable(f), variable(f)))
            for f in fields(Settings)
            if variable(f) in os.environ
        }
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
