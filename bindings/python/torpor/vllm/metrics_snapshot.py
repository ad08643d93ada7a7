# SPDX-License-Identifier: Apache-2.0
"""torpor's metrics as LLM.get_metrics() gives vLLM's, which takes only names that begin with "vllm:"."""

from __future__ import annotations

from prometheus_client import REGISTRY
from prometheus_client import Metric as Family
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric


def snapshot() -> list[Metric]:
    """Return what this process has of torpor's metrics: one value for each set of labels.

    A counter has its name without "_total", as vLLM's have; the buckets of a histogram go by their upper limit.
    """
    metrics: list[Metric] = []
    for family in REGISTRY.collect():
        if not family.name.startswith("torpor_"):
            continue
        if family.type == "gauge":
            metrics += [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
        elif family.type == "counter":
            total = f"{family.name}_total"
            metrics += [
                Counter(family.name, sample.labels, int(sample.value))
                for sample in family.samples
                if sample.name == total
            ]
        elif family.type == "histogram":
            metrics += _histograms(family)
    return metrics


def _histograms(family: Family) -> list[Histogram]:
    by_labels: dict[tuple, Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        histogram = by_labels.setdefault(tuple(sorted(labels.items())), Histogram(family.name, labels, 0, 0.0, {}))
        part = sample.name.removeprefix(family.name)
        if part == "_bucket":
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif part == "_count":
            histogram.count = int(sample.value)
        elif part == "_sum":
            histogram.sum = sample.value
    return list(by_labels.values())
