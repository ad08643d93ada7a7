# SPDX-License-Identifier: Apache-2.0
"""Records what the board shows of a real server: `tools/dev board`.

A server with the demo's model serves chats, sleeps, wakes, is drained and started again, for about a minute and a half.
Prometheus asks it for its metrics each second, and is then asked what each panel of the board asks. The answers go to
series.json, beside the expressions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tools"), str(HERE.parents[1] / "tools/demo")]

from ports import free_port  # noqa: E402
from serving import KEY, Client, Reading, Server, folder_for_logs  # noqa: E402

SCRAPE_SECONDS = 1
RATE_SECONDS = 8  # $__rate_interval: Grafana takes at least four scrapes
# It falls asleep by itself in the longest pause of the script, and in no other one.
OPTIONS = ["--dtype", "float32", "--torpor-wake-on-request", "--torpor-sleep-after-seconds", "8"]
OPTIONS += ["--torpor-checkpoint-interval-seconds", "10"]


def expressions() -> list[dict]:
    """Return the panels of the board with what they ask, each variable of Grafana's in its place."""
    board = json.loads((HERE / "torpor.json").read_text())
    return [
        {
            "id": panel["id"],
            "targets": [{"expr": each["expr"], "legend": each["legendFormat"]} for each in panel["targets"]],
        }
        for panel in board["panels"]
    ]


def asked(expression: str) -> str:
    return expression.replace("$instance", ".*").replace("$__rate_interval", f"{RATE_SECONDS}s")


async def serves(server: Server) -> None:
    """What happens while it is recorded."""

    async def chats(client: Client, name: str, count: int, tokens: int) -> None:
        readings = [Reading(f"{name}-{n}") for n in range(count)]
        await asyncio.gather(
            *(client.chat(each, f"Tell me {n} facts.", max_tokens=tokens) for n, each in enumerate(readings))
        )

    client = Client(server.url)
    try:
        for turn, to in enumerate(("host", "disk")):
            running = asyncio.create_task(chats(client, f"turn-{turn}", 8, 250))
            await asyncio.sleep(5)
            await client.post("/sleep", level=1, to=to)
            waiting = asyncio.create_task(chats(client, f"waits-{turn}", 4, 60))  # they wake it
            await asyncio.gather(running, waiting)
        await asyncio.sleep(14)  # it falls asleep by itself
        await chats(client, "again", 6, 80)
        running = asyncio.create_task(chats(client, "over the restart", 6, 500))
        await asyncio.sleep(4)
        await asyncio.to_thread(server.terminate)
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        await running
        await asyncio.sleep(3)
    finally:
        await client.close()


def recorded(prometheus: str, began: float, ended: float) -> list[dict]:
    panels = expressions()
    for panel in panels:
        for target in panel["targets"]:
            parameters = {"query": asked(target["expr"]), "start": began, "end": ended, "step": SCRAPE_SECONDS}
            answer = httpx.get(f"{prometheus}/api/v1/query_range", params=parameters, timeout=30).json()
            if answer["status"] != "success":
                raise SystemExit(f"error: Prometheus does not take {parameters['query']}: {answer['error']}")
            target["series"] = [
                {
                    "labels": {name: text for name, text in found["metric"].items() if name != "__name__"},
                    "values": [[round(at - began), float(f"{float(value):.5g}")] for at, value in found["values"]
                               if value != "NaN"],
                }
                for found in answer["data"]["result"]
            ]  # fmt: skip
    return panels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    model = parser.parse_args().model
    with folder_for_logs("torpor-board-") as folder, tempfile.TemporaryDirectory() as database:
        server = Server(model, folder / "torpor", OPTIONS)
        port = free_port()
        configuration = {
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
            "scrape_configs": [
                {
                    "job_name": "torpor",
                    "authorization": {"credentials": KEY},
                    "static_configs": [
                        {"targets": [server.url.removeprefix("http://")], "labels": {"instance": "torpor-0"}}
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration))  # YAML has all of JSON
        with open(folder / "prometheus.log", "w") as log:
            prometheus = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={database}",
                 f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            server.start()
            server.wait_until_ready()
            began = time.time()
            asyncio.run(serves(server))
            panels = recorded(f"http://127.0.0.1:{port}", began, time.time())
        finally:
            server.stop()
            prometheus.terminate()
            prometheus.wait()
    lines = ",\n".join(json.dumps(panel) for panel in panels)
    (HERE / "series.json").write_text(f'{{"rate_seconds": {RATE_SECONDS}, "panels": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
