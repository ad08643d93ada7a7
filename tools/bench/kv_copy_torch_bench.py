#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scattered KV blocks to one host tensor with torch, as Python code does it today: index_select and advanced indexing.

The shapes of kv_copy_bench.cpp. Ceiling: copying as many bytes from one tensor to another. No digests are taken.
Interleaved, median of the rounds, after one that only warms; all tensors are touched before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from bench_options import count

MODELS = {"135M": (30, 3 * 64 * 2 * 2), "70B": (80, 8 * 128 * 2 * 2)}  # layers; bytes of a token in a layer, bfloat16


def row(model: str, tokens: int, layer_outermost: bool, wanted: int, rounds: int) -> dict:
    layers, token_bytes = MODELS[model]
    piece = tokens * token_bytes // 2  # elements
    moved = max(4, wanted // (piece * 2 * layers))
    shape = (layers, 2 * moved, piece) if layer_outermost else (2 * moved, layers, piece)
    pool = torch.ones(shape, dtype=torch.bfloat16)
    ids = torch.randperm(2 * moved, generator=torch.Generator().manual_seed(1))[:moved]
    axis = 1 if layer_outermost else 0
    out = torch.zeros([moved if i == axis else n for i, n in enumerate(shape)], dtype=torch.bfloat16)
    flat = pool.view(-1)[: out.numel()]
    target = torch.zeros_like(flat)
    times: dict[str, list[float]] = {"index_select": [], "advanced indexing": [], "copy": []}
    for number in range(rounds + 1):
        for name, work in (
            ("index_select", lambda: torch.index_select(pool, axis, ids, out=out)),
            ("advanced indexing", lambda: out.copy_(pool[:, ids] if layer_outermost else pool[ids])),
            ("copy", lambda: target.copy_(flat)),
        ):
            began = time.perf_counter()
            work()
            if number > 0:
                times[name].append(time.perf_counter() - began)
    size = out.numel() * 2
    rate = {name: size / 1e9 / statistics.median(taken) for name, taken in times.items()}
    return {
        "model": model,
        "block_tokens": tokens,
        "layout": "layer outermost" if layer_outermost else "block outermost",
        "bytes": size,
        "index_select": rate["index_select"],
        "advanced_indexing": rate["advanced indexing"],
        "ceiling": rate["copy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=count, default=256)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        row(model, tokens, layer, options.mib << 20, options.rounds)
        for model in MODELS
        for tokens in (16, 32, 128)
        for layer in (True, False)
    ]
    if options.json:
        print(json.dumps({"rounds": options.rounds, "unit": "GB/s, median", "blocks": rows}, indent=2))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.mib} MiB each, "
        f"median of {options.rounds} rounds, GB/s"
    )
    print(f"{'model':>5} {'tokens':>6} {'layout':<16} {'index_select':>12} {'advanced':>9} {'copy':>6}")
    for r in rows:
        print(
            f"{r['model']:>5} {r['block_tokens']:>6} {r['layout']:<16} "
            f"{r['index_select']:>12.2f} {r['advanced_indexing']:>9.2f} {r['ceiling']:>6.2f}"
        )


if __name__ == "__main__":
    main()
