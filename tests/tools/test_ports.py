# SPDX-License-Identifier: Apache-2.0
"""Ports for servers of the demo and the tests: nobody else gets them before the server listens."""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ports
import pytest
from conftest import ROOT

ASK = "import json, ports; print(json.dumps(ports.free_ports(50)))"


def asked(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", ASK],
        env={"PYTHONPATH": str(ROOT / "tools/demo"), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen) -> list[int]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(out)


def test_of_processes_that_ask_at_once_each_gets_its_own(tmp_path):
    got = [port for process in [asked(tmp_path) for _ in range(4)] for port in answer(process)]
    assert len(set(got)) == 200


def test_none_is_of_those_that_linux_gives_out(tmp_path):
    assert all(10_999 < port < 22_768 for port in answer(asked(tmp_path)))


def test_one_that_is_taken_or_whose_second_is_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_is_free", lambda port: port not in (11_001, 21_002))
    assert ports.free_ports(2) == [11_000, 11_003]


def test_a_port_that_somebody_listens_on_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not ports._is_free(server.getsockname()[1])


def test_more_than_there_are_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_is_free", lambda port: False)
    with pytest.raises(OSError, match="fewer than 1"):
        ports.free_port()
