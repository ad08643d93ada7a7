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
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from torpor import errors
from torpor.vllm import configuration, slots
from torpor.vllm.connector_scheduler import SchedulerSide
from torpor.vllm.options import Options

PROCESS = Path(__file__).parent / "sessions_beside_process.py"
STATS_PROCESS = Path(__file__).parent / "member_stats_process.py"
OFFLOADING = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
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
    if kind == "torpors":
        assert result["loses_its_kv_before_children_run"] == {"reset": True, "free": True, "same": True}
        assert result["is_reset_during_a_prefetch"] == {"begun": True, "reset": True, "outcome": "accepted"}
        sessions = result["sessions_of_what_is_never_looked_up"]
        assert sessions == {name: [True, "accepted"] for name in ("resumed", "forked", "logprobs")}
    assert result["ends_while_away"] == {"same": True, "images": 0}
    if kind in ("offloading", "several"):  # it did its work meanwhile; of several, the first one loads
        assert result["counts"]["stored"] > 0 and (kind == "several" or result["counts"]["loaded"] > 0)


@pytest.mark.slow
@pytest.mark.core
def test_an_id_comes_back_when_the_other_connector_has_done_with_it(result):
    assert result["comes_back_at_once"] == {"same": True}


@pytest.mark.slow
@pytest.mark.core
def test_a_request_comes_back_while_the_other_connector_has_transfers_of_others(result, kind):
    held = kind in ("scripted", "several")
    assert result["comes_back_during_transfers_of_others"] == {"held": held, "same": True}


@pytest.mark.slow
@pytest.mark.core
def test_a_sleep_is_as_beside_that_connector_alone(result, kind):
    follows = FOLLOWS and kind in ("scripted", "torpors")
    assert result["sleep"] == "slept" if follows else "KV connector" in result["sleep"], result["sleep"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize(
    ("torpor", "transfer"),
    [
        ({"sessions": True, "offload": "eager", "host_bytes": "64MiB"}, None),
        ({}, both(SCRIPTED, TORPORS)),
    ],
    ids=["option", "member"],
)
def test_the_front_end_takes_statistics_of_torpors_connector_as_a_member(zygote, tiny_model, torpor, transfer):
    done = zygote.run([STATS_PROCESS, tiny_model, json.dumps(torpor), json.dumps(transfer)])
    found = result_of(done)
    assert found["tokens"] == 16 and "torpor_offload_blocks" in found["metrics"]


# --- the configuration ------------------------------------------------------------------------------------------------


def config_of(transfer, torpor: dict, ranks: int = 1, external: bool = False) -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_size=ranks, data_parallel_external_lb=external)
    return SimpleNamespace(
        kv_transfer_config=transfer, additional_config={"torpor": {"sessions": True} | torpor}, parallel_config=parallel
    )


def chosen(transfer: KVTransferConfig | None, **torpor) -> KVTransferConfig:
    config = config_of(transfer, torpor)
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


@pytest.mark.parametrize("given", [None, KVTransferConfig(**SCRIPTED)], ids=["torpors", "of your own"])
def test_vllm_finds_each_member_by_the_name_that_its_statistics_have(monkeypatch, given):
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    made = chosen(given, **({} if given else {"offload": "eager", "host_bytes": "64MiB"}))
    for _ in range(2):
        configuration._register_members(made)
    for each in made.kv_connector_extra_config["connectors"]:
        name = each["kv_connector"]
        assert KVConnectorFactory.get_connector_class_by_name(name).__name__ == name
    configuration._register_members(None)
    configuration._register_members(KVTransferConfig(**OFFLOADING))


def test_ranks_without_experts_are_refused_before_they_stop_knowing_of_each_other():
    config = config_of(None, {}, ranks=2)
    with pytest.raises(errors.Unsupported, match="sessions: data parallelism"):
        configuration._choose_connector(config, Options.of(config))
    alone = config_of(None, {}, ranks=2, external=True)
    configuration._choose_connector(alone, Options.of(alone))
    assert alone.kv_transfer_config.kv_connector == "TorporAdmit"


def test_torpors_own_is_a_member_too_and_beside_others_it_is_named():
    made = chosen(None, offload="eager", host_bytes="64MiB")
    assert [each["kv_connector"] for each in made.kv_connector_extra_config["connectors"]] == [
        "TorporAdmit", "TorporConnector",
    ]  # fmt: skip
    assert len(chosen(KVTransferConfig(**TORPORS)).kv_connector_extra_config["connectors"]) == 2
    with pytest.raises(errors.InvalidArgument, match="option offload beside the KV connector OffloadingConnector"):
        chosen(KVTransferConfig(**OFFLOADING), offload="eager", host_bytes="64MiB")


@pytest.mark.parametrize("transfer", [None, OFFLOADING])
def test_the_console_stops_an_engine_whose_connectors_are_torpors(monkeypatch, transfer):
    own = {} if transfer else {"offload": "eager", "host_bytes": "64MiB"}
    made = chosen(KVTransferConfig(**transfer) if transfer else None, **own)
    operates = []
    core = SimpleNamespace(begin_control=lambda *given: operates.append(given[0]), may_step=None)
    options = SimpleNamespace(of=lambda _: SimpleNamespace(console="control", recordings_dir=None))
    monkeypatch.setattr(slots, "_core", core)
    monkeypatch.setattr(slots, "Options", options)
    config = SimpleNamespace(kv_transfer_config=made, parallel_config=SimpleNamespace(data_parallel_size=1))
    slots.begin_control(SimpleNamespace(vllm_config=config))
    assert made.kv_connector == "MultiConnector" and operates == [transfer is None]


def test_torpors_tiers_know_a_request_whose_blocks_are_never_looked_up():
    side, known = SchedulerSide.__new__(SchedulerSide), []
    side.core, side.adapters, side._has_lower = SimpleNamespace(know=known.append), None, False
    request = SimpleNamespace(request_id="a", skip_reading_prefix_cache=True, lora_request=None)
    side.queued(request)
    assert known == [request]
