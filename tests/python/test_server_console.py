# SPDX-License-Identifier: Apache-2.0
"""The console of a server, over HTTP and over its socket, and its page: without an engine."""

import base64
import contextlib
import hashlib
import json
import re
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import result_of
from inspector import BINARY
from server_calls import EVERYTHING
from server_stubs import ADMIN, CLIENT, OTHER_CLIENT, build, client, no_settings, run, started  # noqa: F401
from torpor.vllm.server import routes

import torpor.console
from torpor import _core, errors

PROCESS = Path(__file__).parent / "front_process.py"
KEYS = ("--api-key", CLIENT, OTHER_CLIENT)
CALLS = {each["method"]: each for each in _core.control_methods()}


def test_the_client_knows_what_a_server_does():
    assert {name for name, each in CALLS.items() if each["front"]} == torpor.console.FRONT_METHODS


@pytest.mark.parametrize("method", sorted(CALLS))
def test_every_call_needs_the_admin_key(monkeypatch, method):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app) as of_client, client(app, None) as nobody, client(app, ADMIN) as admin:
            before = len(server.engine.calls)
            assert (await nobody.post(f"/torpor/console/{method}")).status_code == 401
            assert (await of_client.post(f"/torpor/console/{method}")).status_code == 403
            assert len(server.engine.calls) == before
            # Sleep and wake need no socket of the engine's; everything else is asked there, and this one has none.
            status = (await admin.post(f"/torpor/console/{method}")).status_code
            assert status == (200 if CALLS[method]["front"] else 409)

    run(scene())


def test_a_server_sleeps_and_wakes_by_calls_over_http(monkeypatch):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, ADMIN) as http:

            async def call(method, **params):
                return await http.post(f"/torpor/console/{method}", json=params)

            assert (await call("plan", level=1, to="disk")).status_code == 200
            assert server.engine.calls[-1][1]["to"] == "disk" and server.state == "awake"
            slept = (await call("sleep", level=1, tags="weights")).json()
            assert slept["status"] == "sleeping" and slept["freed_bytes"] == 1 and server.state == "asleep"
            options = {"preserve_state": True, "to": "host", "weights": None, "tags": ["weights"]}
            assert server.engine.calls[-1] == ("sleep", 1, "abort", options)
            assert (await call("wake")).json()["status"] == "awake" and server.state == "awake"
            assert (await call("checkpoint")).json()["checkpoint"] == "g-000001"
            for method, params in (
                ("sleep", {"level": 3}), ("sleep", {"level": "1"}), ("sleep", {"to": "tape"}),
                ("wake", {"kv": "maybe"}), ("plan", {"tags": "weights"}),
            ):  # fmt: skip
                answer = await call(method, **params)
                assert answer.status_code == 400 and answer.json()["error"]["next_step"], (method, params)
            assert (await call("nap")).status_code == 409  # it is asked of the engine, which has no socket here
            assert server.state == "awake"

    run(scene())


def test_over_its_socket_a_server_sleeps_and_wakes(zygote):
    result = result_of(zygote.run([PROCESS, "control"]))
    assert result["plan"] and result["sleep"] == ["sleeping", 1, "asleep"] and result["wake"] == "awake"
    assert result["failed"] == ["resource_exhausted", "the disk is full", "remove something"]
    assert result["by the command line"] == [0, "awake", ""]
    assert result["checkpoint"] == "g-000001"
    assert [each[0] for each in result["wrong"]] == ["invalid_argument"] * 3
    assert result["calls"][0][1:3] == [1, "abort"] and result["calls"][0][3]["tags"] == ["weights", "kv_cache"]
    assert result["calls"][1] == [
        "wake_up",
        None,
        {"kv": "keep", "progress": None, "early": False, "swap_in_from": None},
    ]
    assert result["events"] == [
        ["sleep", "ok"], ["wake", "ok"], ["sleep", "ok"], ["wake", "resource_exhausted"], ["wake", "ok"],
        ["checkpoint", "ok"], *[["sleep", "invalid_argument"]] * 3,
    ]  # fmt: skip


def test_a_socket_that_is_only_to_look_makes_plans_and_no_sleep(zygote):
    result = result_of(zygote.run([PROCESS, "read"]))
    assert result == {"hello": "answered", "plan": "answered"} | dict.fromkeys(
        ("sleep", "wake", "checkpoint"), "failed_precondition"
    )


@contextlib.contextmanager
def slow_engine(seconds: float):
    """The path of a socket that answers each call after so many seconds, with its parameters."""

    class Answers(socketserver.StreamRequestHandler):
        def handle(self):
            for line in self.rfile:
                call = json.loads(line)
                time.sleep(seconds)
                self.wfile.write(json.dumps({"id": call["id"], "result": call["params"]}).encode() + b"\n")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = f"{directory}/1-core-0.sock"
        with socketserver.ThreadingUnixStreamServer(path, Answers) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield path
            server.shutdown()


def test_over_http_an_engine_may_wait_as_long_as_it_was_asked_to_and_any_name_is_a_parameter(monkeypatch):
    async def scene(path):
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        monkeypatch.setattr(routes, "_PATIENCE_WITH_ENGINE", 0.2)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)

        async def console():
            return path

        monkeypatch.setattr(server, "console", console)
        async with client(app, ADMIN) as http:
            params = {"candidate": 3, "timeout": 60, "method": "x", "self": 1, "seconds": 2}
            answer = await http.post("/torpor/console/transfer.wait", json=params)
            assert answer.status_code == 200 and answer.json() == params
            for timeout in (0, "60", None):
                answer = await http.post("/torpor/console/transfer.wait", json={"timeout": timeout})
                assert "has not answered transfer.wait" in answer.json()["error"]["message"]

    with slow_engine(1) as path:
        run(scene(path))


# A server without vLLM. It starts a mock engine when it reads a line.
SERVER = """
import json, os, subprocess, sys
from torpor import _core
_core.begin_events(sys.argv[1], "front", 0, False)
_core.begin_control(True, "")
_core.serve_front(lambda method, params, call: call.answer(json.dumps({"server": os.getpid()})))
print(flush=True)
sys.stdin.readline()
engine = subprocess.Popen([sys.argv[2], "mock", sys.argv[1]], stdout=subprocess.PIPE)
engine.stdout.readline()
print(engine.pid, flush=True)
sys.stdin.readline()
engine.kill()
engine.wait()
"""


def test_of_several_servers_the_one_sleeps_whose_engine_is_asked():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        words = [sys.executable, "-c", SERVER, directory, BINARY]
        servers = []
        for _ in range(2):
            server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            server.stdout.readline()
            servers.append(server)
        alone = subprocess.Popen([BINARY, "mock", directory], stdout=subprocess.PIPE)
        alone.stdout.readline()
        try:
            with torpor.console.connect(directory) as engine, contextlib.suppress(errors.WrongState):
                assert "server" not in engine.sleep()  # it has no server; perhaps it sleeps by itself just now
            engines = {}
            for server in reversed(servers):  # the older server has the newer engine
                server.stdin.write("\n")
                engines[server.pid] = int(server.stdout.readline())
            asked = {}
            for server, pid in engines.items():
                with torpor.console.connect(Path(directory) / f"{pid}-mock-0.sock") as engine:
                    asked[server] = engine.sleep()["server"]
            assert asked == {server.pid: server.pid for server in servers}
            done = subprocess.run([BINARY, "live", "--engine", directory, "sleep"], capture_output=True, text=True)
            assert json.loads(done.stdout) == {"server": servers[0].pid}, done.stderr
        finally:
            for server in servers:
                server.communicate("\n")
            alone.kill()
            alone.communicate()


def test_a_session_beside_a_silent_server_shows_events_as_fast_as_they_come():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        words = [sys.executable, "-c", SERVER, directory, BINARY]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        server.stdout.readline()
        server.stdin.write("\n")
        server.stdout.readline()
        session = None
        try:
            with torpor.console.connect(directory) as engine:
                while engine.snapshot()["at"] < 3000:
                    time.sleep(0.1)
            words = [BINARY, "live", "--engine", directory]
            session = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            session.stdin.write("plan\nsubscribe after=0\n")
            began = time.monotonic()
            lines = [session.stdout.readline() for _ in range(2500)]
            assert all(lines) and any('"server"' in line for line in lines)
            assert time.monotonic() - began < 40  # 20 ms a line would be 50 s
        finally:
            if session is not None:
                session.kill()
                session.communicate()
            server.communicate("\n")


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_runs_nothing_but_its_own_script_and_asks_nobody_else(monkeypatch):
    async def scene():
        monkeypatch.setenv("TORPOR_ADMIN_KEY", ADMIN)
        app, server = build(monkeypatch, EVERYTHING, *KEYS)
        await started(server)
        async with client(app, None) as nobody:
            answer = await nobody.get("/torpor/console")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        for part in ("script", "style"):
            [text] = re.findall(f"<{part}>(.*?)</{part}>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[f"{part}-src"] == f"'sha256-{digest}'"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        assert not re.search(r"localStorage|sessionStorage|cookie", answer.text)  # where a key could stay

    run(scene())


# What the page needs of a browser: elements with their text, one clock, and a server that answers by turns.
BROWSER = """
const fs = require("fs");
const made = () => ({text: "", value: "", children: [], listeners: {}, attributes: {},
  set textContent(text) { this.text = String(text); }, get textContent() { return this.text; },
  setAttribute(name, value) { this.attributes[name] = String(value); },
  addEventListener(name, call) { this.listeners[name] = call; },
  append(...more) { this.children.push(...more); }, replaceChildren(...all) { this.children = all; },
  all() { return [this.text, ...this.children.flatMap(one => one.all())]; }});
const page = fs.readFileSync(process.argv[1], "utf8"), answers = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const elements = {}, asked = [], ticks = [];
for (const [, id] of page.matchAll(/ id="(\\w+)"/g)) elements[id] = made();
elements.moment.value = 1000;
global.document = {getElementById: id => elements[id] || null, createElement: made, createElementNS: made};
global.setInterval = call => ticks.push(call);
global.fetch = async (path, options) => {
  asked.push([path, options.headers.Authorization, JSON.parse(options.body)]);
  const next = answers.shift();
  return {ok: next.status === 200, status: next.status, json: async () => next.body};
};
new Function(page.split("<script>")[1].split("</script>")[0])();
(async () => {
  await ticks[0]();
  const before = asked.length, said = [], script = JSON.parse(process.argv[3]);
  for (const step of script) {
    if (step.key) { elements.key.value = step.key; await elements.key.listeners.change(); }
    else if (step.click) await elements[step.click].listeners.click();
    else await ticks[0]();
    said.push(elements.said.text);
  }
  const ids = ["slots", "tiers", "memory", "operations", "tracks", "head"];
  const shown = Object.fromEntries(ids.map(id => [id, elements[id].all()]));
  console.log(JSON.stringify({before, asked, said, shown, left: answers.length}));
})();
"""


HEAD = {"process": "core0", "pid": 7}
UNAUTHORIZED = {"status": 401, "body": {"error": {"message": "Unauthorized"}}}


def page_after(tmp_path, answers: list[dict], *steps: dict) -> dict:
    """What the page asked, said and showed after these steps: {"key": …} types one, {"click": id}, {}: a second."""
    (tmp_path / "page.html").write_text(_core.console_page())
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    words = ["node", "-e", BROWSER.replace("\\\\", "\\")]
    words += [tmp_path / "page.html", tmp_path / "answers.json", json.dumps(steps)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def answer_with(*events: dict, after: int = 9, workers: tuple[dict, ...] | None = (), **head) -> dict:
    """The answer to a call of `events`; `workers`: None in one of a worker."""
    body = {"events": [HEAD | head | event for event in events], "next": after, "lost": 0}
    return {"status": 200, "body": body | ({} if workers is None else {"workers": list(workers)})}


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")


@needs_node
def test_the_page_follows_an_engine(tmp_path):
    answers = [
        answer_with(
            {"type": "lost", "count": 90, "time": None},
            {"type": "request", "request": "<b>a", "tokens": 5, "time": 1.0},
            {"type": "slot", "request": "<b>a", "from": "none", "to": "initialized", "tokens": 5, "time": 1.0},
            {"type": "tier", "from": "host", "used_blocks": 1, "cached_blocks": 33, "time": 1.5},
            after=94,
        ),
        {"status": 503, "body": {"error": {"message": "ends"}}},
        answer_with(
            {"type": "slot", "request": "<b>a", "from": "initialized", "to": "decoding", "tokens": 6, "time": 2.0},
            {"type": "operation", "from": "sleep", "to": "begin", "sequence": 9, "time": 2.5},
            after=96,
        ),
    ]
    said = page_after(tmp_path, answers, {"key": "the key"}, {}, {})
    assert said["before"] == 0  # without a key nobody is asked
    assert [(path, key, params["after"]) for path, key, params in said["asked"]] == [
        ("console/events", "Bearer the key", after) for after in (0, 94, 94)
    ]
    assert said["said"] == ["", "ends", ""]
    assert {"<b>a", "decoding"} <= set(said["shown"]["slots"]) and "initialized" not in said["shown"]["slots"]
    assert {"host", "33"} <= set(said["shown"]["tiers"])
    assert {"sleep", "running"} <= set(said["shown"]["operations"])
    assert "5 events, 0 steps, 1 requests" in said["shown"]["head"]  # what was lost before it was opened is not counted
    assert {"initialized", "decoding"} <= set(said["shown"]["tracks"])  # the legend has what is drawn


@needs_node
def test_the_page_asks_the_workers_for_their_memory(tmp_path):
    worker = {"process": "rank0", "pid": 8}
    memory = [
        {"type": "memory", "from": "device", "to": "device", "bytes": 3_000_000, "time": 1.2},
        {"type": "memory", "from": "tag", "tag": "kv_cache", "to": "device", "bytes": 2_000_000, "of_bytes": 4_000_000,
         "time": 1.2},
    ]  # fmt: skip
    gone = {"status": 404, "body": {"error": {"what": "process 8 is no worker"}}}
    step = {"type": "step", "time": 2.0}
    answers = [
        answer_with({"type": "step", "time": 1.5}, workers=(worker,)),
        answer_with(*memory, after=30, workers=None, **worker),
        answer_with(step, after=10, workers=(worker,)), gone,
        answer_with(after=10),
    ]  # fmt: skip
    said = page_after(tmp_path, answers, {"key": "k"}, {}, {})
    assert [(params["after"], params.get("pid")) for _, _, params in said["asked"]] == [
        (0, None), (0, 8), (9, None), (30, 8), (10, None),
    ]  # fmt: skip
    assert said["said"] == ["", "", ""] and said["left"] == 0  # a worker that has ended is no error
    shown = said["shown"]["memory"]
    assert {"rank0 8, rank 0", "kv_cache", "2.00 MB", "4.00 MB"} <= set(shown)
    assert "rank0 8, rank 0: 3.00 MB on the device" in shown


@needs_node
def test_a_key_that_was_refused_is_not_sent_again(tmp_path):
    steps = [{"key": "wrong"}, {}, {}, {"click": "wake"}, {"key": "right"}]
    said = page_after(tmp_path, [UNAUTHORIZED, answer_with()], *steps)
    assert [key for _, key, _ in said["asked"]] == ["Bearer wrong", "Bearer right"]
    assert said["said"][0] == said["said"][2] == "Unauthorized: give another key" and said["said"][4] == ""
    assert said["said"][3] == "this key was refused: give another key"


@needs_node
def test_the_page_puts_an_engine_to_sleep_at_the_second_press(tmp_path):
    slept = {"status": 200, "body": {"status": "sleeping", "freed_bytes": 5_140_000_000, "seconds": 0.33}}
    refused = {"status": 409, "body": {"error": {"what": "it is awake", "message": "m"}}}
    steps = [{"click": "sleep"}, {"key": "k"}, {"click": "sleep"}, {}, {"click": "sleep"}, {}, {"click": "wake"}]
    said = page_after(tmp_path, [answer_with(), answer_with(), slept, answer_with(), refused], *steps)
    assert [(path, params) for path, _, params in said["asked"] if path != "console/events"] == [
        ("console/sleep", {"level": 1}), ("console/wake", {})
    ]  # fmt: skip
    first, with_key, warned, second_later, done, after, failed = said["said"]
    assert "key first" in first and with_key == "" and "press sleep again" in warned and second_later == warned
    assert done == after == "sleep: sleeping, 5.14 GB given back in 330 ms" and failed == "wake: it is awake"


@needs_node
def test_a_warning_that_is_gone_is_given_again(tmp_path):
    problem = {"status": 503, "body": {"error": {"message": "ends"}}}
    steps = [{"key": "k"}, {"click": "sleep"}, {}, {"click": "sleep"}]
    said = page_after(tmp_path, [answer_with(), problem], *steps)
    assert {path for path, _, _ in said["asked"]} == {"console/events"}
    assert said["said"][2] == "ends" and said["said"][1] == said["said"][3]


@needs_node
def test_the_page_follows_the_engine_that_replaced_another_one(tmp_path):
    step, other = {"type": "step", "time": 1.0}, {"process": "core0", "pid": 8}
    answers = [
        answer_with(step, after=90),
        answer_with(after=2),
        answer_with({"type": "step", "time": 2.0}, after=2, **other),
    ]
    said = page_after(tmp_path, answers, {"key": "k"}, {})
    assert [params["after"] for _, _, params in said["asked"]] == [0, 90, 0]
    assert "2 events, 2 steps, 0 requests" in said["shown"]["head"]


@needs_node
def test_an_empty_page_says_what_will_be_there(tmp_path):
    said = page_after(tmp_path, [answer_with({"type": "step", "time": 1.0})], {"key": "k"})
    for part in ("tracks", "slots", "tiers", "memory", "operations"):
        assert re.search("yet|No ", " ".join(said["shown"][part])), part


@needs_node
def test_who_was_replaced_has_ended_and_its_workers_with_it():
    """A worker is named like its engine here, and publishes its memory before the engine's first step."""
    first = {"process": "core0", "pid": 1}
    events = [
        {"process": "core0", "pid": 11, "type": "memory", "time": 1.0}, first | {"type": "step", "time": 2.0},
        {"process": "core0", "pid": 11, "type": "memory", "time": 3.0}, first | {"type": "step", "time": 4.0},
        {"process": "core0", "pid": 22, "type": "memory", "time": 8.0},
        {"process": "core0", "pid": 2, "type": "step", "time": 9.0},
    ]  # fmt: skip
    code = "const ended = until => [...fold(all, until).processes].filter(([, p]) => p.ended).map(([of]) => of);"
    assert returned(code + "return [ended(5), ended(8.5), ended(9)]", events) == [[], [], ["core0 11", "core0 1"]]


@needs_node
def test_an_engine_that_was_killed_asleep_sleeps_until_another_one_is_there():
    def engine(pid: int, time: float, to: str, name: str = "core0") -> dict:
        return {"process": name, "pid": pid, "type": "engine", "to": to, "time": time}

    step = {"process": "core0", "pid": 2, "type": "step", "time": 9.0}
    killed = [engine(1, 1.0, "falling asleep"), engine(1, 2.0, "asleep"), engine(2, 7.0, "waking"), step]
    assert returned("return naps(all)", killed) == [[2.0, 7.0]]
    assert returned("return naps(all)", [*killed[:2], engine(2, 7.0, "waking", "core1"), step]) == [[2.0, 9.0]]
    assert returned("return naps(all)", [*killed[:2], engine(1, 4.0, "waking"), step]) == [[2.0, 4.0]]


@needs_node
def test_a_row_has_no_more_rectangles_than_pixels():
    code = """
    const short = [...Array(100000).keys()].map(i => [i, i + 1, i % 2 ? "running" : "waiting"]);
    const many = drawn_of(short, time => time / 100);
    const counted = many.reduce((sum, one) => sum + one.count, 0);
    const few = drawn_of([[0, 1, "running"], [1, 1.1, "waiting"], [50, 50.1, "waiting"]], time => 10 * time);
    return [many.length <= 1000, counted, many[0].what, few.map(one => [one.left, one.right, one.what])];
    """
    assert returned(code, []) == [
        True, 100000, "short spans",
        [[0, 10, "running"], [10, 11.5, "waiting"], [500, 501.5, "waiting"]],
    ]  # fmt: skip


def returned(code: str, events: list[dict]):
    """What code of the page returns of these events, `all`."""
    script = _core.console_page().split("<script>")[1].split("</script>")[0]
    body = "const code = process.argv[1], all = JSON.parse(process.argv[2]);"
    body += "console.log(JSON.stringify(new Function('all', code)(all)))"
    words = ["node", "-e", body, f"{script}\n{code}", json.dumps(events)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
