# SPDX-License-Identifier: Apache-2.0
"""Sessions in an engine that has other KV connectors: TorporAdmit is the first one inside vLLM's MultiConnector."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import scenarios
from conftest import result_of
from test_other_connectors import FOLLOWS, SCRIPTED, TORPORS, both
from vllm.config import KVTransferConfig

from torpor import errors
from torpor.vllm import configuration
from torpor.vllm.options import Options

PROCESS = Path(__file__).parent / "sessions_beside_process.py"
OFFLOADING = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "OnCpu", "spec_module_path": "offloading_spec_on_cpu", "cpu_bytes_to_use": 64 << 20,
    },
}  # fmt: skip
KINDS = {
    "offloading": ({}, OFFLOADING, ["TorporAdmit", "OffloadingConnector"]),
    "scripted": ({}, SCRIPTED, ["TorporAdmit", "ScriptedConnector"]),
    "several": ({}, both(SCRIPTED, OFFLOADING), ["TorporAdmit", "ScriptedConnector", "OffloadingConnector"]),
    "torpors": ({"offload": "eager", "host_bytes": "64MiB"}, None, ["TorporAdmit", "TorporConnector"]),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def result(kind, zygote, tiny_model) -> dict:
    torpor, transfer, _ = KINDS[kind]
    found = result_of(zygote.run([PROCESS, tiny_model, json.dumps(torpor), json.dumps(transfer)]))
    scenarios.check(found)
    return found


@pytest.mark.slow
@pytest.mark.core
def test_requests_leave_and_come_back_beside_other_connectors(result, kind):
    assert result["connectors"] == KINDS[kind][2]
    assert result["leaves_and_comes_back"]["of"] == [[True, True, True]] * 2
    assert result["goes_to_disk"] == {"stored": True, "same": True}
    assert result["forks"] == {"children": 2, "same": True}
    assert result["ends_while_away"] == {"same": True, "images": 0}
    if kind in ("offloading", "several"):  # it did its work meanwhile; of several, the first one loads
        assert result["counts"]["stored"] > 0 and (kind == "several" or result["counts"]["loaded"] > 0)


@pytest.mark.slow
@pytest.mark.core
def test_an_id_comes_back_when_the_other_connector_has_done_with_it(result):
    assert result["comes_back_at_once"] == {"same": True}


@pytest.mark.slow
@pytest.mark.core
def test_a_sleep_is_as_beside_that_connector_alone(result, kind):
    follows = FOLLOWS and kind in ("scripted", "torpors")
    assert result["sleep"] == "slept" if follows else "KV connector" in result["sleep"], result["sleep"]


# --- the configuration ------------------------------------------------------------------------------------------------


def chosen(transfer: KVTransferConfig | None, **torpor) -> KVTransferConfig:
    config = SimpleNamespace(kv_transfer_config=transfer, additional_config={"torpor": {"sessions": True} | torpor})
    for _ in range(2):  # vLLM finishes a configuration again in each process
        configuration._choose_connector(config, Options.of(config))
    return config.kv_transfer_config


def test_it_comes_first_and_the_others_keep_what_they_were_given():
    given = KVTransferConfig(**OFFLOADING, kv_port=15000, engine_id="one")
    made = chosen(given)
    admitting, other = made.kv_connector_extra_config["connectors"]
    assert (made.kv_connector, made.engine_id, made.kv_role) == ("MultiConnector", "one", "kv_both")
    assert made.kv_load_failure_policy == "recompute" and admitting["kv_connector"] == "TorporAdmit"
    assert "engine_id" not in other and KVTransferConfig(**other, engine_id="one") == given
    made = chosen(KVTransferConfig(**both(SCRIPTED, OFFLOADING)))
    assert made.kv_connector_extra_config["connectors"][1:] == [SCRIPTED, OFFLOADING]
    assert chosen(None).kv_connector == "TorporAdmit"


def test_torpors_own_is_a_member_too_and_beside_others_it_is_named():
    made = chosen(None, offload="eager", host_bytes="64MiB")
    assert [each["kv_connector"] for each in made.kv_connector_extra_config["connectors"]] == [
        "TorporAdmit", "TorporConnector",
    ]  # fmt: skip
    assert len(chosen(KVTransferConfig(**TORPORS)).kv_connector_extra_config["connectors"]) == 2
    with pytest.raises(errors.InvalidArgument, match="option offload beside the KV connector OffloadingConnector"):
        chosen(KVTransferConfig(**OFFLOADING), offload="eager", host_bytes="64MiB")
