# SPDX-License-Identifier: Apache-2.0
"""KV blocks of 2 MiB to a Mooncake store and back, over TCP on this machine: `tools/dev bench remote --mooncake`.

torpor's store (`mooncake_bench.cpp`) beside a plain loop over Mooncake's own Python client: its wheel has no benchmark
of a store. Both are processes with one client and as many threads, that give batches of blocks in registered memory to
batch_put_from() and batch_get_into(); the server's master and its node are new for each. torpor asks whether each block
is there, before and after it puts it, takes and checks digests, and copies between blocks and registered memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

import mooncake_server  # noqa: E402

BYTES = 2 << 20
BATCH = 4
VERBS = ("put", "get")
CONTESTANTS = ("torpor", "plain")


def measure(rounds: int, blocks: int) -> dict:
    if absent := mooncake_server.missing():
        raise SystemExit(f"{absent}; tests/python/mooncake_server.py says what to install")
    result = {}
    for threads in (1, 4):
        runs = {name: [] for name in CONTESTANTS}
        for _ in range(rounds + 1):
            for name in CONTESTANTS:
                runs[name].append(one_run(name, threads, blocks))
        row = {name: {verb: statistics.median(run[verb] for run in runs[name][1:]) for verb in VERBS} for name in runs}
        result[threads] = row | {"ratio": {verb: row["torpor"][verb] / row["plain"][verb] for verb in VERBS}}
    return result


def one_run(name: str, threads: int, blocks: int) -> dict[str, float]:
    """In a process of its own, with a server of its own."""
    warm = threads * BATCH
    room = 2 * (blocks + warm) * BYTES
    with tempfile.TemporaryDirectory() as folder, mooncake_server.MooncakeServer(Path(folder), room) as server:
        words = [sys.executable, __file__, name, server.port, blocks + warm, threads, warm]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    return dict(zip(VERBS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def show(result: dict) -> None:
    for threads, row in result.items():
        for verb in VERBS:
            print(f"Mooncake, {threads} threads  {verb}  torpor {row['torpor'][verb]:.2f} GB/s, its client alone "
                  f"{row['plain'][verb]:.2f} GB/s: {row['ratio'][verb]:.2f} (0.8 is wanted)")  # fmt: skip


# --- in the child ---


def client_of(port: int):
    sys.path.append(str(mooncake_server.site()))
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if answer := client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{port}"):
        raise SystemExit(f"Mooncake's client does not come up: {answer}")
    return client


def plain(client, blocks: int, threads: int, warm: int) -> list[float]:
    memory = mmap.mmap(-1, blocks * BYTES)
    for block in range(blocks):
        memory[block * BYTES : (block + 1) * BYTES] = block.to_bytes(8, "little") * (BYTES // 8)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if client.register_buffer(begin, blocks * BYTES):
        raise SystemExit("Mooncake does not register memory")

    def seconds(call, first: int, end: int) -> float:
        batches = [range(at, min(at + BATCH, end)) for at in range(first, end, BATCH)]

        def work() -> None:
            while True:
                try:
                    batch = batches.pop(0)
                except IndexError:
                    return
                answers = call([f"block-{each}" for each in batch], [begin + each * BYTES for each in batch],
                               [BYTES] * len(batch))  # fmt: skip
                wrong.extend(answer for answer in answers if answer not in (0, BYTES))

        wrong = []
        began = time.monotonic()
        helpers = [threading.Thread(target=work) for _ in range(threads)]
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
        took = time.monotonic() - began
        if wrong:
            raise SystemExit(f"Mooncake answers {wrong}")
        return took

    calls = (client.batch_put_from, client.batch_get_into)
    for call in calls:
        seconds(call, 0, warm)
    return [(blocks - warm) * BYTES / seconds(call, warm, blocks) / 1e9 for call in calls]


def torpor(client, blocks: int, threads: int, warm: int) -> list[float]:
    size = ctypes.c_size_t

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, size, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(size),
                      ctypes.POINTER(size), ctypes.POINTER(ctypes.c_int64))  # fmt: skip
    def call(verb, count, keys, places, sizes, answers) -> int:
        try:
            names = [key.decode() for key in keys[:count]]
            if verb == 0:
                found = [client.register_buffer(places[0], sizes[0])]
            elif verb in (1, 2):
                move = client.batch_put_from if verb == 1 else client.batch_get_into
                found = move(names, places[:count], sizes[:count])
            else:
                found = client.batch_is_exist(names) if verb == 3 else client.batch_remove(names, True)
            for at, answer in enumerate(found):
                answers[at] = answer
            return 0
        except Exception:
            traceback.print_exc()
            return 1

    library = ctypes.CDLL(str(ROOT / "build/release/tools/bench/libmooncake_bench.so"))
    rates = (ctypes.c_double * 2)()
    library.torpor_mooncake_bench(call, ctypes.c_uint64(BYTES), blocks, threads, size(BATCH), size(warm), rates)
    return list(rates)


if __name__ == "__main__":
    contestant = {"torpor": torpor, "plain": plain}[sys.argv[1]]
    server_port, *numbers = map(int, sys.argv[2:])
    print(json.dumps(contestant(client_of(server_port), *numbers)), flush=True)
    os._exit(0)  # Mooncake's own end takes seconds
