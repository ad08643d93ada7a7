# SPDX-License-Identifier: Apache-2.0
"""Engines that share KV blocks through a real Mooncake store: what one computed, another finds; its master is killed
while requests run. In `tools/dev proof`, where Mooncake is installed (mooncake_server.py)."""

import json
import sys
import types
from pathlib import Path

import mooncake_server
import pytest
from conftest import result_of
from connector_shared import check_shared
from torpor.errors import Unsupported
from torpor.vllm import mooncake

PROCESS = Path(__file__).parent / "connector_mooncake_process.py"


@pytest.fixture(scope="module")
def shared(zygote, tiny_model, tmp_path_factory):
    if absent := mooncake_server.missing():
        pytest.skip(absent)
    folder = tmp_path_factory.mktemp("shared")
    results = []
    with mooncake_server.MooncakeServer(folder / "mooncake") as server:
        options = {"kv_store": f"{server.url}/tests", "kv_store_timeout_ms": 10_000, "kv_store_wait_ms": 10_000}
        for pid in (0, server.pid):
            words = [PROCESS, tiny_model, folder, json.dumps(options), mooncake_server.site(), pid]
            results.append(result_of(zygote.run(words)))
    return results


@pytest.mark.long
def test_what_one_engine_computed_another_finds(shared):
    check_shared(*(result["first"] for result in shared))


@pytest.mark.long
def test_a_master_that_is_killed_in_the_middle_costs_no_token(shared):
    result = shared[1]
    assert result["in the middle"] == result["first"]["tokens"]
    killed = result["killed"]
    stats = killed["stats"]
    assert killed["again"] == killed["tokens"] and stats["kv_store_onboarded_blocks"] == 0
    assert stats.get("lookup_failed", 0) + stats.get("publish_degraded", 0) + stats.get("publish_failed", 0) > 0


def test_without_mooncake_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(Unsupported, match="does not load") as refused:
        mooncake.store_class()
    assert "libibverbs1" in str(refused.value) + str(getattr(refused.value, "next_step", ""))


def test_one_client_serves_a_process_and_its_address_is_the_one_that_the_master_sees(monkeypatch):
    given = []

    class Store:
        def setup(self, *words):
            given.append(words)
            return 0

    import socket

    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", types.SimpleNamespace(MooncakeDistributedStore=Store))
    monkeypatch.setattr(mooncake, "_clients", {})
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        words = ("127.0.0.1", port, "", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "")
        assert mooncake.connect(*words) is mooncake.connect(*words)
    assert given == [("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", f"127.0.0.1:{port}")]
    with pytest.raises(Exception, match="cannot be reached"):
        mooncake.connect(*words)
    assert len(given) == 1
