# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: one of the two hosts of an engine whose tensor parallel ranks are on both.

    hosts_process.py NUMBER HOLDER MODEL [SHARED OWN REMOTE TORPOR]

HOLDER: a process in whose network and mounts this host is. Host 0 runs the engine, host 1 only its rank. SHARED: a
directory that both see, OWN: a path at which each has a directory of its own. In SHARED the engine sleeps to disk and
wakes, and leaves a checkpoint; it is pushed to REMOTE. OWN then has what each host pulled there: the engine refuses to
wake it as long as only this host did, and to sleep into it. TORPOR: the inspector; after HOLDERS of both hosts.
"""

import ctypes
import json
import os
import subprocess
import sys
from multiprocessing import util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

import networks
from conftest import ENGINE

PORT = 29600  # the network has no other user
_NEWNS = 0x20000


def enter(holder: int) -> None:
    networks.enter(holder)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{holder}/ns/mnt") as file:
        if libc.setns(file.fileno(), _NEWNS) != 0:  # one thread, and files that no other process shares
            raise OSError(ctypes.get_errno(), "setns")


def _bring_in_what_is_spawned(holder: int) -> None:
    """A worker is forked from a process outside (zygote.py): the first that it does is to come here."""
    stock, before = util.spawnv_passfds, f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    before += f"import {Path(__file__).stem}; {Path(__file__).stem}.enter({holder}); "

    def spawnv_passfds(path, words, passfds):
        words = [os.fsdecode(word) for word in words]
        if "--multiprocessing-fork" in words:
            code = words.index("-c") + 1
            words[code] = before + words[code]
        return stock(path, words, passfds)

    util.spawnv_passfds = spawnv_passfds


def options(number: int, model: str, directory: str) -> dict:
    return ENGINE | {
        "model": model, "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
        "nnodes": 2, "node_rank": number, "master_addr": networks.NEAR, "master_port": PORT,
        "additional_config": {"torpor": {"checkpoint_dir": directory}},
    }  # fmt: skip


def serve_rank(model: str, directory: str) -> None:
    """As `vllm serve --headless` does it."""
    from vllm import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs(**options(1, model, directory)).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def run_engine(model: str, shared: str, own: str, remote: str, torpor: str, other: str) -> dict:
    from requests_of_tests import add_requests, final, run
    from vllm import LLM

    from torpor.errors import Error

    names = ["greedy", "seeded", "two", "stops", "penalties", "long-seeded"]
    first = not Path(own).exists()
    llm = LLM(**options(0, model, shared if first else own))
    engine = llm.llm_engine

    def refused(call) -> list:
        try:
            call()
        except Error as problem:
            return [problem.code, str(problem)]
        return ["it was done"]

    def asleep_to_disk() -> str:
        return llm.sleep(level=1, preserve_state=True, to="disk").checkpoint

    def pull(*inside) -> None:
        subprocess.run([*inside, torpor, "pull", remote, own], check=True, capture_output=True)

    if first:
        add_requests(engine, names)
        expected = final(run(engine))
        llm.reset_prefix_cache()
        add_requests(engine, names)
        given = run(engine, 6)
        asleep_to_disk()
        llm.wake_up()
        given |= run(engine, 4)
        path = asleep_to_disk()
        llm.wake_up()
        result = {"expected": expected, "given": given, "slept": final(given | run(engine))}
        subprocess.run([torpor, "push", path, remote], check=True, capture_output=True)
        return result
    pull()
    [path] = sorted(Path(own).glob("g-*"))
    missing = refused(lambda: llm.wake_up(from_checkpoint=path))
    pull("nsenter", "-t", other, "-m", "--")
    llm.wake_up(from_checkpoint=path)
    answers = run(engine, 3)
    result = {"path": str(path), "missing": missing, "unseen": refused(asleep_to_disk)}
    result |= {"checkpoints": len(list(Path(own).glob("[gs]-*"))), "woken": answers | run(engine)}
    return result | {"recomputed": llm.llm_engine.torpor.state().recomputed_tokens}


def main() -> None:
    number, holder, *rest = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = networks.WIRE
    os.environ["VLLM_HOST_IP"] = (networks.NEAR, networks.FAR)[int(number)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = number
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    enter(int(holder))
    _bring_in_what_is_spawned(int(holder))
    if number == "1":
        serve_rank(*rest)
    else:
        print("RESULT " + json.dumps(run_engine(*rest)), flush=True)


if __name__ == "__main__":
    main()
