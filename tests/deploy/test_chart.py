# SPDX-License-Identifier: Apache-2.0
"""The chart with many values: valid for Kubernetes, and its promises kept in each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart import CHART, ROOT, manifests, notes, render

OF_AN_OPERATOR = ("ServiceMonitor", "PrometheusRule")  # Kubernetes has no schemas of these
EVERYTHING = {
    "replicas": 3, "vllmArgs": ["--tensor-parallel-size=2", "--max-model-len=4096"], "state.storageClass": "fast",
    "torpor.checkpointIntervalSeconds": 30, "torpor.sleepAfterSeconds": 60.5, "torpor.sleepToDiskAfterSeconds": 3600,
    "drain.endpointSeconds": 10, "drain.checkpointSeconds": 300, "startSeconds": 1801,
    "nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"}, "affinity": {"podAntiAffinity": {}},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "resources": {"limits": {"nvidia.com/gpu": 2}}, "model.existingClaim": "",
    "networkPolicy.from": [{"namespaceSelector": {"matchLabels": {"name": "gateway"}}}],
    "serviceAccountName": "reads-the-bucket",
    "serviceMonitor.enabled": True, "prometheusRule.enabled": True,
    "serviceMonitor.labels": {"release": "stack"}, "prometheusRule.labels": {"release": "stack"},
    "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "keyFile.existingSecret": "seals", "keyFile.key": "of-2026", "torpor.onDisconnect": "continue",
    "imagePullSecrets": [{"name": "registry"}], "initContainers": [{"name": "before", "image": "busybox"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}], "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}  # fmt: skip


# The values of the first chart, by the names of now: `helm upgrade --reuse-values` brings no others.
FIRST_CHART = {
    "replicas": "", "image": "repository tag pullPolicy", "model": "path existingClaim", "vllmArgs": "",
    "keys": "existingSecret client admin", "state": "size storageClass",
    "torpor": "onWakeError checkpointIntervalSeconds wakeOnRequest sleepAfterSeconds sleepToDiskAfterSeconds "
              "responseLogSync",
    "drain": "endpointSeconds checkpointSeconds processSeconds", "startSeconds": "", "service": "type port",
    "nodeSelector": "", "tolerations": "", "affinity": "", "resources": "", "sharedMemory": "",
    "podSecurityContext": "", "networkPolicy": "enabled from", "serviceMonitor": "enabled",
    "prometheusRule": "enabled", "extraEnv": "",
}  # fmt: skip


def test_values_of_an_older_chart_render_as_with_the_defaults_of_those_added_since():
    chosen = {"torpor.gpuPreserveState": False, "keyFile": {"existingSecret": "seals", "key": "key"}}
    for changes in ({"serviceMonitor.enabled": True, "prometheusRule.enabled": True}, chosen):
        assert render(changes, of_chart=FIRST_CHART) == render(changes)


@pytest.mark.parametrize("changes", [{}, EVERYTHING, {"torpor.wakeOnRequest": False, "networkPolicy.enabled": False}])
def test_what_it_renders_is_valid_and_keeps_its_promises(changes):
    found = manifests(render(changes))
    for (kind, _), manifest in found.items():
        if kind not in OF_AN_OPERATOR:
            kubernetes_validate.validate(manifest, "1.30", strict=True)
    pod = found["StatefulSet", "llm"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word.split("=", 1) for word in container["args"] if word.startswith("--") and "=" in word)
    saving = int(options["--torpor-sigterm-seconds"])
    delay = int(container["lifecycle"]["preStop"]["exec"]["command"][2].split()[1])
    assert pod["terminationGracePeriodSeconds"] >= delay + saving + 25
    start = container["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] >= changes.get("startSeconds", 900)
    selector = found["StatefulSet", "llm"]["spec"]["selector"]["matchLabels"].items()
    assert selector <= found["StatefulSet", "llm"]["spec"]["template"]["metadata"]["labels"].items()
    for name in ("llm", "llm-pods"):
        assert found["Service", name]["spec"]["selector"].items() == selector
    assert found["StatefulSet", "llm"]["spec"]["serviceName"] == "llm-pods"
    # Without that kubelet changes the mode of every file of the volume at each mount.
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
    for each in [container, *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in each.get("volumeMounts", [])} <= volumes


def test_every_switch_reaches_the_server():
    found = manifests(render(EVERYTHING))
    words = found["StatefulSet", "llm"]["spec"]["template"]["spec"]["containers"][0]["args"]
    wanted = {
        "--torpor-checkpoint-interval-seconds=30", "--torpor-sleep-after-seconds=60.5",
        "--torpor-sleep-to-disk-after-seconds=3600", "--torpor-wake-on-request", "--tensor-parallel-size=2",
        "--torpor-sigterm-seconds=300", "--torpor-on-disconnect=continue",
    }  # fmt: skip
    assert wanted <= set(words)
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    assert found["PrometheusRule", "llm"]["spec"] == rules
    assert found["StatefulSet", "llm"]["spec"]["template"]["spec"]["serviceAccountName"] == "reads-the-bucket"
    assert found["ServiceMonitor", "llm"]["spec"]["endpoints"][0]["path"] == "/metrics"
    without = manifests(render({"torpor.wakeOnRequest": False}))["StatefulSet", "llm"]
    assert "--torpor-wake-on-request" not in without["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_key_is_copied_for_the_server_alone():
    pod = manifests(render(EVERYTHING))["StatefulSet", "llm"]["spec"]["template"]["spec"]
    copies, before = pod["initContainers"]
    (container,) = pod["containers"]
    assert before["name"] == "before" and copies["image"] == container["image"]
    *program, source, target = copies["command"]
    assert program == ["install", "-m", "0600"] and f"--torpor-key-file={target}" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {each["mountPath"]: volumes[each["name"]] for each in copies["volumeMounts"]}
    (item,) = mounted[str(Path(source).parent)]["secret"]["items"]
    assert item == {"key": "of-2026", "path": Path(source).name}
    assert mounted[str(Path(target).parent)]["emptyDir"]["medium"] == "Memory"
    assert {"name": "key", "mountPath": str(Path(target).parent), "readOnly": True} in container["volumeMounts"]
    assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "initContainers" not in manifests(render())["StatefulSet", "llm"]["spec"]["template"]["spec"]


def test_prometheus_scrapes_each_pod_once():
    found = manifests(render(EVERYTHING))
    selected = found["ServiceMonitor", "llm"]["spec"]["selector"]["matchLabels"].items()
    labels = {name: each["metadata"]["labels"].items() for (kind, name), each in found.items() if kind == "Service"}
    # That one has also the pods that are not ready: alerts are of them.
    assert [name for name in labels if selected <= labels[name]] == ["llm-pods"]
    assert found["Service", "llm-pods"]["spec"]["publishNotReadyAddresses"] is True
    for kind in OF_AN_OPERATOR:
        assert found[kind, "llm"]["metadata"]["labels"]["release"] == "stack"


def test_who_has_prometheus_elsewhere_is_told_to_let_it_in():
    assert "networkPolicy.from" in notes({"serviceMonitor.enabled": True})
    let_in = {"serviceMonitor.enabled": True, "networkPolicy.from": EVERYTHING["networkPolicy.from"]}
    assert "networkPolicy" not in notes() + notes(let_in)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys.existingSecret": ""}, {"torpor.onWakeError": "ignore"}, {"drain.checkpointSeconds": 0},
        {"state.size": "fifty"}, {"torpor.sleepafter": 3}, {"replicas": -1}, {"torpor.onDisconnect": "resume"},
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_the_schema(wrong):
    with pytest.raises(jsonschema.ValidationError):
        render(wrong)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(RuntimeError, match=r"sleepToDiskAfterSeconds needs torpor.sleepAfterSeconds"):
        render({"torpor.sleepToDiskAfterSeconds": 60})
    with pytest.raises(RuntimeError, match=r"sleepAfterSeconds needs torpor.wakeOnRequest"):
        render({"torpor.sleepAfterSeconds": 60, "torpor.wakeOnRequest": False})


def test_kustomize_builds_the_base():
    built = subprocess.run(
        ["kubectl", "kustomize", ROOT / "deploy/kustomize/base"], check=True, capture_output=True, text=True
    ).stdout
    assert manifests(built) == manifests(render(service="Kustomize"))
