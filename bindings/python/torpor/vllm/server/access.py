# SPDX-License-Identifier: Apache-2.0
"""Who calls: the keys of clients, the admin key, and the tenants that clients are told apart by."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from argparse import Namespace
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import vllm.envs as envs
from starlette.datastructures import Headers
from vllm.logger import init_logger

from torpor.errors import Damaged, FileError, InvalidArgument
from torpor.vllm.server import durable
from torpor.vllm.server.route_table import Who
from torpor.vllm.server.settings import Settings

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

_SECRET_BYTES = 32
_SEND_IT = "send it as Authorization: Bearer KEY"
_ADMIN_KEY = "TORPOR_ADMIN_KEY, --torpor-admin-key-file or --torpor-admin-key"


@dataclass(frozen=True)
class Caller:
    """The caller of a route: a tenant, or the admin, who may name the requests of all tenants."""

    tenant: str = ""
    is_admin: bool = False
    may_change: bool = False  # the engine: the admin, and anybody where the operator allows it


_NOBODY = Caller()
caller_of_call: ContextVar[Caller] = ContextVar("torpor_caller", default=_NOBODY)  # set by the Gate for each call
_SECRET_FILE = "tenants.secret"


class Refusal(NamedTuple):
    """The answer to a call that is not let in: its status, what is wrong, and what the caller does about it."""

    status: int
    what: str
    next_step: str = ""


class Access:
    """The keys that were configured. Holds digests only; comparing takes the same time whatever is given."""

    def __init__(self, clients: list[str], admin: str, unguarded: bool):
        """`unguarded`: without any key, whoever reaches the server may change the engine."""
        self._clients = [_digest(key) for key in clients]
        self._admin = _digest(admin) if admin else None
        self._unguarded = unguarded and not clients and not admin
        if self._admin in self._clients:
            raise InvalidArgument("the admin key is a client's key too", "give it a value of its own")
        if self._unguarded:
            logger.warning("torpor: no key is configured: whoever reaches this server may put it to sleep and wake it")

    @staticmethod
    def of(args: Namespace, settings: Settings) -> Access:
        return Access(client_keys(args), settings.admin(), settings.allow_unauthenticated or envs.VLLM_SERVER_DEV_MODE)

    def refusal(self, who: Who, headers: Headers) -> Refusal | None:
        """Return why the caller may not; None: it may."""
        if who is Who.ANYBODY:
            return None
        scheme, key = credentials(headers)
        given = _digest(key) if scheme == "bearer" else b""
        # All are compared, whichever is equal.
        is_client = sum([secrets.compare_digest(given, known) for known in self._clients]) > 0
        is_admin = self._admin is not None and secrets.compare_digest(given, self._admin)
        if who is Who.ADMIN:
            return self._refusal_of_change(is_client, is_admin)
        guarded = bool(self._clients) or (who is Who.OPERATOR and self._admin is not None)
        if not guarded or is_client or is_admin:
            return None
        return Refusal(401, "Unauthorized: this needs a key of this server", _SEND_IT)

    def caller(self, headers: Headers, tenant: str) -> Caller:
        """Return the caller with these headers. `tenant`: as of tenant()."""
        scheme, key = credentials(headers)
        given = _digest(key) if scheme == "bearer" else b""
        is_admin = self._admin is not None and secrets.compare_digest(given, self._admin)
        return Caller(tenant, is_admin, self.refusal(Who.ADMIN, headers) is None)

    def _refusal_of_change(self, is_client: bool, is_admin: bool) -> Refusal | None:
        if is_admin or self._unguarded:
            return None
        if self._admin is None and not self._clients:
            return Refusal(
                403,
                "anybody could change this server's engine",
                f"start it with an admin key: {_ADMIN_KEY}; or with --torpor-allow-unauthenticated",
            )
        if not is_client:
            return Refusal(401, "Unauthorized: this needs the admin key", _SEND_IT)
        if self._admin is None:
            return Refusal(
                403,
                "this changes the engine, and clients' keys may not",
                f"start the server with an admin key, and send that: {_ADMIN_KEY}",
            )
        return Refusal(403, "this changes the engine", "send the admin key instead of a client's")


def client_keys(args: Namespace) -> list[str]:
    """As vLLM takes them."""
    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def let_admin_be_client(args: Namespace, settings: Settings) -> None:
    """vLLM guards /v1 by clients' keys, also what changes the engine there: the admin key is to pass too."""
    if (clients := client_keys(args)) and (admin := settings.admin()):
        args.api_key = [*clients, admin]


def credentials(headers: Headers) -> tuple[str, str]:
    """Scheme in lower case, and key, of the Authorization header."""
    scheme, *key = headers.get("Authorization", "").split(None, 1) or [""]
    return scheme.lower(), key[0].strip() if key else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


# --- tenants ---------------------------------------------------------------------------------------------------------


def tenant(headers: Headers, tenant_header: str, secret: bytes) -> str:
    """Who asks, by key and by the header that the operator named; neither can be told from it without the secret."""
    parts = [" ".join(part for part in credentials(headers) if part)]
    if tenant_header:
        parts.append(headers.get(tenant_header, "").strip())
    return hmac.digest(secret, "\0".join(parts).encode(), "sha256").hex() if any(parts) else ""


def tenants_id(secret: bytes) -> str:
    """Return an id of the secret: servers with the same one know each tenant by the same word."""
    return hmac.digest(secret, b"torpor: the tenants of this secret", "sha256").hex()


def tenant_secret(directory: str | None) -> bytes:
    """The secret of the answers in `directory`, made at first: a server that goes on with them knows their tenants.

    Without a directory: a new one. Raises what names the file if that is not a plain file of ours for us alone, or for
    a group of this process, from which it is then taken.
    """
    if directory is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = Path(directory) / _SECRET_FILE
    try:
        if not os.path.lexists(path):
            _write_secret(path)
        return _read_secret(path)
    except OSError as problem:
        raise FileError(f"{path}: {problem.strerror}", _SECRET_STEP, native=problem.errno or 0) from None


_SECRET_STEP = "put the file back as it was, or remove it: clients then do not find answers that were begun before"


def _write_secret(path: Path) -> None:
    """Whole or not at all, and never over another one."""
    temporary = durable.written_beside(path, secrets.token_bytes(_SECRET_BYTES))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another one was first
    finally:
        os.unlink(temporary)
    durable.sync_folder(path.parent)


def _read_secret(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        own_group = about.st_gid in (os.getegid(), *os.getgroups())
        if (
            not stat.S_ISREG(about.st_mode)
            or about.st_uid != os.geteuid()
            or about.st_mode & (0o007 if own_group else 0o077)
        ):
            raise Damaged(f"{path} is not a plain file that only its owner, this server's user, may use", _SECRET_STEP)
        if about.st_mode & 0o070:  # kubelet gave it to the group that the pod names as fsGroup
            os.fchmod(file, 0o600)
        content = os.read(file, _SECRET_BYTES + 1)
    finally:
        os.close(file)
    if len(content) != _SECRET_BYTES:
        raise Damaged(f"{path} has {len(content)} bytes, not {_SECRET_BYTES}", _SECRET_STEP)
    return content
