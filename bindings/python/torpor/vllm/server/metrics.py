# SPDX-License-Identifier: Apache-2.0
"""torpor_* on vLLM's /metrics, with the labels that vLLM's own series have: model_name and engine.

Every series of a counter and of a histogram is there from the start, with 0: otherwise the first failure would be a
series that begins with 1, and no increase. A gauge whose value is not known yet is absent.
"""

from __future__ import annotations

from itertools import product

import vllm
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from torpor import _core
from torpor.vllm.server.tasks import TASKS

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
STATES = (
    "starting", "awake", "falling asleep", "asleep", "waking", "failed", "ending", "standby", "taking over",
    "handing over",
)  # fmt: skip
# Which tier a sleep or a checkpoint writes to, and a wake reads from.
OPERATIONS = (
    ("sleep", "host"), ("sleep", "disk"), ("wake", "host"), ("wake", "disk"), ("wake", "response_log"),
    ("checkpoint", "disk"),
)  # fmt: skip
# Those that may have to wait until another server gives the device back: a wake, and a sleep that wakes on the way.
_WITHOUT_ROOM = (("wake", "host"), ("wake", "disk"), ("sleep", "disk"))
PHASES = {  # engine/sleep_controller_*.cpp
    "sleep": ("quiesce", "capture", "commit", "save", "verify", "detach"),
    "wake": ("open", "quiesce", "restore", "reconnect"),
    "checkpoint": ("open", "save", "verify", "commit", "quiesce", "capture"),
}
# Calls of /v1/sessions, and what came of them.
SESSION_VERBS = (
    "hibernate", "resume", "fork", "move", "delete", "demote", "prefetch", "retain", "pin", "evict",
)  # fmt: skip
SESSION_OUTCOMES = ("accepted", "clipped", "repeated", "deferred", "rejected", "missing")
AUTOMATIC = ("sleep", "sleep_to_disk", "wake")
MOVED = ("saved", "restored", "freed")
RESULTS = ("restored", "extended", "added", "dropped", "failed")
_PARTS = {"engine": "physical_bytes", "host": "backup_host_bytes", "disk": "backup_disk_bytes"}  # of memory by tag


class _Of:
    """Makes the metrics of one engine, each with the labels of the engine before its own."""

    def __init__(self, model: str, registry: CollectorRegistry):
        self._labels = {"model_name": model, "engine": "0"}
        self._registry = registry

    def __call__(self, kind, name: str, text: str, labels: tuple[str, ...] = (), values=((),), **more) -> _Series:
        """`values`: those of `labels` whose series begin with 0."""
        metric = kind(name, text, (*self._labels, *labels), registry=self._registry, **more)
        made = _Series(metric, tuple(self._labels.values()))
        for each in values:
            made.labels(*each)
        return made


class _Series:
    def __init__(self, metric, labels: tuple[str, ...]):
        self._metric, self._labels = metric, labels

    def labels(self, *values: str):
        return self._metric.labels(*self._labels, *values)

    def __getattr__(self, name: str):
        """inc, set, observe, … of a metric without labels of its own."""
        return getattr(self.labels(), name)


class Metrics:
    def __init__(self, model: str, registry: CollectorRegistry = REGISTRY):
        """Make the metrics of the engine that serves `model`."""
        self.registry = registry
        of = _Of(model, registry)
        versions = (_core.__version__, vllm.__version__)
        of(
            Gauge,
            "torpor_build_info",
            "1, with the versions of torpor and of vLLM as labels.",
            ("version", "vllm_version"),
            [versions],
        ).labels(*versions).set(1)
        self.operations = of(
            Counter,
            "torpor_operations",
            "Sleeps, wakes and checkpoints, by the tier that a sleep or a checkpoint writes to and a wake reads from, "
            "and by outcome: ok, error, or no_room if the device had no room for the wake, which is tried again. A "
            "call that changes nothing, as a sleep of an engine that sleeps, is none.",
            ("operation", "tier", "outcome"),
            [(*each, outcome) for each, outcome in product(OPERATIONS, ("ok", "error"))]
            + [(*each, "no_room") for each in _WITHOUT_ROOM],
        )
        self.automatic = of(
            Counter,
            "torpor_automatic_operations",
            "Sleeps and wakes that no caller asked for: sleep and sleep_to_disk of an idle server, wake for a request.",
            ("operation",),
            [(each,) for each in AUTOMATIC],
        )
        self.seconds = of(
            Histogram,
            "torpor_operation_seconds",
            "Seconds that a sleep or a wake took; of a checkpoint, how long the engine was stopped for it.",
            ("operation", "tier"),
            OPERATIONS,
            buckets=_SECONDS,
        )
        self.checkpoint_seconds = of(
            Histogram,
            "torpor_checkpoint_seconds",
            "Seconds from the call of a checkpoint until it was durable; the engine serves in most of them.",
            values=((),),
            buckets=_SECONDS,
        )
        self.phase_seconds = of(
            Histogram,
            "torpor_phase_seconds",
            "Seconds that one phase of a sleep, a wake or a checkpoint took. A checkpoint has two phases save: before "
            "the engine is stopped for it, and in the stop.",
            ("operation", "phase"),
            [(operation, phase) for operation, phases in PHASES.items() for phase in phases],
            buckets=_SECONDS,
        )
        self.session_actions = of(
            Counter,
            "torpor_session_actions",
            "Calls of /v1/sessions by verb and outcome: accepted; clipped, of which a part was done; repeated, which "
            "an earlier call with the same action_id had done; deferred, to be called again later; rejected; missing, "
            "for a name that is none.",
            ("verb", "outcome"),
            product(SESSION_VERBS, SESSION_OUTCOMES),
        )
        self.session_seconds = of(
            Histogram,
            "torpor_session_action_seconds",
            "Seconds that an accepted or clipped call of /v1/sessions took.",
            ("verb",),
            [(each,) for each in SESSION_VERBS],
            buckets=_SECONDS,
        )
        self.hibernated = of(
            Gauge, "torpor_hibernated_requests", "Requests that are hibernated now, in host memory or on disk."
        )
        self.bytes = of(
            Counter,
            "torpor_moved_bytes",
            "Bytes of weights and KV cache: saved by sleeps and checkpoints, restored by wakes, freed in the engine by "
            "sleeps.",
            ("direction",),
            [(each,) for each in MOVED],
        )
        self.tag_bytes = of(
            Gauge,
            "torpor_tag_bytes",
            "Bytes of one tag of memory, as weights or kv_cache: in the engine, or kept in host memory or on disk.",
            ("tag", "place"),
            (),
        )
        self.state = of(
            Gauge,
            "torpor_state",
            "1 for the state that the server is in, 0 for the others.",
            ("state",),
            [(_word(each),) for each in STATES],
        )
        self.start_time = of(
            Gauge,
            "torpor_start_timestamp_seconds",
            "Unix time at which this process had taken up what an earlier one left, and began to serve.",
            values=(),
        )
        self.start_requests = of(
            Gauge,
            "torpor_start_requests",
            "Requests of an earlier process, by what this one did with them at its start. restored: goes on as the "
            "checkpoint has it; extended: goes on with tokens that were given since; added: goes on from the response "
            "log alone; dropped: it had ended since; failed: it could not go on, and its client gets the reason.",
            ("result",),
            [(each,) for each in RESULTS],
        )
        self.failovers = of(
            Counter,
            "torpor_failovers",
            "Take-overs of this server as the standby of another one. ok: it serves; lost: another server was faster; "
            "failed: it could not go on, /torpor/ready says why.",
            ("outcome",),
            [(each,) for each in ("ok", "lost", "failed")],
        )
        self.failover_seconds = of(
            Histogram,
            "torpor_failover_seconds",
            "Seconds from the moment at which a standby noticed the end or the silence of the owner until it served.",
            buckets=_SECONDS,
        )
        self.standby_wanted = of(
            Gauge,
            "torpor_standby_wanted",
            "1: this server owns its directory as one of a pair, so another server is to be its standby; absent else.",
            values=(),
        )
        self.checkpoint_time = of(
            Gauge,
            "torpor_checkpoint_timestamp_seconds",
            "Unix time at which the newest checkpoint was written, by this process or by the one that it goes on from.",
            values=(),
        )
        self.checkpoint_not_due_time = of(
            Gauge,
            "torpor_checkpoint_not_due_timestamp_seconds",
            "Unix time at which this process last looked, after an interval of periodic checkpoints, and had none to "
            "write: nothing had changed since the newest one, or the engine was not awake.",
            values=(),
        )
        self.pushes = of(
            Counter,
            "torpor_pushes",
            "Checkpoints of this server with --torpor-object-store, by whether they reached the store: ok or error.",
            ("outcome",),
            [(each,) for each in ("ok", "error")],
        )
        self.push_time = of(
            Gauge,
            "torpor_push_timestamp_seconds",
            "Unix time at which this process last pushed a checkpoint and the answers to the object store.",
            values=(),
        )
        self.checkpoint_bytes = of(
            Gauge, "torpor_checkpoint_bytes", "Size in bytes of the newest checkpoint.", values=()
        )
        self.checkpoint_interval = of(
            Gauge,
            "torpor_checkpoint_interval_seconds",
            "Seconds between checkpoints while serving (--torpor-checkpoint-interval-seconds); absent without them.",
            values=(),
        )
        self.waited = of(
            Histogram,
            "torpor_queue_seconds",
            "Seconds that a request waited for a wake, of the requests that had to.",
            buckets=_SECONDS,
        )
        self.log_bytes = of(
            Gauge, "torpor_response_log_bytes", "Size in bytes of the response log; absent without one.", values=()
        )
        self.log_failing = of(
            Gauge,
            "torpor_response_log_failing",
            "1: the response log lacks what could not be written, so a crash would lose answers; 0: it has everything. "
            "Absent without one.",
            values=(),
        )
        self.queued = of(Gauge, "torpor_requests_queued", "Requests that wait for a wake now.")
        self.refused = of(
            Counter,
            "torpor_requests_refused",
            "Requests that were refused (503) because the server was not awake: asleep, a standby, failed or ending.",
        )
        self.task_failures = of(
            Counter,
            "torpor_task_failures",
            "Unexpected failures of what the server does by itself, by task; each is logged, and the server goes on.",
            ("task",),
            [(_word(each),) for each in TASKS],
        )
        self.answers_dropped = of(
            Counter,
            "torpor_responses_dropped",
            "Ended answers that the response log dropped to stay within --torpor-response-log-bytes.",
        )
        self.log_failures = of(
            Counter,
            "torpor_response_log_failures",
            "Writes of the response log that failed: a crash would lose answers.",
        )

    def enter(self, state: str) -> None:
        for name in STATES:
            self.state.labels(_word(name)).set(name == state)

    def record(self, operation: str, tier: str, report: dict) -> None:
        """Count what an operation did; one that changed nothing is none."""
        self.ledger(report["ledgers"])
        if operation != "checkpoint" and not report["changed"]:
            return
        self.operations.labels(operation, tier, "ok").inc()
        self.seconds.labels(operation, tier).observe(report["seconds"])
        for phase in report["phases"]:
            self.phase_seconds.labels(operation, phase["name"]).observe(phase["seconds"])
        for direction in MOVED:
            self.bytes.labels(direction).inc(report[f"{direction}_bytes"])

    def failed(self, operation: str, tier: str, no_room: bool = False) -> None:
        """`no_room`: on the device, for a wake."""
        self.operations.labels(operation, tier, "no_room" if no_room else "error").inc()

    def pushed(self, ok: bool, now: float) -> None:
        self.pushes.labels("ok" if ok else "error").inc()
        if ok:
            self.push_time.set(now)

    def task_failed(self, task: str) -> None:
        self.task_failures.labels(_word(task)).inc()

    def ledger(self, ledgers: list[dict]) -> None:
        for tag, (place, name) in product({tag for ledger in ledgers for tag in ledger["tags"]}, _PARTS.items()):
            self.tag_bytes.labels(tag, place).set(sum(ledger["tags"].get(tag, {}).get(name, 0) for ledger in ledgers))

    def started(self, go_on: int, replayed: dict[str, list[str]], ended: dict[str, str]) -> None:
        """Count what a start did with the requests that it found. `go_on`: how many the engine has; `replayed`: which
        of these were extended, added or dropped, as a report has them; `ended`: the result of those that it ended."""
        counts = dict.fromkeys(RESULTS, 0) | {"dropped": len(replayed["dropped"])}
        for result in ("extended", "added"):
            counts[result] = len(set(replayed[result]) - set(ended))
        counts["restored"] = go_on - len(ended) - counts["extended"] - counts["added"]
        for result in ended.values():
            counts[result] += 1
        for result, count in counts.items():
            self.start_requests.labels(result).inc(count)


def _word(text: str) -> str:
    """A label's value, which has no blanks."""
    return text.replace(" ", "_")
