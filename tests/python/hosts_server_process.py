# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: on the first of two hosts, a server whose tensor parallel ranks are on both, and its clients.

    hosts_server_process.py FIRST SECOND MODEL FOLDER OWN REMOTE
    hosts_server_process.py rank SECOND [options of the server]     # what that starts on the second host

FIRST, SECOND: processes in whose networks and mounts the hosts are. FOLDER: a directory that both see, OWN: a path at
which each has a directory of its own. REMOTE: the store. A server is drained in the middle of its answers; the next
one, with an empty directory, goes on with them. It is killed in the middle of others, and the one after it goes on
with those. The last one has OWN for its directory.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/demo"))

import networks
from hosts_process import enter
from serving import Client, Reading, Server, ServerEnded, descendants

REQUESTS, TOKENS = 4, 300
FIRST_PORT = 29610  # of the ranks; the networks have no other user


def on_host(number: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = networks.WIRE
    os.environ["VLLM_HOST_IP"] = (networks.NEAR, networks.FAR)[number]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(number)


class HostsServer(Server):
    """With its rank on the other host."""

    def __init__(self, model: str, directory: Path, log: Path, second: str, port: int, remote: str):
        options = [
            "--dtype", "float32", "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--nnodes",
            "2", "--master-addr", networks.NEAR, "--master-port", str(port), "--torpor-object-store", remote,
            "--torpor-ownership-term-seconds", "30", "--torpor-sigterm-seconds", "60",
        ]  # fmt: skip
        super().__init__(Path(model), directory, options, {"VLLM_LOGGING_LEVEL": "INFO"})
        self.log, self._second, self._rank = log, second, None

    def _launch(self, command, out):
        rank = [sys.executable, __file__, "rank", self._second, *command[3:], "--node-rank", "1"]
        self._rank = subprocess.Popen(rank, stdout=out, stderr=out, env=self._environment)
        return super()._launch([*command, "--node-rank", "0"], out)

    def kill(self, what: str = "all") -> None:
        """On both hosts."""
        super().kill(what)
        self._kill_rank()

    def stop(self) -> None:
        super().stop()
        self._kill_rank()

    def _kill_rank(self) -> None:
        if self._rank is not None:
            for pid in [self._rank.pid, *descendants(self._rank.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._rank.wait()


def serve_rank(words: list[str]) -> None:
    """As `vllm serve --headless` does it, with what torpor's server would be given."""
    from torpor.vllm.serve import take_options

    rest = take_options(words)
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    options = make_arg_parser(FlexibleArgumentParser()).parse_args(rest)
    options.model = options.model_tag
    config = AsyncEngineArgs.from_cli_args(options).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


async def started(server: HostsServer) -> Client:
    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    return Client(server.url)


def asked(client: Client, name: str) -> tuple[list[Reading], list[asyncio.Task]]:
    readings = [Reading(f"{name}-{n}") for n in range(REQUESTS)]
    return readings, [
        asyncio.create_task(client.chat(
            reading, f"Tell me of the sea, part {n}.", max_tokens=TOKENS,
            **({"temperature": 0} if n % 2 == 0 else {"temperature": 0.8, "seed": n}),
        ))
        for n, reading in enumerate(readings)
    ]  # fmt: skip


async def asked_and_begun(client: Client, name: str) -> tuple[list[Reading], list[asyncio.Task]]:
    readings, tasks = asked(client, name)
    while not all(reading.text for reading in readings):
        await asyncio.sleep(0.02)
    return readings, tasks


async def gone_on(
    client: Client, elsewhere: HostsServer, readings: list[Reading], tasks: list[asyncio.Task]
) -> tuple[Client, dict]:
    """One of the server that goes on, and what became of requests that were interrupted."""
    interrupted = sum(not task.done() for task in tasks)
    there = await started(elsewhere)
    client.http.base_url = elsewhere.url  # a gateway would send it there
    client.also_at[:] = [elsewhere.url]
    await asyncio.gather(*tasks)
    await client.close()
    return there, {
        "interrupted": interrupted,
        "texts": [reading.text for reading in readings],
        "taken_up": sum(bool(reading.taken_up_at) for reading in readings),
    }


async def scene(servers: list[HostsServer], own: Path) -> dict:
    drained, killed, last, unshared = servers
    client = await started(drained)
    expected, tasks = asked(client, "expected")
    await asyncio.gather(*tasks)
    result = {"expected": [reading.text for reading in expected]}

    readings, tasks = await asked_and_begun(client, "drained")
    result["code"] = await asyncio.to_thread(drained.terminate)
    drained.stop()
    if result["code"] != 0:
        return result
    client, result["drained"] = await gone_on(client, killed, readings, tasks)

    readings, tasks = await asked_and_begun(client, "killed")
    result["pushed"] = (await client.post("/torpor/checkpoint"))["pushed"]
    await asyncio.to_thread(killed.kill)
    client, result["killed"] = await gone_on(client, last, readings, tasks)
    await client.close()
    last.kill()

    unshared.start()
    try:
        await asyncio.to_thread(unshared.wait_until_ready)
    except ServerEnded as problem:
        result["unshared"] = str(problem)
    result["there"] = sorted(path.name for path in own.iterdir())
    return result


def main() -> None:
    if sys.argv[1] == "rank":
        enter(int(sys.argv[2]))
        on_host(1)
        serve_rank(sys.argv[3:])
        return
    first, second, model, folder, own, remote = sys.argv[1:]
    enter(int(first))
    on_host(0)
    places = [*(Path(folder) / name for name in ("drained", "killed", "last")), Path(own)]
    servers = [
        HostsServer(model, place, Path(folder) / f"server-{n}.log", second, FIRST_PORT + n, remote)
        for n, place in enumerate(places)
    ]
    try:
        print("RESULT " + json.dumps(asyncio.run(scene(servers, Path(own)))), flush=True)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
