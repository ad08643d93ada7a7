# SPDX-License-Identifier: Apache-2.0
"""`torpor pair`, with servers that have no engine: one of the two owns the directory, and clients reach it, whatever
ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inspector import BINARY
from ports import free_port, free_ports
from serving import alive

SERVER = Path(__file__).parent / "paired_server.py"
SECONDS = 600  # that something may take that happens


class Pair:
    def __init__(self, folder: Path, *options: str):
        self.folder, self.log = folder, folder / "log"
        self.port, self.own = free_port(), free_ports(2)
        # `python` of the servers: it runs the stand-in, whose first words are those of the real one.
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {SERVER} "$@"\n')
        python.chmod(0o700)
        command = [BINARY, "pair", "--python", python, "--own-ports", ",".join(map(str, self.own)), "--", folder]
        command += ["--port", str(self.port), "--torpor-checkpoint-dir", folder / "torpor", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        deadline = time.monotonic() + SECONDS
        while "clients connect to port" not in self.log.read_text() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def ask(self) -> tuple[int, list[str]]:
        """Connect as a client. Return the own port of the server that answered, and the states that it has been in."""
        answer = ""
        while not answer:  # of a connection that a server had accepted when it was killed, nothing comes
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as connection,
                contextlib.suppress(ConnectionError),
            ):
                answer = connection.recv(1000).decode()
        port, _, states = answer.partition(" ")
        return int(port), states.split(",")

    def started(self, role: str) -> list[int]:
        """Return the processes that were started as this so far."""
        return [int(pid) for pid in re.findall(rf"starts as {role} \(process (\d+)", self.log.read_text())]

    def until(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "torpor").mkdir(mode=0o700)
    pair = Pair(tmp_path, "--torpor-ownership-term-seconds", "4")
    yield pair
    if pair.process.poll() is None:
        pair.process.kill()
    pair.process.wait()


def test_the_standby_starts_first_and_the_one_that_ended_comes_back_as_the_standby(pair):
    port, states = pair.ask()  # waits in the socket's queue for the first server that serves
    assert (port, states) == (pair.own[1], ["starting", "awake"])
    assert len(pair.started("standby")) == len(pair.started("owner")) == 1
    owners = pair.started("owner")
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        standbys = pair.started("standby")
        os.kill(owners[-1], number)
        _, states = pair.ask()
        assert states == ["starting", "standby", "taking over", "awake"], pair.log.read_text()
        owners.append(standbys[-1])
        pair.until(lambda before=standbys: len(pair.started("standby")) > len(before))
        assert not alive(owners[-2])
        new = pair.started("standby")[-1]
        pair.until(lambda pid=new: f"process {pid} is standby" in pair.log.read_text())  # it has looked who owns
    assert len(pair.started("owner")) == 1  # the others were standbys first
    log = pair.log.read_text()
    assert "two owners" not in log


def test_on_sigterm_the_owner_ends_last_and_nobody_takes_over(pair):
    pair.ask()
    pair.until(lambda: pair.started("standby"))
    of_terminal = os.getpgid(pair.process.pid)  # gets a Ctrl-C
    assert of_terminal not in map(os.getpgid, pair.started("standby") + pair.started("owner"))
    assert pair.end() == 17  # the owner's exit code
    log = pair.log.read_text()
    ended = re.findall(r"server (\d) has ended \(process \d+, (?:exit code|signal) (\d+)\)", log)
    assert [which for which, _ in ended] == ["1", "2"] and ended[1] == ("2", "17")
    assert not any(alive(pid) for pid in pair.started("standby") + pair.started("owner"))


def test_servers_end_with_their_parent(pair):
    pair.ask()
    pair.process.kill()
    pair.process.wait()
    deadline = time.monotonic() + SECONDS
    while any(alive(pid) for pid in pair.started("standby") + pair.started("owner")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_owner_that_fails_at_its_start_is_started_again_and_wrong_options_end_the_pair(tmp_path):
    (tmp_path / "torpor").mkdir(mode=0o700)
    pair = Pair(tmp_path)
    (tmp_path / f"fail-{pair.own[1]}").write_text("1\n1\n")
    port, states = pair.ask()
    assert (port, states) == (pair.own[1], ["starting", "awake"])
    assert len(pair.started("owner")) == 3 and len(pair.started("standby")) == 1
    assert pair.end() == 17
    wrong = tmp_path / "wrong"
    (wrong / "torpor").mkdir(mode=0o700, parents=True)
    pair = Pair(wrong, "--torpor-new-requests", "never")
    assert pair.process.wait(SECONDS) == 2
    assert "its options are wrong: the pair ends" in pair.log.read_text()


def test_a_standby_that_fails_at_its_start_is_started_again_and_its_owner_serves_on(pair):
    pair.ask()
    (pair.folder / f"fail-{pair.own[0]}").write_text("2\nfailed\n")
    os.kill(pair.started("standby")[0], signal.SIGKILL)
    pair.until(lambda: len(pair.started("standby")) == 4)  # one with wrong options, one that failed, one that is well
    pair.until(lambda: f"process {pair.started('standby')[-1]} is standby" in pair.log.read_text())
    assert pair.ask()[0] == pair.own[1] and len(pair.started("owner")) == 1
    assert not any(alive(pid) for pid in pair.started("standby")[:-1])


@pytest.mark.slow
def test_a_standby_that_does_not_end_keeps_no_owner_from_its_checkpoint(pair):
    pair.ask()
    (pair.folder / f"hang-{pair.own[0]}").touch()
    os.kill(pair.started("standby")[0], signal.SIGKILL)
    pair.until(lambda: len(pair.started("standby")) == 2)
    pair.until(lambda: f"process {pair.started('standby')[1]} is standby" in pair.log.read_text())
    assert pair.end() == 17
    log = pair.log.read_text()
    assert f"process {pair.started('standby')[1]} is ending" in log
    assert re.search(r"server 1 has ended \(process \d+, signal 9\)(.|\n)*server 2 has ended", log)


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_standby_whose_take_over_failed_is_ended_and_both_servers_come_back(pair, hangs):
    pair.ask()
    failed = pair.started("standby")[0]
    (pair.folder / f"fail-take-over-{pair.own[0]}").touch()
    if hangs:  # it does not end on SIGTERM, so the pair kills it
        (pair.folder / f"hang-{pair.own[0]}").touch()
        os.kill(failed, signal.SIGKILL)
        pair.until(lambda: len(pair.started("standby")) == 2)
        failed = pair.started("standby")[1]
    pair.until(lambda: f"process {failed} is standby" in pair.log.read_text())
    if hangs:
        (pair.folder / f"hang-{pair.own[0]}").unlink()
    os.kill(pair.started("owner")[0], signal.SIGKILL)
    pair.until(lambda: f"process {failed} is failed" in pair.log.read_text())
    pair.until(lambda: len(pair.started("owner")) == 2)
    _, states = pair.ask()
    assert states == ["starting", "awake"] and not alive(failed)
    log = pair.log.read_text()
    assert f"ends the standby that failed (process {failed})" in log
    assert (f"kills the standby that failed (process {failed})" in log) == hangs
    assert (f"process {failed} is ending" in log) == hangs  # it had the SIGTERM
    assert "two owners" not in log


@pytest.mark.parametrize("standby_lives", [True, False])
def test_an_owner_that_cannot_go_on_after_a_switch_is_ended_and_another_one_serves(pair, standby_lives):
    pair.ask()
    owner, standby = pair.started("owner")[0], pair.started("standby")[0]
    pair.until(lambda: f"process {standby} is standby" in pair.log.read_text())
    if not standby_lives:  # the owner has ended it
        os.kill(standby, signal.SIGKILL)
    os.kill(owner, signal.SIGUSR1)
    pair.until(lambda: f"process {owner} is failed" in pair.log.read_text())
    pair.until(lambda: not alive(owner))
    pair.ask()
    log = pair.log.read_text()
    assert "two owners" not in log
    if standby_lives:
        assert f"process {standby} is taking over" in log
    pair.until(lambda: pair.started("standby")[-1] != standby)
    pair.until(lambda: f"process {pair.started('standby')[-1]} is standby" in pair.log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_an_owner_that_handed_over_and_does_not_end_is_killed(pair, ends):
    """Before, no new standby starts; and a pair that ends lets the server save that took over."""
    pair.ask()
    owner, standby = pair.started("owner")[0], pair.started("standby")[0]
    pair.until(lambda: f"process {standby} is standby" in pair.log.read_text())
    os.kill(owner, signal.SIGUSR2)
    pair.until(lambda: f"process {owner} is ending" in pair.log.read_text())
    if ends:
        assert pair.end() == 17  # the exit code of the server that took over
    else:
        pair.until(lambda: len(pair.started("standby")) == 2)
        pair.until(lambda: f"process {pair.started('standby')[1]} is standby" in pair.log.read_text())
        assert pair.ask() == (pair.own[0], ["starting", "standby", "taking over", "awake"])
    log = pair.log.read_text()
    assert re.search(rf"server 2 has ended \(process {owner}, signal 9\)", log)
    assert f"kills the owner before (process {owner})" in log and "two owners" not in log
    if ends:
        assert re.search(
            rf"process {owner}, signal 9\)(.|\n)*server 1 has ended \(process {standby}, exit code 17", log
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MODEL"], "--torpor-checkpoint-dir"),
        (["MODEL", "--torpor-checkpoint-dir", "/d", "--uds", "/s"], "--uds"),
        (["MODEL", "--torpor-checkpoint-dir", "/d", "--torpor-standby-of", "/d"], "--torpor-standby-of"),
        (["MODEL", "--torpor-checkpoint-dir", "/d", "--port", "no"], 'the port is "no"'),
        (["MODEL", "--torpor-checkpoint-dir", "/d", "--port", "65535"], "are not three"),
    ],
)
def test_what_a_pair_cannot_be_is_said_and_nothing_starts(words, says):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORPOR_")}
    done = subprocess.run(
        [BINARY, "pair", "--", *words], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_standby_of_the_environment_is_refused():
    environment = os.environ | {"TORPOR_SERVER_STANDBY_OF": "/d"}
    words = ["pair", "--", "MODEL", "--torpor-checkpoint-dir", "/d"]
    done = subprocess.run([BINARY, *words], env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2 and "--torpor-standby-of" in done.stderr


def test_a_port_that_is_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["MODEL", "--torpor-checkpoint-dir", "/d", "--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run([BINARY, "pair", "--", *words], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 8 and f"port {port} is in use" in done.stderr
