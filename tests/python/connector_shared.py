# SPDX-License-Identifier: Apache-2.0
"""Two engines that share KV blocks through a real store: connector_remote_process.py, and checks of its reports."""

import json
from pathlib import Path

from conftest import result_of

PROCESS = Path(__file__).parent / "connector_remote_process.py"


def one_after_the_other(
    zygote, model, folder, options: dict, pid: int, secret: str, wire=(0, 0), env=None
) -> list[dict]:
    """Run two engines with the same store. Return their reports.

    options: of the connector. pid: of the store's server, which the second engine sees stopped, then killed. secret: of
    the store; no engine prints it. wire: processes whose network the second engine sees slowed and cut; 0: none.
    """
    reports = []
    for of_server in (0, pid):  # the first may compress; the other reads what it has put there
        how = options | {"block_compression": "none" if of_server else "zstd"}
        done = zygote.run([PROCESS, model, folder, json.dumps(how), of_server, *wire], timeout=200, env=env)
        assert secret not in done.stdout + done.stderr
        reports.append(result_of(done))
    return reports


def check_shared(first: dict, second: dict) -> None:
    """Check that, of the same requests, the second engine found in the store what the first computed."""
    assert first["tokens"] == second["tokens"]
    assert first["stats"]["publish_transferred"] > 30 and first["stats"]["kv_store_onboarded_blocks"] == 0
    assert second["cached"] > first["cached"] + 14 * 32
    assert second["stats"]["kv_store_onboarded_blocks"] >= 30 and second["stats"]["lookup_transferred"] >= 30
    assert second["stats"].get("onboard_damaged", 0) == second["stats"].get("onboard_failed", 0) == 0


def check_reset(report: dict) -> None:
    """Check that an engine found nothing of before a reset."""
    after = report["after a reset"]
    assert after["tokens"] == report["first"]["tokens"]
    assert after["stats"]["kv_store_onboarded_blocks"] == 0 and after["stats"].get("lookup_transferred", 0) == 0
