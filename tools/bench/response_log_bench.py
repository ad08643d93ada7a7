#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the response log costs the server's event loop, for each request and step of an engine.

Fake requests get a token and a word a step; the recorder listens as it does in a server. The unit is microseconds of
the event loop's thread (its processor time) for one request and step, beyond what the same steps take without a log.
Baseline: the states read in Python and handed over as dicts, which write the same record. Ceiling: one write of the
record's bytes, without reading anything. Interleaved, median of the rounds, after one that only warms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import SamplingParams

from torpor import _core
from torpor.vllm.scheduler_values import unstarted_request
from torpor.vllm.server import recorder as server_recorder
from torpor.vllm.values import sampling_to_value

from bench_options import count

STEPS, PROMPT, WANTED = 20, 500, 0.5


class Detokenizer:
    """As vLLM's fast one looks to a reader."""

    def __init__(self):
        self.token_ids, self.output_text, self.stop_buffer_length = [], "", 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids


class State:
    def __init__(self, request_id: str):
        self.request_id, self.detokenizer = request_id, Detokenizer()


class Processor:
    """The four methods of vLLM's OutputProcessor that a recorder replaces."""

    def __init__(self, count: int):
        names = [f"chatcmpl-{number:032x}-{number % 7:08x}" for number in range(count)]  # as long as vLLM's
        self.request_states = {name: State(name) for name in names}
        self.outputs = [SimpleNamespace(request_id=name) for name in names]

    def add_request(self, *_) -> None: ...
    def abort_requests(self, *_) -> None: ...
    def propagate_error(self, *_) -> None: ...

    def process_outputs(self, outputs) -> None:
        for output in outputs:
            detokenizer = self.request_states[output.request_id].detokenizer
            detokenizer.token_ids.append(7)
            detokenizer.output_text += " word"


class Run:
    """A processor with a log. `kind`: torpor, baseline, or stock: without a log."""

    def __init__(self, kind: str, count: int, directory: Path | None):
        self.processor, self.count, self.log = Processor(count), count, None
        self.process = self.processor.process_outputs
        if kind == "stock":
            return
        self.log = _core.DeliveryLog({
            "directory": None if directory is None else str(directory), "engine": {"model": "bench"},
        })  # fmt: skip
        recorder = server_recorder.Recorder(self.processor, self.log, False)
        sampling = sampling_to_value(SamplingParams(max_tokens=100_000))
        for name in self.processor.request_states:
            self.log.start({
                "request": unstarted_request(name, [1] * PROMPT, sampling, 0.0), "response": name, "tenant": "",
                "call": 1, "choice": 0, "front": {"state": {}},
            })  # fmt: skip
        self.process = self.processor.process_outputs
        if kind == "baseline":
            stock, states = recorder._stock_process, list(self.processor.request_states.values())

            def process(outputs) -> None:
                stock(outputs)
                recorder._record([step for state in states if (step := recorder.step_of(state)) is not None])

            self.process = process

    def seconds(self) -> float:
        began = time.thread_time()
        for _ in range(STEPS):
            self.process(self.processor.outputs)
        return (time.thread_time() - began) / STEPS


def written_alone(size: int, directory: Path) -> float:
    content = b"x" * size
    with open(directory / "alone", "wb", buffering=0) as file:
        began = time.thread_time()
        for step in range(STEPS):
            os.pwrite(file.fileno(), content, step * size)
        return (time.thread_time() - began) / STEPS


def measure(count: int, on_disk: bool, rounds: int, folder: Path) -> dict:
    place = (lambda kind: folder / f"{kind}-{count}") if on_disk else (lambda kind: None)
    runs = {kind: Run(kind, count, place(kind)) for kind in ("stock", "torpor", "baseline")}
    times: dict[str, list[float]] = {kind: [] for kind in (*runs, "ceiling")}
    for number in range(rounds + 1):
        before = runs["torpor"].log.counts()["log_bytes"]
        taken = {kind: run.seconds() for kind, run in runs.items()}
        record = (runs["torpor"].log.counts()["log_bytes"] - before) // STEPS
        taken["ceiling"] = written_alone(record, folder) if on_disk else 0.0
        if number > 0:
            for kind, seconds in taken.items():
                times[kind].append(seconds)
    median = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    each = {kind: (median[kind] - median["stock"]) / count * 1e6 for kind in ("torpor", "baseline")}
    each["ceiling"] = median["ceiling"] / count * 1e6
    ratio = each["baseline"] / each["torpor"]
    return {"requests": count, "on_disk": on_disk, "record_bytes": record, "microseconds": each, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server_recorder.FastIncrementalDetokenizer = Detokenizer  # what the log reads by itself
        rows = [
            measure(count, on_disk, options.rounds, Path(folder))
            for on_disk in (False, True)
            for count in (16, 64, 128)  # vLLM hands over at most 128 at once (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)
        ]
    if options.json:
        print(json.dumps({"wanted_microseconds": WANTED, "rows": rows}))
        return
    print("us of the event loop for each request and step, beyond a server without a log")
    print("requests  log      torpor  baseline  ceiling  baseline / torpor  bytes a record")
    for row in rows:
        where, each = "on disk" if row["on_disk"] else "memory", row["microseconds"]
        print(
            f"{row['requests']:8}  {where:7} {each['torpor']:7.2f} {each['baseline']:9.2f} {each['ceiling']:8.2f} "
            f"{row['ratio']:18.1f} {row['record_bytes']:15}"
        )


if __name__ == "__main__":
    main()
