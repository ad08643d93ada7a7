# SPDX-License-Identifier: Apache-2.0
"""Pages of a site as a browser has them: scripts run, what they ask for is there, and no error is said."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run", "--hide-scrollbars",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip
_SAID = re.compile(r'CONSOLE.*?"(.*)", source: (\S+)')
_SECONDS = 120


class Browser:
    """`with Browser(site) as browser:` serves the folder on this machine and opens pages of it in headless Chromium."""

    def __init__(self, site: Path):
        self.lost: set[str] = set()  # what pages asked for and did not get
        lost = self.lost

        class Handler(SimpleHTTPRequestHandler):
            def send_error(self, code, *arguments):
                lost.add(f"{self.path}: {code}")
                super().send_error(code, *arguments)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
        self._url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def opened(self, page: str) -> tuple[str, list[str]]:
        """The document after its scripts have run, and the errors that they said."""
        done = self._run("--dump-dom", f"{self._url}/{page}")
        said = [text for text, _ in _SAID.findall(done.stderr) if re.search("error|uncaught|failed", text, re.I)]
        return done.stdout, said

    def all_opened(self, pages: list[str]) -> dict[str, tuple[str, list[str]]]:
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            return dict(zip(pages, pool.map(self.opened, pages), strict=True))

    def pictured(self, page: str, picture: Path) -> None:
        self._run(f"--screenshot={picture}", "--window-size=1280,1600", f"{self._url}/{page}")

    def _run(self, *words: str) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as profile:
            command = ["chromium", *_OPTIONS, f"--user-data-dir={profile}", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
