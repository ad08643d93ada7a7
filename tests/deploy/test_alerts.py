# SPDX-License-Identifier: Apache-2.0
"""Each alert over failures, crashes and restarts, by promtool, on the series of real servers without an engine.

A scene lets servers live and scrapes them once a minute, as Prometheus does: what a process exports, under the address
that it has, and nothing of a process that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from chart import CHART, ROOT
from prometheus_client import CollectorRegistry, Counter, generate_latest

sys.path.insert(0, str(ROOT / "tests/python"))

from server_stubs import Engine, build, client, no_settings, run, started  # noqa: F401
from test_switch import answer_of
from torpor.errors import FileError, Incompatible, NotEnoughRoom
from torpor.vllm.server import automatic, life
from torpor.vllm.server.metrics import Metrics

RULES = CHART / "files/alerts.yaml"
COMPLETIONS = [("POST", "/v1/completions")]
SCENES: dict[str, tuple[set[str], Callable]] = {}


def scene(*alerts: str):
    """A scene that tries these alerts."""

    def added(function):
        SCENES[function.__name__] = set(alerts), function
        return function

    return added


class Watched:
    """Servers by address, as Prometheus sees them, and what is to be firing when."""

    def __init__(self, monkeypatch, folder: Path):
        self._monkeypatch, self.folder = monkeypatch, folder
        self._series: dict[str, list[str]] = {}
        self._servers: dict[str, life.Server] = {}
        self._minute = 0
        self.jobs = ["torpor"]  # of Prometheus: each scrapes every server
        self.tests: list[dict] = []
        self.fired: set[str] = set()
        self._sleepers: list[tuple[float, asyncio.Future]] = []  # periodic checkpoints, until when
        clock = SimpleNamespace(time=lambda: self._minute * 60.0, monotonic=lambda: self._minute * 60.0)
        monkeypatch.setattr(life, "time", clock)
        monkeypatch.setattr(automatic, "time", clock)
        monkeypatch.setattr(automatic, "asyncio", SimpleNamespace(sleep=self._sleep))

    async def _sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._minute * 60.0 + seconds, woken))
        await woken

    def unfit(self) -> Engine:
        """An engine that the checkpoint of its own directory does not fit."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        return Engine(folder, wakes_with=Incompatible("another model", "use another one"))

    def process(self, address: str, engine: Engine | None = None, **settings) -> life.Server:
        """A new process that is about to start."""
        app, server = build(self._monkeypatch, COMPLETIONS, engine=engine, **settings)
        server.app = app
        server.tokens = Counter(
            "vllm:generation_tokens", "Of vLLM.", ["model_name", "engine"], registry=server.metrics.registry
        ).labels("model", "0")
        self._servers[address] = server
        return server

    async def serve(self, address: str, engine: Engine | None = None, **settings) -> life.Server:
        server = self.process(address, engine, **settings)
        await started(server)
        return server

    def kill(self, address: str) -> None:
        del self._servers[address]

    def scrape(self, minutes: int = 1, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(minutes):
            each()
            seen = {}
            for address, server in self._servers.items():
                for family in server.metrics.registry.collect():
                    for sample in family.samples:
                        if not sample.name.endswith(("_created", "_bucket")):
                            for job in self.jobs:
                                labels = sample.labels | {"instance": address, "job": job}
                                words = ",".join(f'{name}="{value}"' for name, value in labels.items())
                                seen[f"{sample.name}{{{words}}}"] = f"{sample.value:g}"
            for name in seen.keys() - self._series.keys():
                self._series[name] = ["_"] * self._minute
            for name, values in self._series.items():
                gone = "stale" if values and values[-1] not in ("_", "stale") else "_"
                values.append(seen.get(name, gone))
            self._minute += 1

    async def live(self, minutes: int, each: Callable[[], None] = lambda: None) -> None:
        """As scrape(), of servers that write periodic checkpoints."""
        while not self._sleepers:
            await asyncio.sleep(0)
        for _ in range(minutes):
            self.scrape(1, each)
            count = len(self._sleepers)
            for due in [each for each in self._sleepers if each[0] <= self._minute * 60.0]:
                self._sleepers.remove(due)
                due[1].set_result(None)
            while len(self._sleepers) < count:
                await asyncio.sleep(0.001)

    def silent(self, *alerts: str) -> None:
        self.tests += [{"eval_time": f"{self._minute - 1}m", "alertname": alert} for alert in alerts]

    def firing(self, alert: str, summary: str, *each: dict[str, str], **labels: str) -> None:
        """`each`: it fires once for each of these labels, which the summary may name."""
        rule = next(each for each in rules() if each["alert"] == alert)
        self.fired.add(alert)
        expected = [
            {
                "exp_labels": rule["labels"] | {"model_name": "model"} | labels | more,
                "exp_annotations": {
                    "summary": summary.format(**more),
                    "description": rule["annotations"]["description"],
                },
            }
            for more in each or ({},)
        ]
        self.tests.append({"eval_time": f"{self._minute - 1}m", "alertname": alert, "exp_alerts": expected})

    def document(self) -> dict:
        series = [{"series": name, "values": " ".join(values)} for name, values in self._series.items()]
        test = {"interval": "1m", "input_series": series, "alert_rule_test": self.tests}
        return {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}


@contextlib.contextmanager
def no_file_grows():
    """As on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rules() -> list[dict]:
    return yaml.safe_load(RULES.read_text())["groups"][0]["rules"]


@scene("TorporOperationsFail")
async def the_first_failure_counts_also_of_a_new_process(watched):
    server = await watched.serve("a")
    watched.scrape(5)
    watched.silent("TorporOperationsFail")
    server.engine.fails_with = NotEnoughRoom("the volume is full")
    with pytest.raises(NotEnoughRoom):
        await server.sleep(to="disk")
    server.engine.fails_with = None
    watched.scrape()
    failing = {"instance": "a", "operation": "sleep", "tier": "disk"}
    watched.firing("TorporOperationsFail", "sleep (disk) fails on a", **failing)
    await server.sleep(to="disk")  # now there is room
    watched.scrape(13)
    watched.firing("TorporOperationsFail", "sleep (disk) fails on a", **failing)
    watched.scrape(3)
    watched.silent("TorporOperationsFail")
    watched.kill("a")  # a crash, and a new process with the same address
    watched.scrape(2)
    server = await watched.serve("a")
    watched.scrape(3)
    watched.silent("TorporOperationsFail")
    watched.kill("a")
    server = await watched.serve("b")  # and with another one
    server.engine.fails_with = NotEnoughRoom("the volume is full")
    with pytest.raises(NotEnoughRoom):
        await server.sleep()
    watched.scrape()
    failing = {"instance": "b", "operation": "sleep", "tier": "host"}
    watched.firing("TorporOperationsFail", "sleep (host) fails on b", **failing)
    watched.scrape(16)
    watched.silent("TorporOperationsFail")


@scene("TorporServerFailed", "TorporOperationsFail")
async def a_server_that_fails_at_each_start(watched):
    def summary(address: str) -> str:
        return f"{address} cannot go on with what it finds, and serves nothing"

    of = {"engine": "0", "job": "torpor", "state": "failed"}
    await watched.serve("a")
    watched.scrape(5)
    watched.kill("a")
    watched.scrape(1)
    for _ in range(4):  # restarted by its liveness probe; it loads its model for two minutes
        assert (await watched.serve("a", watched.unfit())).problem.what == "another model"
        watched.scrape(1)
        watched.kill("a")
        watched.scrape(2)
    watched.firing("TorporServerFailed", summary("a"), instance="a", **of)
    watched.firing("TorporOperationsFail", "wake (disk) fails on a", instance="a", operation="wake", tier="disk")
    await watched.serve("a")
    watched.scrape(1)
    watched.silent("TorporServerFailed")
    watched.kill("a")
    await watched.serve("b", watched.unfit())
    watched.scrape(1)
    watched.silent("TorporServerFailed")  # not yet
    watched.scrape(1)
    watched.firing("TorporServerFailed", summary("b"), instance="b", **of)
    watched.kill("b")
    await watched.serve("c")
    watched.scrape(9)
    watched.firing("TorporServerFailed", summary("b"), instance="b", **of)  # nobody knows that it does not come again
    watched.scrape(2)
    watched.silent("TorporServerFailed")


@scene("TorporRequestsLost")
async def a_new_address_that_lost_requests(watched):
    def lost(address: str, count: int) -> str:
        return f"{address} could not go on with {count} requests of its predecessor"

    async def starts_and_loses(address: str, count: int) -> None:
        server = watched.process(address)
        server.metrics.start_requests.labels("failed").inc(count)
        await started(server)
        watched.scrape()
        watched.firing("TorporRequestsLost", lost(address, count), instance=address, **of)

    of = {"engine": "0", "job": "torpor", "result": "failed"}
    await watched.serve("a")
    watched.scrape(5)
    watched.kill("a")
    await starts_and_loses("b", 3)
    watched.scrape(58)
    watched.firing("TorporRequestsLost", lost("b", 3), instance="b", **of)
    watched.scrape(2)
    watched.silent("TorporRequestsLost")
    watched.kill("b")
    await starts_and_loses("b", 1)
    watched.kill("b")
    await watched.serve("b")  # the next process has nothing to lose
    watched.scrape()
    watched.silent("TorporRequestsLost")


@scene("TorporAnswersAtRisk")
async def a_log_that_cannot_be_written(watched):
    of = {"engine": "0", "job": "torpor"}
    server = await watched.serve("a")
    watched.scrape(5)
    watched.silent("TorporAnswersAtRisk")
    server.recorder._failed(FileError("no space left on device", ""))
    watched.scrape()
    watched.firing("TorporAnswersAtRisk", "a cannot write its response log", instance="a", **of)
    watched.scrape(5)
    watched.silent("TorporAnswersAtRisk")
    watched.kill("a")
    await watched.serve("b")
    watched.scrape(2)
    watched.silent("TorporAnswersAtRisk")
    server = await watched.serve("c")
    server.recorder._failed(FileError("no space left on device", ""))  # before anybody has looked
    watched.scrape()
    watched.firing("TorporAnswersAtRisk", "c cannot write its response log", instance="c", **of)
    watched.scrape(6)
    watched.silent("TorporAnswersAtRisk")


@scene("TorporAnswersAtRisk")
async def a_log_that_stays_broken_with_one_failed_write(watched):
    def fires() -> None:
        watched.firing("TorporAnswersAtRisk", "a cannot write its response log", instance="a", engine="0", job="torpor")

    server = await watched.serve("a", Engine(watched.folder), response_log_sync="never")
    watched.scrape(5)
    watched.silent("TorporAnswersAtRisk")
    with no_file_grows():
        server.recorder._start(answer_of("a"))
        server.recorder._start(answer_of("b"))
        assert server.recorder.failures == 1
        watched.scrape(20)
        fires()
    for _ in range(6000):  # now there is room, and the log tries once a second
        if not server.recorder.answers.counts()["problem"]:
            break
        await asyncio.sleep(0.01)
    watched.scrape()
    watched.silent("TorporAnswersAtRisk")


@scene("TorporPushesFail")
async def a_push_that_fails(watched):
    of = {"engine": "0", "outcome": "error"}
    server = await watched.serve("a")
    watched.scrape(5)
    server.metrics.pushed(True, 0.0)
    watched.scrape()
    watched.silent("TorporPushesFail")
    server.metrics.pushed(False, 0.0)
    watched.scrape()
    watched.firing("TorporPushesFail", "a cannot push to its object store", instance="a", job="torpor", **of)
    server.metrics.pushed(True, 0.0)
    watched.scrape(16)
    watched.silent("TorporPushesFail")
    watched.kill("a")
    server = await watched.serve("b")
    server.metrics.pushed(False, 0.0)  # before anybody has looked
    watched.scrape()
    watched.firing("TorporPushesFail", "b cannot push to its object store", instance="b", job="torpor", **of)


@scene("TorporCheckpointOld")
async def a_checkpoint_that_is_due(watched):
    of = {"engine": "0", "job": "torpor"}
    due = await watched.serve("a", checkpoint_interval_seconds=60)
    idle = await watched.serve("idle", checkpoint_interval_seconds=60)
    never = await watched.serve("never asked")
    rare = await watched.serve("rare", checkpoint_interval_seconds=3600)

    def give() -> None:
        for server in (due, never, rare):
            server.tokens.inc(100)

    watched.scrape(20, give)
    watched.silent("TorporCheckpointOld")
    watched.scrape(3, give)
    watched.firing("TorporCheckpointOld", "a has written no checkpoint for 22m 0s", instance="a", **of)
    await due.checkpoint()
    await never.checkpoint()
    watched.scrape(1, give)
    watched.silent("TorporCheckpointOld")
    watched.scrape(20, give)
    watched.silent("TorporCheckpointOld")
    watched.scrape(3, give)
    watched.firing("TorporCheckpointOld", "a has written no checkpoint for 23m 0s", instance="a", **of)
    watched.kill("a")  # what comes up elsewhere goes on from that checkpoint, and writes one soon
    due = await watched.serve("b", checkpoint_interval_seconds=60)
    due.metrics.checkpoint_time.set(23 * 60)
    watched.scrape(3, give)
    watched.silent("TorporCheckpointOld")
    await due.checkpoint()
    watched.scrape(10, give)
    watched.silent("TorporCheckpointOld")
    assert idle.state == "awake"


@scene("TorporCheckpointOld")
async def a_checkpoint_that_is_not_due_yet(watched):
    server = await watched.serve("a", Engine(watched.folder), checkpoint_interval_seconds=600, response_log="off")
    task = asyncio.create_task(server._automatic.checkpoints())

    def give() -> None:
        server.tokens.inc(100)
        server.begun += 1

    await watched.live(11, give)
    assert server.last_checkpoint["time"] == 600
    await watched.live(10)
    assert server.last_checkpoint["time"] == 1200
    await watched.live(60)
    assert server.last_checkpoint["time"] == 1200  # there was nothing to write
    await watched.live(8, give)
    watched.silent("TorporCheckpointOld")
    await server.sleep(to="disk")
    await watched.live(62)
    await server.wake_up()
    await watched.live(8, give)
    watched.silent("TorporCheckpointOld")

    async def fails(**_):
        raise NotEnoughRoom("the volume is full")

    server.engine.checkpoint = fails
    await watched.live(24, give)
    watched.silent("TorporCheckpointOld")
    await watched.live(8, give)
    of = {"instance": "a", "engine": "0", "job": "torpor"}
    watched.firing("TorporCheckpointOld", "a has written no checkpoint for 40m 0s", **of)
    task.cancel()
    watched.kill("a")
    server = await watched.serve("b", checkpoint_interval_seconds=600, response_log="off")
    server.metrics.checkpoint_time.set(1200)
    watched.scrape(9, give)
    watched.silent("TorporCheckpointOld")


@scene("TorporCheckpointOld", "TorporRequestsLost")
async def servers_that_two_jobs_scrape(watched):
    watched.jobs = ["services", "pods"]
    server = watched.process("a", checkpoint_interval_seconds=60)
    server.metrics.start_requests.labels("failed").inc(2)
    await started(server)
    watched.scrape(23, lambda: server.tokens.inc(100))
    of, each = {"instance": "a", "engine": "0"}, [{"job": job} for job in watched.jobs]
    watched.firing("TorporCheckpointOld", "a has written no checkpoint for 22m 0s", *each, **of)
    of |= {"result": "failed"}
    watched.firing("TorporRequestsLost", "a could not go on with 2 requests of its predecessor", *each, **of)


@scene("TorporRequestsWait", "TorporRequestsRefused", "TorporStuck")
async def those_who_wait_and_those_who_are_refused(watched):
    alerts = ("TorporRequestsWait", "TorporRequestsRefused", "TorporStuck")
    of = {"engine": "0", "job": "torpor"}
    waits, refuses = await watched.serve("a"), await watched.serve("b", new_requests="refuse")
    watched.scrape(3)
    for server in (waits, refuses):
        await server.sleep()
    async with client(waits.app) as http, client(refuses.app) as refused:
        waiting = [asyncio.create_task(http.post("/v1/completions")) for _ in range(4)]
        while waits.queued < 4:
            await asyncio.sleep(0)
        for _ in range(5):
            assert (await refused.post("/v1/completions")).status_code == 503
            watched.scrape()
        watched.silent(*alerts)
        for _ in range(7):
            assert (await refused.post("/v1/completions")).status_code == 503
            watched.scrape()
        said = "For 5 minutes there were always requests that wait for a to wake; now 4"
        watched.firing("TorporRequestsWait", said, instance="a", **of)
        watched.firing("TorporRequestsRefused", "b answers requests with 503", instance="b", **of)
        await waits.wake_up()
        await asyncio.gather(*waiting)
        await refuses.wake_up()
    watched.scrape(6)
    watched.silent(*alerts)
    waits.enter("falling asleep")
    watched.scrape(3)
    waits.enter("waking")
    watched.scrape(7)
    watched.silent("TorporStuck")
    watched.scrape()
    watched.firing("TorporStuck", "a has been on its way for 10 minutes", instance="a")
    watched.kill("a")  # it is restarted
    watched.scrape()
    watched.silent(*alerts)
    await watched.serve("c")
    watched.scrape(12)
    watched.silent(*alerts)


@scene("TorporStuck")
async def a_switch_that_does_not_end(watched):
    states = {"owner": "handing over", "standby": "taking over"}
    for address, state in states.items():
        watched.process(address).enter(state)
    watched.scrape(10)
    watched.silent("TorporStuck")
    watched.scrape()
    each = [{"instance": address} for address in states]
    watched.firing("TorporStuck", "{instance} has been on its way for 10 minutes", *each)


@scene("TorporNoStandby")
async def an_owner_whose_standby_has_ended(watched):
    def standby(address: str) -> None:
        watched.process(address).enter("standby")

    for address in ("a", "c"):
        (await watched.serve(address)).metrics.standby_wanted.set(1)
    await watched.serve("alone")  # it wants none
    for address in ("b", "d"):
        standby(address)
    watched.scrape(20)
    watched.silent("TorporNoStandby")
    watched.kill("d")
    watched.scrape(9)
    watched.silent("TorporNoStandby")
    standby("e")  # in time
    watched.scrape(15)
    watched.silent("TorporNoStandby")
    watched.kill("e")
    watched.scrape(13)
    watched.firing("TorporNoStandby", "2 servers of model want a standby, and fewer are there", job="torpor")
    standby("f")
    watched.scrape(2)
    watched.silent("TorporNoStandby")


@pytest.mark.parametrize("name", SCENES)
def test_alerts_fire_and_stop(monkeypatch, tmp_path, name):
    alerts, play = SCENES[name]
    watched = Watched(monkeypatch, tmp_path)
    run(play(watched))
    assert watched.fired == alerts
    file = tmp_path / "scene.yaml"
    file.write_text(yaml.safe_dump(watched.document(), width=1 << 20))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried():
    assert {rule["alert"] for rule in rules()} == {alert for alerts, _ in SCENES.values() for alert in alerts}


def test_prometheus_likes_the_metrics():
    registry = CollectorRegistry()
    Metrics("model", registry).enter("awake")
    subprocess.run(["promtool", "check", "metrics"], input=generate_latest(registry), check=True)
