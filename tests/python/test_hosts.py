# SPDX-License-Identifier: Apache-2.0
"""A tensor parallel engine with a rank on each of two hosts: two networks, and mounts of their own."""

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from conftest import result_of
from inspector import BINARY

from networks import NEAR, inside, two_networks
from s3_server import BUCKET, S3Server

PROCESS = Path(__file__).parent / "hosts_process.py"
WITHIN = 600  # seconds


@contextlib.contextmanager
def host(network: int, *mounts: str):
    """A process in this network with a host's own files at `mounts`, and shared memory; others enter it."""
    words = " && ".join(f"mount -t tmpfs -o mode=700 own {path}" for path in ("/dev/shm", *mounts))
    command = [*inside(network), "unshare", "-m", "sh", "-c", f"{words} && echo up && exec sleep infinity"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout.readline() != "up\n":
            pytest.skip("the kernel gives this process no mounts of its own")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def run_on(zygote, model, log, hosts, *arguments) -> dict:
    first, second = hosts
    with log.open("w") as said:
        other = zygote.popen([PROCESS, 1, second, model, arguments[1]], stdout=said, stderr=said)
        try:
            return result_of(zygote.run([PROCESS, 0, first, model, *arguments, second], timeout=WITHIN))
        finally:
            of_host = psutil.Process(other.pid).children(recursive=True)  # a worker waits for its engine for ever
            other.kill()
            other.wait()
            for each in of_host:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def as_json(answers: dict) -> dict:
    """Log probabilities are left out: after a wake elsewhere chunks of prompts may be cut otherwise."""
    return {name: [completion[1:4] for completion in completions] for name, (_, completions, _) in answers.items()}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts of their own need root")
def test_ranks_on_two_hosts_save_into_a_shared_directory_and_wake_from_the_copies_of_their_hosts(
    zygote, tiny_model, tmp_path
):  # fmt: skip
    shared, own, remote = tmp_path / "shared", tmp_path / "own", f"file://{tmp_path}/remote"
    (tmp_path / "remote").mkdir(mode=0o700)
    both = (zygote, tiny_model, tmp_path / "second.log")
    with two_networks() as wire:
        if wire is None:
            pytest.skip("the kernel gives this process no network of its own")
        with host(wire.near) as first, host(wire.far) as second:
            slept = run_on(*both, (first, second), shared, own, remote, BINARY)
        own.mkdir(mode=0o700)
        with host(wire.near, own) as first, host(wire.far, own) as second:
            woken = run_on(*both, (first, second), shared, own, remote, BINARY)
    expected = as_json(slept["expected"])
    assert len(expected) == 6 and as_json(slept["slept"]) == expected
    assert as_json(slept["given"] | woken["woken"]) == expected and woken["recomputed"] == 0
    code, words = woken["missing"]
    assert code == "not_found" and f"rank 1: the host {socket.gethostname()} has no checkpoint at" in words
    assert "copy or pull the checkpoint to the same path on each" in words
    code, words = woken["unseen"]
    assert code == "failed_precondition" and f"rank 1: the host {socket.gethostname()} does not see {own}" in words
    assert woken["checkpoints"] == 1, "nothing is left of the checkpoint that was refused"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts of their own need root")
def test_a_server_with_ranks_on_two_hosts_goes_on_elsewhere_where_they_share_its_directory(
    zygote, tiny_model, tmp_path
):  # fmt: skip
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir(mode=0o700)
    with two_networks() as wire:
        if wire is None:
            pytest.skip("the kernel gives this process no network of its own")
        with (
            S3Server(tmp_path / "s3", inside=inside(wire.near), host=NEAR) as store,
            host(wire.near, own) as first,
            host(wire.far, own) as second,
        ):
            arguments = [PROCESS.with_name("hosts_server_process.py"), first, second, tiny_model, shared, own]
            arguments.append(f"s3://{BUCKET}/hosts")
            served = result_of(zygote.run(arguments, timeout=3 * WITHIN, env=os.environ | store.environment))
    log = (shared / "server-0.log").read_text()
    assert served["code"] == 0, log[-3000:]
    assert "torpor: pushed as" in log and served["pushed"]
    assert all(served["expected"])
    for ended, successor in (("drained", 1), ("killed", 2)):
        after = served[ended]
        assert after["texts"] == served["expected"], ended
        assert after["taken_up"] == after["interrupted"] > 0, ended
        assert "woken from" in (shared / f"server-{successor}.log").read_text()
    # Where each host has a directory of its own nothing is fetched, and the reason is told.
    assert f"rank 1: the host {socket.gethostname()} does not see {own}/s-000001" in served["unshared"]
    assert served["there"] == ["LOCK", "answers"]
