# SPDX-License-Identifier: Apache-2.0
"""metrics.md: the metrics of a server and of the KV connector, as they are declared."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from reference.text import item, page, paragraph, plain, sentence
from torpor.vllm import connector_stats
from torpor.vllm.server.metrics import _PARTS, Metrics

_OF_ENGINE = ("model_name", "engine")
_UNLISTED = {"version", "vllm_version"}  # labels
# Values of labels whose series begin when there is something to count.
_VALUES = {
    "way": connector_stats._WAYS, "store": connector_stats._STORES, "place": tuple(_PARTS),
    "verb": connector_stats._SESSION_VERBS, "tier": connector_stats._SESSION_TIERS,
}  # fmt: skip


def metrics_page(problems: list[str]) -> str:
    """Add to `problems` each metric without a text."""
    server, connector = CollectorRegistry(), CollectorRegistry()
    Metrics("MODEL", server)
    kinds = {kind: _into(kind, connector) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    connector_stats.Metrics(config, kinds, list(_OF_ENGINE), {0: ["MODEL", "0"]})
    return page(
        "Metrics",
        paragraph(
            "They are on `/metrics` of a server. Each has the labels `model_name` and `engine`, as vLLM's own have "
            "them, and the labels that are named."
        ),
        "## Server",
        paragraph(
            "Every counter and histogram is there from the start, with 0. A gauge that nobody knows yet is absent."
        ),
        *(_metric(metric, problems) for metric in _declared(server)),
        "## KV connector",
        paragraph(
            "They are there where [the KV connector](../vllm.md#offloading-kv-while-serving) is on, for each engine. "
            "They also are in `LLM.get_metrics()` and, at intervals, in vLLM's log. Statistics must be on "
            "(`disable_log_stats=False`; in `vllm serve` they are)."
        ),
        *(_metric(metric, problems) for metric in _declared(connector)),
    )


def _into(kind, registry: CollectorRegistry):
    def make(*, multiprocess_mode: str = "", **declared):
        return kind(**declared, registry=registry)

    return make


def _declared(registry: CollectorRegistry) -> list:
    return list(registry._collector_to_names)  # in the order in which they were made


def _metric(metric, problems: list[str]) -> str:
    name = metric._name + ("_total" if metric._type == "counter" else "")
    if not metric._documentation:
        problems.append(f"the metric {name} has no text")
    facts = [f"type: {metric._type}"]
    for label in metric._labelnames:
        if label not in _OF_ENGINE:
            values = dict.fromkeys(sample.labels[label] for family in metric.collect() for sample in family.samples)
            values = values or dict.fromkeys(_VALUES.get(label, ()))
            shown = ": " + ", ".join(f"`{value}`" for value in values) if values and label not in _UNLISTED else ""
            facts.append(f"label `{label}`{shown}")
    if metric._type == "histogram":
        bounds = metric._kwargs["buckets"]
        facts.append(f"buckets: {', '.join(f'{float(bound):g}' for bound in bounds if bound != float('inf'))}")
    text = paragraph(plain(sentence(metric._documentation)))
    return "\n\n".join([f"### `{name}`", text, "\n".join(item(fact) for fact in facts)])
