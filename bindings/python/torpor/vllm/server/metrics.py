# SPDX-License-Identifier: Apache-2.0
"""torpor_* on vLLM's /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
STATES = ("starting", "awake", "falling asleep", "asleep", "waking", "failed", "ending")


class Metrics:
    def __init__(self, registry=None):
        where = {} if registry is None else {"registry": registry}
        self.operations = Counter(
            "torpor_operations", "Sleeps, wakes and checkpoints by outcome.", ["operation", "to", "outcome"], **where
        )
        self.automatic = Counter(
            "torpor_automatic_operations",
            "Sleeps of an idle server, and wakes for a request: those of torpor_operations that nobody asked for.",
            ["operation"],
            **where,
        )
        self.seconds = Histogram(
            "torpor_operation_seconds",
            "How long they took; of a checkpoint, how long the engine stood still.",
            ["operation", "to"],
            buckets=_SECONDS,
            **where,
        )
        self.phase_seconds = Histogram(
            "torpor_phase_seconds", "Their phases.", ["operation", "phase"], buckets=_SECONDS, **where
        )
        self.bytes = Counter("torpor_moved_bytes", "Bytes saved, restored and given back.", ["direction"], **where)
        self.tag_bytes = Gauge(
            "torpor_tag_bytes", "Memory by tag: in the engine, and kept while it sleeps.", ["tag", "place"], **where
        )
        self.state = Gauge("torpor_state", "1 for the state that the server is in.", ["state"], **where)
        self.checkpoint_time = Gauge(
            "torpor_checkpoint_timestamp_seconds", "When the last checkpoint was written.", **where
        )
        self.checkpoint_bytes = Gauge("torpor_checkpoint_bytes", "Size of the last checkpoint.", **where)
        self.restored = Counter("torpor_requests_restored", "Requests that a new process went on with.", **where)
        self.failed_requests = Counter(
            "torpor_requests_failed", "Requests that a wake could not go on with; their clients are told why.", **where
        )
        self.replayed = Counter(
            "torpor_requests_replayed",
            "Requests of a checkpoint that were brought to where their readers are: extended by tokens that were given "
            "since, added because they began since, dropped because they have ended.",
            ["how"],
            **where,
        )
        self.waited = Histogram(
            "torpor_queue_seconds", "How long requests waited for a wake, of those that did.", buckets=_SECONDS, **where
        )
        self.log_bytes = Gauge("torpor_response_log_bytes", "Size of the response log.", **where)
        self.queued = Gauge("torpor_requests_queued", "Requests that wait for a wake.", **where)
        self.refused = Counter("torpor_requests_refused", "Requests that were answered with 503.", **where)
        self.task_failures = Counter(
            "torpor_task_failures", "Failures of what the server does by itself, and goes on doing.", ["task"], **where
        )
        self.answers_dropped = Counter(
            "torpor_responses_dropped",
            "Ended answers that the response log dropped to stay within --torpor-response-log-bytes.",
            **where,
        )
        self.log_failures = Counter("torpor_response_log_failures", "Writes of the response log that failed.", **where)

    def enter(self, state: str) -> None:
        for name in STATES:
            self.state.labels(name).set(name == state)

    def record(self, operation: str, to: str, report: dict) -> None:
        self.operations.labels(operation, to, "ok").inc()
        self.seconds.labels(operation, to).observe(report["seconds"])
        for phase in report["phases"]:
            self.phase_seconds.labels(operation, phase["name"]).observe(phase["seconds"])
        for direction in ("saved", "restored", "freed"):
            self.bytes.labels(direction).inc(report[f"{direction}_bytes"])
        self.ledger(report["ledgers"])

    def ledger(self, ledgers: list[dict]) -> None:
        for tag in {tag for ledger in ledgers for tag in ledger["tags"]}:
            for place, name in (
                ("engine", "physical_bytes"),
                ("host", "backup_host_bytes"),
                ("disk", "backup_disk_bytes"),
            ):
                self.tag_bytes.labels(tag, place).set(
                    sum(ledger["tags"].get(tag, {}).get(name, 0) for ledger in ledgers)
                )

    def roll_forward(self, rolled: dict) -> None:
        for how in ("extended", "added", "dropped"):
            self.replayed.labels(how).inc(len(rolled[how]))

    def failed(self, operation: str, to: str) -> None:
        self.operations.labels(operation, to, "error").inc()
