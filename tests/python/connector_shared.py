# SPDX-License-Identifier: Apache-2.0
"""Engines that share KV blocks through a real store: connector_remote_process.py, and checks of its reports."""

import json
from pathlib import Path

from conftest import result_of

PROCESS = Path(__file__).parent / "connector_remote_process.py"


def one_after_the_other(
    zygote, model, folder, options: dict, pid: int, secret: str, short_ms: int, wire=(0, 0), env=None
) -> list[dict]:
    """Run three engines with the same store. Return their reports.

    The first two share what they compute; a slow machine does not end their calls. The third has a call end after
    `short_ms`: it sees the network slowed and cut, and the store's server stopped, then killed.

    options: of the connector. pid: of the store's server. secret: of the store; no engine prints it. wire: processes
    whose network the third engine sees slowed and cut; 0: none.
    """
    generous = {"kv_store_timeout_ms": 60_000, "kv_store_wait_ms": 60_000}
    short = {"kv_store_timeout_ms": short_ms, "kv_store_wait_ms": 2000}
    reports = []
    # The first may compress; the others read what it has put there.
    for own, of_server in (
        (generous | {"block_compression": "zstd"}, 0),
        (generous | {"block_compression": "none"}, 0),
        (short, pid),
    ):
        words = [PROCESS, model, folder, json.dumps(options | own), of_server, *wire]
        done = zygote.run(words, env=env)
        assert secret not in done.stdout + done.stderr
        reports.append(result_of(done))
    return reports


def check_shared(first: dict, second: dict) -> None:
    """Check that, of the same requests, the second engine found in the store what the first computed."""
    assert first["tokens"] == second["tokens"]
    assert first["stats"]["publish_transferred"] > 30 and first["stats"]["kv_store_onboarded_blocks"] == 0
    assert second["cached"] > first["cached"] + 14 * 32
    stats = second["stats"]
    came = stats["kv_store_onboarded_blocks"] + stats.get("prefetch_transferred", 0)  # these for requests that waited
    assert came >= 30 and stats["lookup_transferred"] >= 30
    assert second["stats"].get("onboard_damaged", 0) == second["stats"].get("onboard_failed", 0) == 0


def check_reset(report: dict) -> None:
    """Check that an engine found nothing of before a reset."""
    after = report["after a reset"]
    assert after["tokens"] == report["first"]["tokens"]
    assert after["stats"]["kv_store_onboarded_blocks"] == 0 and after["stats"].get("lookup_transferred", 0) == 0
