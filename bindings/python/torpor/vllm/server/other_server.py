# SPDX-License-Identifier: Apache-2.0
"""Another server of torpor on this host, as this one asks it with the key of its own caller."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
from argparse import Namespace
from collections.abc import Mapping
from urllib.parse import quote

import aiohttp

from torpor import errors
from torpor.errors import Aborted, Error, InvalidArgument, WrongState
from torpor.vllm.server.loopback import Loopback

_CONNECT_SECONDS = 10.0
_RESUME_SECONDS = 600.0  # to read and verify an image
_PASSED_ON = ("Authorization", "traceparent", "tracestate")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Other:
    """The other server. Its calls go to addresses that were checked, and nowhere else.

    `args`: vLLM's, of this server. If this one serves over TLS, the other one must have the same certificate: that
    tells who it is, whatever names the certificate has and whoever signed it.
    """

    def __init__(self, at: Loopback, headers: Mapping[str, str], args: Namespace):
        self.url, self._at = at.url, at
        file = getattr(args, "ssl_certfile", None)
        self._trusted = _fingerprint(file) if file and at.url.startswith("https:") else True
        self._headers = {name: headers[name] for name in _PASSED_ON if name in headers}

    def __str__(self) -> str:
        return f"the server at {self.url}"

    def _session(self, headers: Mapping[str, str], seconds: float | None = None) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(resolver=self._at, ssl=self._trusted)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout, trust_env=False)

    async def wake_up(self, path: str) -> dict:
        """Have its engine wake from the swap channel at `path`. Return its report. Raise its error, or Aborted."""
        content = await self._ask("POST", "/wake_up", {"swap_in_from": path})
        if "status" in content:
            return content
        raise self._error(200, content.get("error"))

    async def resume(self, path: str) -> dict:
        """Have it resume the image at `path`. Return its answer. Raise its error, or Aborted; that also if it gives no
        answer for ten minutes."""
        name = quote(os.path.basename(path), safe="")
        content = await self._ask("POST", f"/v1/sessions/{name}/resume", {"path": path}, _RESUME_SECONDS)
        if content.get("outcome") == "accepted":
            return content
        raise self._error(200, content.get("error"))

    async def has(self, request: str) -> bool:
        """Return whether it has a request, by vLLM's id, or had it. Raise its error, or Aborted."""
        content = await self._ask("GET", f"/torpor/has/{quote(request, safe='')}", {}, _CONNECT_SECONDS)
        if isinstance(content.get("has"), bool):
            return content["has"]
        raise self._error(200, content.get("error"))

    async def take_over(self, step: str, asked: dict) -> dict:
        """Ask a standby for a step of a take-over (standby.py). Return its answer, however late. Raise its error, or
        Aborted."""
        return await self._ask("POST", "/torpor/take_over", {"step": step}, None, asked)

    async def progress(self) -> int | None:
        """Return a number that grows while a standby gets on with a step of a take-over; None: it does not say."""
        try:
            content = await self._ask("POST", "/torpor/take_over", {"step": "progress"}, _CONNECT_SECONDS, {})
        except Error:
            return None
        return content["done"] if isinstance(content.get("done"), int) else None

    async def state(self) -> str:
        """Return its state; empty: it does not say."""
        try:
            async with (
                self._session({}, _CONNECT_SECONDS) as session,
                session.get(f"{self.url}/torpor/ready", allow_redirects=False) as answer,
            ):
                return str((await _json(answer)).get("state", ""))
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

    async def _ask(
        self, method: str, path: str, params: dict[str, str], seconds: float | None = None, body: dict | None = None
    ) -> dict:
        try:
            async with self._session(self._headers, seconds) as session:
                asked = session.request(method, f"{self.url}{path}", params=params, json=body, allow_redirects=False)
                async with asked as answer:
                    status, content = answer.status, await _json(answer)
        except aiohttp.ServerFingerprintMismatch:
            raise WrongState(
                f"{self} has another certificate than this one",
                "give both servers the same --ssl-certfile; restart the one that was started with an older certificate",
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as problem:
            why = getattr(problem, "os_error", problem)  # aiohttp's text also names its own "ssl:default"
            raise Aborted(f"{self} cannot be reached: {why}", "see whether it runs, and where") from None
        except TimeoutError:
            raise Aborted(f"{self} gave no answer for {seconds:g} s", "see its log") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise Aborted(f"{self} broke off: {problem or type(problem).__name__}", "see its log") from None
        if status == 200:
            return content
        raise self._error(status, content.get("error"))

    def _error(self, status: int, error) -> Error:
        if status in (401, 403):
            return WrongState(f"{self} refuses this admin key ({status})", "give both servers the same admin key")
        # A refusal of its gate has the number of its status as the code.
        if isinstance(error, dict) and "what" in error and isinstance(error.get("code"), str):
            what, next_step = f"{self}: {error['what']}", str(error.get("next_step", ""))
            return errors.make(error["code"], what, next_step, state_changed=error.get("state_changed") is True)
        message = error.get("message") if isinstance(error, dict) else None
        return Aborted(f"{self} answers {status}: {message or 'it is no server of torpor'}", "see its log")

    async def is_there(self) -> bool:
        """Return whether its process is there, whatever it answers."""
        try:
            async with (
                self._session({}, _CONNECT_SECONDS) as session,
                session.get(f"{self.url}/is_sleeping", allow_redirects=False),
            ):
                return True
        except (TimeoutError, aiohttp.ServerFingerprintMismatch):
            return True
        except (aiohttp.ClientError, OSError):
            return False


def _fingerprint(file: str) -> aiohttp.Fingerprint:
    """Return the fingerprint of the server's own certificate, the first one in `file`. Each call reads the file: it may
    have been renewed."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            found = _CERTIFICATE.search(opened.read())
    except OSError as problem:
        raise InvalidArgument(f"--ssl-certfile {file}: {problem.strerror}", "name a file that can be read") from None
    if found is None:
        raise InvalidArgument(f"--ssl-certfile {file}: there is no certificate in it", "give one in PEM form")
    return aiohttp.Fingerprint(hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest())


async def _json(answer: aiohttp.ClientResponse) -> dict:
    try:
        content = await answer.json(content_type=None)
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}
