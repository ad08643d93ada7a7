# SPDX-License-Identifier: Apache-2.0
"""`tools/dev demo --server`: clients stream from a server, it is drained with SIGTERM, a new one starts, the clients
take up their streams. Every answer is compared with one that was never interrupted."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import httpx
from screen import MARK, Screen, size
from serving import KEY, Client, Reading, Server

_REPAINT_SECONDS = 0.2


def kinds_of(number: int, seed: int) -> tuple[str, dict]:
    """Greedy and seeded in turn: those have one right answer, whoever else is in the batch."""
    return (
        ("greedy", {"temperature": 0})
        if number % 2 == 0
        else ("seeded", {"temperature": 0.8, "top_p": 0.95, "seed": seed + number})
    )


async def play(options: argparse.Namespace, prompts: list[str], directory: Path, screen: Screen) -> dict:
    # Requests arrive at other moments in each run and meet in other batches: in float32 that rounds no token otherwise.
    server = Server(options.model, directory / "torpor", ["--dtype", "float32"])
    try:
        screen.stage("1. A server starts: python -m torpor.vllm.serve")
        began = time.monotonic()
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        screen.line(f"{server.url}, {time.monotonic() - began:.0f} s; log: {server.log}")
        client = Client(server.url)

        async def everybody(prefix: str) -> tuple[list[Reading], asyncio.Future]:
            readings = [Reading(f"{prefix}-{number}") for number in range(len(prompts))]
            chats = [
                client.chat(reading, prompt, max_tokens=options.max_tokens, **kinds_of(number, options.seed)[1])
                for number, (reading, prompt) in enumerate(zip(readings, prompts, strict=True))
            ]
            return readings, asyncio.gather(*chats)

        screen.stage("2. Its clients' answers when nothing happens, to compare with")
        expected, answering = await everybody("undisturbed")
        await answering
        screen.line(f"{len(prompts)} answers")

        screen.stage(f"3. The same {len(prompts)} clients again (from torpor.client import AsyncOpenAI)")
        readings, answering = await everybody("demo")
        while (
            sum(len(reading.text) for reading in readings)
            < sum(len(reading.text) for reading in expected) * options.drain_at
        ):
            screen.chats({str(n): reading.text for n, reading in enumerate(readings)})
            await asyncio.sleep(_REPAINT_SECONDS)
        screen.chats({str(n): reading.text for n, reading in enumerate(readings)}, final=True)

        screen.stage("4. SIGTERM: the server sleeps to disk in the middle of their sentences, and ends")
        before = {str(n): len(reading.text) for n, reading in enumerate(readings) if reading.finish_reason is None}
        began = time.monotonic()
        code = await asyncio.to_thread(server.terminate)
        drained = time.monotonic() - began
        screen.line(
            f"exit code {code} after {drained:.1f} s; {len(before)} answers are not complete; no process is left"
        )

        screen.stage(
            "5. A new server starts with the same --torpor-checkpoint-dir, and wakes before it says that it is ready"
        )
        began = time.monotonic()
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        started = time.monotonic() - began
        state = (await client.http.get("/torpor/state")).json()
        woken = metric(await client.http.get("/metrics"), "torpor_operation_seconds_sum", 'operation="wake"')
        screen.line(
            f"ready after {started:.0f} s, {woken:.2f} of them to wake {state['last_checkpoint']['requests']} requests "
            f"from {state['last_checkpoint']['path']} ({size(state['last_checkpoint']['bytes'])})"
        )

        screen.stage(
            "6. The clients take up their streams by their request ids: GET /torpor/requests/ID/stream?from_text=N"
        )
        while not answering.done():
            screen.chats({str(n): reading.text for n, reading in enumerate(readings)}, before)
            await asyncio.sleep(_REPAINT_SECONDS)
        await answering
        whole = [(await client.whole(reading.request_id))["choices"][0] for reading in readings]
        await client.close()
    finally:
        server.stop()

    screen.stage(f"7. The answers; {MARK} is where the server ended")
    screen.answers({str(n): reading.text for n, reading in enumerate(readings)}, before)
    pairs = list(zip(readings, expected, strict=True))
    return {
        "requests": len(prompts),
        "identical": sum(reading.text == other.text for reading, other in pairs),
        "complete": sum(
            choice["state"] == "finished" and choice["text"] == reading.text
            for choice, reading in zip(whole, readings, strict=True)
        ),
        "differing": [n for n, (reading, other) in enumerate(pairs) if reading.text != other.text],
        "sampling": [kinds_of(n, options.seed)[0] for n in range(len(prompts))],
        "interrupted": sum(bool(reading.interruptions) for reading in readings),
        "taken_up": sum(bool(reading.taken_up_at) for reading in readings),
        "exit_code": code,
        "drain_seconds": drained,
        "start_seconds": started,
        "wake_seconds": woken,
        "checkpoint": state["last_checkpoint"]["path"],
        "checkpoint_bytes": state["last_checkpoint"]["bytes"],
        "log": str(server.log),
    }


def metric(answer: httpx.Response, name: str, label: str) -> float:
    """The sum of this metric over all series that have the label, whatever others they have."""
    lines = [line for line in answer.text.splitlines() if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def run(options: argparse.Namespace, prompts: list[str], screen: Screen) -> dict:
    return asyncio.run(play(options, prompts, options.dir, screen))


def show(result: dict, screen: Screen) -> None:
    screen.stage("8. What happened")
    screen.table([
        ("complete, each character once", f"{result['complete']} of {result['requests']}"),
        ("identical to undisturbed answers", f"{result['identical']} of {result['requests']}"),
        ("interrupted / taken up", f"{result['interrupted']} / {result['taken_up']}"),
        ("SIGTERM until the end of the process", f"{result['drain_seconds']:.1f} s, exit code {result['exit_code']}"),
        ("new server", f"ready after {result['start_seconds']:.0f} s (vLLM's own start), "
                       f"woken in {result['wake_seconds']:.2f} s"),
        ("checkpoint", f"{size(result['checkpoint_bytes'])}  {result['checkpoint']}"),
        ("do it yourself", f"curl -H 'Authorization: Bearer {KEY}' URL/torpor/requests/ID/stream?from=0"),
    ])  # fmt: skip
    for number in result["differing"]:
        screen.line(f"client {number + 1} ({result['sampling'][number]}) DIFFERS")
