# SPDX-License-Identifier: Apache-2.0
"""The console of a server, over HTTP and over its socket, and its page: without an engine."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import result_of
from server_calls import EVERYTHING
from server_stubs import ADMIN, CLIENT, OTHER_CLIENT, build, client, no_settings, run, started  # noqa: F401

import torpor.console
from torpor import _core

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
    assert result["told"] == [
        ["sleep", "ok"], ["wake", "ok"], ["sleep", "ok"], ["wake", "resource_exhausted"], ["wake", "ok"],
        ["checkpoint", "ok"], *[["sleep", "invalid_argument"]] * 3,
    ]  # fmt: skip


def test_a_socket_that_is_only_to_look_makes_plans_and_no_sleep(zygote):
    result = result_of(zygote.run([PROCESS, "read"]))
    assert result == {"hello": "answered", "plan": "answered"} | dict.fromkeys(
        ("sleep", "wake", "checkpoint"), "failed_precondition"
    )


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
  append(...more) { this.children.push(...more); }, appendChild(one) { this.children.push(one); return one; },
  replaceChildren(...all) { this.children = all; }, insertRow() { return this.appendChild(made()); },
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
  const before = asked.length;
  elements.key.value = "the key";
  const said = [];
  while (answers.length) { await ticks[0](); said.push(elements.said.text); }
  const ids = ["slots", "tiers", "operations", "tracks", "head"];
  const shown = Object.fromEntries(ids.map(id => [id, elements[id].all()]));
  console.log(JSON.stringify({before, asked, said, shown}));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
def test_the_page_follows_an_engine(tmp_path):
    head = {"process": "core0", "pid": 7}
    events = [
        {"type": "lost", "count": 90, "time": None},
        {"type": "request", "request": "<b>a", "tokens": 5, "time": 1.0},
        {"type": "slot", "request": "<b>a", "from": "none", "to": "initialized", "tokens": 5, "time": 1.0},
        {"type": "tier", "from": "host", "used_blocks": 1, "cached_blocks": 33, "time": 1.5},
    ]
    later = [
        {"type": "slot", "request": "<b>a", "from": "initialized", "to": "decoding", "tokens": 6, "time": 2.0},
        {"type": "operation", "from": "sleep", "to": "begin", "sequence": 9, "time": 2.5},
    ]
    answers = [
        {"status": 200, "body": {"events": [head | event for event in events], "next": 94, "lost": 90}},
        {"status": 401, "body": {"error": {"message": "Unauthorized"}}},
        {"status": 200, "body": {"events": [head | event for event in later], "next": 96, "lost": 0}},
    ]
    (tmp_path / "page.html").write_text(_core.console_page())
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    done = subprocess.run(
        ["node", "-e", BROWSER.replace("\\\\", "\\"), tmp_path / "page.html", tmp_path / "answers.json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert said["before"] == 0  # without a key nobody is asked
    assert [(path, key, params["after"]) for path, key, params in said["asked"]] == [
        ("console/events", "Bearer the key", after) for after in (0, 94, 94)
    ]
    assert said["said"] == ["", "Unauthorized", ""]
    assert {"<b>a", "decoding"} <= set(said["shown"]["slots"]) and "initialized" not in said["shown"]["slots"]
    assert {"host", "33"} <= set(said["shown"]["tiers"]) and "sleep" in said["shown"]["operations"]
    assert said["shown"]["head"][0].startswith("5 events")  # what was lost before it was opened is not counted
