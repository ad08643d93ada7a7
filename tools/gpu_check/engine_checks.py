#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether an engine that sleeps and wakes answers as one that only stood still, on vLLM's default GPU path.

Needs vLLM's CUDA build and torpor, and a model; --gpu-path runs the same here, without a GPU. Each row says what was
expected, what was seen, and a verdict: passed, failed, or not here. Rows go to standard output as JSON lines, a table
of them to standard error at the end. Exit codes: 0 none failed, 1 some did, 2 it could not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
GPU_PATH = HERE.parents[1] / "tests/gpu_path"  # of a checkout; not in the bundle

LOG = "engines.log"
_NGRAMS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
TOKENS = "the reference run's tokens"
SAME = "tokens, texts and log probabilities of the paused reference run, nothing recomputed"


class Part:
    """Checks that share one engine, in a process of its own. Each: title, what is expected, function, its options."""

    def __init__(self, name: str, checks: list[tuple], absent: str = "", variables: dict | None = None, **options):
        self.name, self.checks, self.options = name, checks, options
        self.absent = absent  # why not here; empty: it is run
        self.variables = variables or {}


def parts(options) -> list[Part]:
    """All checks, on the GPU path or on CUDA."""
    gpu_path, here = options.gpu_path, _here(options)
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
    if options.no_compile:
        graphs["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL"}
    no_device = "needs a GPU" if gpu_path else ""
    no_flashinfer = no_device or ("" if here["flashinfer"] else "FlashInfer is not installed")
    torch_samples = {} if gpu_path else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    found = [
        Part("eager", [
            ("1 deterministic without a sleep", "two runs give the same", "repeats", {}),
            ("2 sleep and wake, eager, host", SAME, "sleeps", {}),
            ("2 sleep and wake, eager, disk", SAME, "sleeps", {"to": "disk"}),
            ("4 addresses over a sleep", "weights and KV stay where they are", "addresses", {}),
            ("6 generators, unseeded top-k and top-p", f"{TOKENS}, generators disturbed", "generators", {}),
            ("7 level 2, reload_weights", f"penalties and bias rebuilt: {TOKENS}", "rebuilt", {}),
            ("8 KV blocks", "each block hashes as before", "kv_bytes", {}),
            ("9 sleep right after a step", f"{options.sleeps} times {TOKENS}", "after_each_step", {}),
            ("10 unified buffers", "valid after a wake, on both sides", "host_buffers", {}),
            ("11 two steps in flight", f"ended before the sleep: {TOKENS}", "two_in_flight", {}),
            ("15 memory and time", "at least 90 % is given back", "memory_back", {}),
            ("5 checkpoint for a new process", "one is committed", "leaves_checkpoint", {}),
        ], variables=torch_samples),
        Part("new process", [("5 new process", SAME, "wakes_checkpoint", {})], variables=torch_samples),
        Part("graphs, without torpor", [
            ("1 deterministic, CUDA graphs, without torpor", "two runs give the same", "repeats", {}),
        ], no_device, {"TORPOR_ENABLED": "0"}, **graphs),
        Part("graphs", [
            ("1 deterministic without a sleep, CUDA graphs", "two runs give the same", "repeats", {}),
            ("3 sleep and wake, CUDA graphs, host", SAME, "sleeps", {}),
            ("3 sleep and wake, CUDA graphs, disk", SAME, "sleeps", {"to": "disk"}),
            ("4 addresses, graphs replay", "none is captured again", "addresses", {}),
            ("5 checkpoint, CUDA graphs", "one is committed", "leaves_checkpoint", {}),
        ], no_device, **graphs),
        Part("graphs, new process", [("5 new process, graphs captured again", SAME, "wakes_checkpoint", {})],
             no_device, **graphs),
        Part("no autotuning", [("5 checkpoint, no autotuning", "one is committed", "leaves_checkpoint", {})],
             no_flashinfer, enable_flashinfer_autotune=False, **graphs),
        Part("no autotuning, new process", [("5 new process, no autotuning", SAME, "wakes_checkpoint", {})],
             no_flashinfer, enable_flashinfer_autotune=False, **graphs),
        Part("FlashInfer", [
            ("6 generators, FlashInfer", f"{TOKENS}, generators disturbed", "generators", {"flashinfer": True}),
        ], no_flashinfer, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}),
    ]  # fmt: skip
    large = {"load_format": "dummy", "kv_cache_memory_bytes": options.kv_gib << 30}
    large |= {"max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    found.append(Part("loaded", [("16 a loaded engine", f"twice {SAME}", "loaded", {})], **({} if gpu_path else large)))
    for layout in ("BLHNC", "BHLNC") if gpu_path else ("LBNHC", "LBHNC", "BLHNC"):  # the GPU path's own is in "eager"
        check = (f"8 KV blocks, layout {layout}", "each block hashes as before", "kv_bytes", {"layout": layout})
        found.append(Part(f"layout {layout}", [check], "", {"VLLM_KV_CACHE_LAYOUT": layout}))
    # Kernels that the interpreter does not run.
    probabilistic = {} if gpu_path else {"draft_sample_method": "probabilistic"}
    one_device = "" if gpu_path or here["devices"] > 1 else "needs two GPUs"
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if gpu_path else {}
    found += [
        Part("two ranks", [("12 tensor parallel, two ranks", SAME, "ranks", {})], one_device, cores,
             tensor_parallel_size=2),
        Part("NCCL", [("12 NCCL and custom all-reduce", SAME, "ranks", {})],
             no_device or one_device, tensor_parallel_size=2, **graphs),
        Part("FP8", [("13 FP8 KV", SAME, "sleeps", {})], no_device, kv_cache_dtype="fp8"),
        Part("MLA", [("13 MLA", SAME, "sleeps", {})],
             no_device or ("" if options.mla_model else "--mla-model names none")),
        Part("n-grams", [("14 drafts by n-grams", f"some accepted, {SAME}", "drafts", {"accepted": True})],
             speculative_config=_NGRAMS),
        Part("EAGLE", [("14 drafts by EAGLE", SAME, "drafts", {"accepted": False})],
             "" if options.eagle_head else "--eagle-head names none",
             speculative_config=_EAGLE | {"model": options.eagle_head} | probabilistic),
    ]  # fmt: skip
    return found


def _here(options) -> dict:
    """What this machine has."""
    if options.gpu_path:
        return {"flashinfer": False, "devices": 0}
    import torch

    return {"flashinfer": importlib.util.find_spec("flashinfer") is not None, "devices": torch.cuda.device_count()}


def row(check: tuple, seen: str, verdict: str) -> dict:
    return {"check": check[0], "expected": check[1], "seen": seen, "verdict": verdict}


def wanted(options, check: tuple) -> bool:
    return not options.only or int(check[0].split()[0]) in options.only


def run_part(part: Part, options) -> None:
    """In the part's own process: starts the engine and prints the row of each check when it is done."""
    chosen = [check for check in part.checks if wanted(options, check)]
    try:
        import checks
        from checked_engine import CheckedEngine

        model = options.mla_model if part.name == "MLA" else options.model
        if part.name == "loaded" and not options.gpu_path:
            model = checks.shaped_as_8b(options.model, Path(options.dir) / "8b")
        one = CheckedEngine(model, options.dir, options.gpu_path, part.options)
    except Exception as problem:
        absent = "VLLM_KV_CACHE_LAYOUT" in part.variables and "does not satisfy every" in str(problem)
        for check in chosen:
            print(json.dumps(row(check, _text_of(problem), "not here" if absent else "failed")), flush=True)
        traceback.print_exc()
        return
    for check in chosen:
        try:
            seen, verdict = getattr(checks, check[2])(one, options, **check[3]), "passed"
        except checks.Failed as problem:
            seen, verdict = str(problem), "failed"
        except Exception as problem:
            traceback.print_exc()
            seen, verdict = _text_of(problem), "failed"
        print(json.dumps(row(check, seen, verdict)), flush=True)


def _text_of(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"[:400]


def in_own_process(part: Part, options, program: list[str], end: float) -> list[dict]:
    """Return the rows of a part. A process that ends before it told them all has failed the rest; one that is at work
    at the time `end` is killed, and the rest is not here."""
    words = [*program, "--part", part.name, "--dir", options.dir, "--model", options.model, "--sleeps", options.sleeps]
    words += ["--no-compile"] * options.no_compile
    words += ["--gpu-path"] * options.gpu_path + ["--mla-model", options.mla_model] * bool(options.mla_model)
    words += ["--eagle-head", options.eagle_head] * bool(options.eagle_head)
    words += ["--loaded", options.loaded, "--kv-gib", options.kv_gib]
    words += ["--only", *options.only] if options.only else []
    log = Path(options.dir) / LOG
    with open(log, "a") as errors:
        errors.write(f"\n=== {part.name}\n")
        errors.flush()
        command = [sys.executable, *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env=environment(part, options), text=True, **pipes)
        rows, late = {}, threading.Event()
        killer = threading.Timer(max(1.0, end - time.monotonic()), lambda: (late.set(), process.kill()))
        killer.daemon = True
        killer.start()
        for line in process.stdout:
            if line.startswith('{"check"'):
                row_read = json.loads(line)
                rows[row_read["check"]] = row_read
                print(line, end="", flush=True)
            else:
                errors.write(line)
        code = process.wait()
        killer.cancel()
    for check in part.checks:
        if wanted(options, check) and check[0] not in rows:
            seen, verdict = f"the process ended with {code}; see {LOG}", "failed"
            if late.is_set():
                seen, verdict = used_up(options), "not here"
            rows[check[0]] = row(check, seen, verdict)
            print(json.dumps(rows[check[0]]), flush=True)
    return list(rows.values())


def used_up(options) -> str:
    return f"the {options.minutes:g} minutes are used up"


def environment(part: Part, options) -> dict[str, str]:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    if options.gpu_path:
        sys.path.append(str(GPU_PATH))
        import gpu_path

        variables |= gpu_path.environment(slow_copies=True)
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    elif not _here(options)["flashinfer"]:
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM takes it for granted
    return os.environ | variables | part.variables


def table(rows: list[dict]) -> str:
    width = max(len(each["check"]) for each in rows)
    lines = [f"{each['verdict']:8}  {each['check']:{width}}  {each['seen']}" for each in rows]
    counts = {verdict: sum(each["verdict"] == verdict for each in rows) for verdict in ("passed", "failed", "not here")}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine_checks.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu-path", action="store_true", help="on CPU tensors, in a checkout of torpor")
    parser.add_argument("--model", default="", help="a folder or a name that vLLM knows; not needed on the GPU path")
    parser.add_argument("--mla-model", default="", help="one with multi-head latent attention, for check 13")
    parser.add_argument("--eagle-head", default="", help="a head of EAGLE for the model, for check 14")
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="CUDA graphs of whole steps without torch.compile, for a torch that is not vLLM's own",
    )
    parser.add_argument("--sleeps", type=int, help="of check 9; 1,000, or 20 on the GPU path")
    parser.add_argument(
        "--loaded",
        type=int,
        default=48,
        metavar="N",
        help="requests of check 16, each with a prompt of 4,000 tokens (default 48); on the GPU path 6 of 100",
    )
    parser.add_argument("--kv-gib", type=int, default=30, metavar="N", help="GiB of its KV cache (default 30)")
    parser.add_argument("--minutes", type=float, help="after so many nothing goes on; 10, or a day on the GPU path")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="N", help="checks with these numbers")
    parser.add_argument("--dir", help="where checkpoints and the engines' log are left; else only if a check failed")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.sleeps is None:
        options.sleeps = 20 if options.gpu_path else 1000
    if options.minutes is None:
        options.minutes = 24 * 60 if options.gpu_path else 10
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}; use more than 0")
    if unknown := [number for number in options.only if not 1 <= number <= 16]:
        parser.error(f"--only {unknown[0]}: there are the checks 1 to 16")
    if options.sleeps < 1:
        parser.error(f"--sleeps is {options.sleeps}; use 1 or more")
    if options.loaded < 1 or options.kv_gib < 1:
        parser.error("--loaded and --kv-gib are 1 or more")
    if options.gpu_path and not (GPU_PATH / "gpu_path").is_dir():
        parser.error(f"--gpu-path needs a checkout of torpor: there is no {GPU_PATH}")
    if missing := [name for name in ("torch", "vllm", "torpor") if importlib.util.find_spec(name) is None]:
        parser.error(f"{' and '.join(missing)} cannot be imported here: install it, or name its folder in PYTHONPATH")
    if not options.gpu_path:
        if not options.model:
            parser.error("name a model with --model, or use --gpu-path")
        if _here(options)["devices"] == 0:
            parser.error("torch finds no CUDA device here; use --gpu-path")
    return options


def main(arguments: list[str], program: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.part:
        run_part(next(part for part in parts(options) if part.name == options.part), options)
        return 0
    rows = run_all(options, program or [__file__])
    print(table(rows), file=sys.stderr)
    failed = any(each["verdict"] == "failed" for each in rows)
    if options.temporary and not failed:
        shutil.rmtree(options.dir)
    elif failed:
        print(f"the engines' log: {Path(options.dir, LOG)}", file=sys.stderr)
    return 1 if failed else 0


def run_all(options, program: list[str]) -> list[dict]:
    options.temporary = options.dir is None
    options.dir = str(Path(options.dir or tempfile.mkdtemp(prefix="engine-checks-")).resolve())
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    if options.gpu_path and not options.model:
        sys.path.append(str(GPU_PATH))
        from gpu_path.model import make_model

        options.model = str(make_model(Path(options.dir) / "model"))
    rows = []
    print(f"at most {options.minutes:g} minutes", file=sys.stderr, flush=True)
    end = time.monotonic() + 60 * options.minutes
    for part in parts(options):
        chosen = [check for check in part.checks if wanted(options, check)]
        absent = part.absent or (used_up(options) if time.monotonic() >= end else "")
        if chosen and not absent:
            rows += in_own_process(part, options, program, end)
        for check in chosen if absent else ():
            rows.append(row(check, absent, "not here"))
            print(json.dumps(rows[-1]), flush=True)
    return sorted(rows, key=lambda each: int(each["check"].split()[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
