// SPDX-License-Identifier: Apache-2.0
#include "console/event_page.h"

#include <initializer_list>

namespace torpor::console {
namespace {

// Style and layout of both pages.
constexpr std::string_view kStyle = R"page(
body { font: 13px/1.4 ui-monospace, monospace; background: #14161a; color: #d8dce2; margin: 1em; }
h2 { font-size: 14px; margin: 1.2em 0 0.3em; color: #9fb4d0; }
table { border-collapse: collapse; } td, th { padding: 0 1.2em 0 0; text-align: left; white-space: pre; }
th { color: #8a94a2; font-weight: normal; } td.n { text-align: right; }
input[type=range] { width: 100%; } #tracks { width: 100%; overflow-x: auto; }
.bad { color: #ff6b6b; } label { margin-right: 2em; } svg text { fill: #d8dce2; font: 11px monospace; }
)page";
constexpr std::string_view kBody = R"page(
<div id="head"></div>
<label>moment <span id="at"></span></label><label>requests with <input id="filter" size="20"></label>
<input type="range" id="moment" min="0" max="1000" value="1000">
<h2>Requests, operations and copies over time</h2><div id="tracks"></div>
<h2>Slots</h2><div id="slots"></div>
<h2>Tiers (blocks)</h2><div id="tiers"></div>
<h2>Memory</h2><div id="memory"></div>
<h2>Operations</h2><div id="operations"></div>
)page";

constexpr std::string_view kHead = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>torpor: a recording</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<style>)page";

// The server's header says what the page may load and run. Its key is not stored: it is gone when the page is closed.
constexpr std::string_view kLiveHead = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>torpor: an engine</title>
<style>)page";
constexpr std::string_view kAsks = R"page(
<label>admin key <input id="key" type="password" size="30" autocomplete="off"></label><span id="said"></span>)page";

constexpr std::string_view kScript = R"page(
"use strict";
const COLOURS = {"initialized": "#7d8590", "onboard staged": "#39c5cf", "onboarding": "#1b9aaa",
  "prefilling": "#4f8ff7", "skipped prefill": "#2f5aa8", "decoding": "#3fb950", "skipped decode": "#26703a",
  "preempted": "#d9a520", "finishing": "#bc6cd9", "end": "#9aa4b2",
  "failed": "#ff6b6b", "unrecoverable": "#ff6b6b", "unproven": "#ff6b6b"};

const MOST_AT_ONCE = 10000, MOST_EVENTS = 200000;

// What there was after all events up to this moment.
function fold(events, until) {
  const view = {slots: new Map(), tiers: new Map(), memory: new Map(), operations: new Map(), steps: 0, lost: 0};
  for (const event of events) {
    if (event.type === "lost") { view.lost += event.count; continue; }
    if (event.time > until) break;
    const of = event.process + " " + event.pid;
    if (event.type === "slot") {
      const key = of + " " + event.request;
      if (event.to === "finished") { view.slots.delete(key); continue; }
      const before = view.slots.get(key);
      view.slots.set(key, {...event, since: before && before.to === event.to ? before.since : event.time});
    } else if (event.type === "tier") {
      view.tiers.set(of + " " + event.from, event);
    } else if (event.type === "memory") {
      const rank = of + " " + (event.rank || 0) + " ";
      const before = event.from === "device" ? [...view.memory.keys()].filter(key => key.startsWith(rank)) : [];
      for (const key of before) view.memory.delete(key);  // all that follows is told anew
      view.memory.set(rank + (event.tag || event.from) + " " + event.to, event);
    } else if (event.type === "operation") {
      const begins = event.to === "begin";
      const key = of + " " + (begins ? event.sequence : event.operation);
      view.operations.set(key, {...(view.operations.get(key) || {phases: []}), ...event, whose: of});
    } else if (event.type === "phase" && event.to !== "begin") {
      const row = view.operations.get(of + " " + event.operation);
      if (row) row.phases.push(event);
    } else if (event.type === "error") {
      const row = view.operations.get(of + " " + event.operation);
      if (row) row.error = event.words;
    } else if (event.type === "step") {
      view.steps += 1;
    }
  }
  return view;
}

// Tracks by name: of each request its states, of operations, and of each lane its copies. Spans: begin, end, what.
function tracks(events, wanted) {
  const all = new Map(), open = new Map(), last = new Map();
  const put = (name, begin, end, what) => {
    if (!all.has(name)) all.set(name, []);
    all.get(name).push([begin, end, what]);
  };
  for (const event of events) {
    if (!event.time) continue;
    last.set(event.pid, event.time);
    const took = (event.nanoseconds || 0) / 1e9;
    if (event.type === "slot" && event.request.includes(wanted)) {
      const key = event.pid + " " + event.request, before = open.get(key);
      if (before && before.to === event.to) continue;
      if (before) put(event.request, before.time, event.time, before.to);
      if (event.to === "finished") open.delete(key); else open.set(key, event);
    } else if (event.type === "operation" && event.to !== "begin") {
      put("operations", event.time - took, event.time, event.from + " " + event.to);
    } else if (event.type === "copy" && event.to !== "begin") {
      put(event.lane + " " + event.from, event.time - took, event.time, event.to);
    }
  }
  for (const event of open.values()) put(event.request, event.time, last.get(event.pid), event.to);
  return all;
}

if (typeof document !== "undefined") {
  const by = id => document.getElementById(id), holder = by("events");
  const lines = holder ? holder.textContent.split("\n") : [];
  const events = lines.filter(Boolean).map(line => JSON.parse(line));
  let first = 0, span = 1;
  const measure = () => {
    const times = events.filter(event => event.time);
    if (!times.length) return;
    first = times[0].time;
    span = Math.max(times[times.length - 1].time - first, 1e-9);
  };
  const MB = bytes => (bytes / 1e6).toFixed(1) + " MB";
  const SVG = "http://www.w3.org/2000/svg", LEFT = 190, WIDTH = 1200, ROW = 15;
  const table = (into, heads, rows) => {
    const made = document.createElement("table");
    for (const [at, cells] of [heads, ...rows].entries()) {
      const row = made.insertRow();
      for (const cell of cells) {
        const one = row.appendChild(document.createElement(at ? "td" : "th"));
        one.textContent = cell;
        if (typeof cell === "number") one.className = "n";
        if (cell === "failed" || cell === "unrecoverable") one.className = "bad";
      }
    }
    by(into).replaceChildren(made);
  };
  const shape = (name, fields, words) => {
    const made = document.createElementNS(SVG, name);
    for (const [field, value] of Object.entries(fields)) made.setAttribute(field, value);
    if (words) made.textContent = words;
    return made;
  };
  const x = time => LEFT + (time - first) / span * (WIDTH - LEFT);
  let mark;
  const draw_tracks = () => {
    const other = ([name]) => name === "operations" || /^(memory|disk) /.test(name) ? 0 : 1;
    const all = [...tracks(events, by("filter").value)].sort((a, b) => other(a) - other(b)).slice(0, 400);
    const svg = shape("svg", {width: WIDTH, height: all.length * ROW + 4});
    for (const [at, [name, spans]] of all.entries()) {
      svg.append(shape("text", {x: 0, y: at * ROW + 12}, name.slice(0, 27)));
      for (const [begin, until, what] of spans) {
        const colour = COLOURS[what] || COLOURS[what.split(" ").pop()] || "#9aa4b2";
        const width = Math.max(x(until) - x(begin), 1);
        const box = shape("rect", {x: x(begin), y: at * ROW + 2, width: width, height: ROW - 3, fill: colour});
        const words = [what + ",", (until - begin).toFixed(4), "s from", (begin - first).toFixed(4), "s"];
        box.append(shape("title", {}, words.join(" ")));
        svg.append(box);
      }
    }
    mark = shape("line", {y1: 0, y2: all.length * ROW + 4, stroke: "#fff"});
    svg.append(mark);
    svg.addEventListener("click", event => {
      by("moment").value = Math.max(0, (event.offsetX - LEFT) / (WIDTH - LEFT)) * 1000;
      draw();
    });
    by("tracks").replaceChildren(svg);
  };
  const draw = () => {
    const moment = first + span * by("moment").value / 1000, view = fold(events, moment), wanted = by("filter").value;
    by("at").textContent = (moment - first).toFixed(3) + " s of " + span.toFixed(3) + " s";
    const lost = view.lost ? ", " + view.lost + " lost" : "";
    by("head").textContent = events.length + " events" + lost + ", " + view.steps + " steps until this moment";
    mark.setAttribute("x1", x(moment));
    mark.setAttribute("x2", x(moment));
    table("slots", ["request", "state", "computed", "all", "device", "staged", "in state"],
      [...view.slots.values()].filter(slot => slot.request.includes(wanted)).map(slot =>
        [slot.request, slot.to, slot.computed_tokens, slot.tokens, slot.device_blocks, slot.staged_blocks,
          (moment - slot.since).toFixed(2) + " s"]));
    const whose = event => event.process + " " + event.pid;
    table("tiers", ["process", "tier", "used", "pinned", "cached", "empty"], [...view.tiers.values()].map(tier =>
      [whose(tier), tier.from, tier.used_blocks, tier.pinned_blocks, tier.cached_blocks, tier.empty_blocks]));
    table("memory", ["process", "rank", "of", "where", "bytes", "of bytes"], [...view.memory.values()].map(part =>
      [whose(part), part.rank || 0, part.tag || part.from, part.to, MB(part.bytes), MB(part.of_bytes)]));
    const seconds = event => ((event.nanoseconds || 0) / 1e9).toFixed(3);
    const said = phase => phase.from + " " + (phase.to === "end" ? seconds(phase) + " s" : phase.to);
    table("operations", ["operation", "process", "state", "seconds", "phases", ""],
      [...view.operations.values()].map(row =>
        [row.from, row.whose, row.to, seconds(row), row.phases.map(said).join(", "), row.error || ""]));
  };
  by("moment").addEventListener("input", draw);
  by("filter").addEventListener("input", () => { draw_tracks(); draw(); });
  measure();
  draw_tracks();
  draw();
  if (by("key")) follow(events, by, () => { measure(); draw_tracks(); draw(); });
}

// Asks the server that the page comes from for what is new, once a second, with the key that was typed in.
function follow(events, by, show) {
  let after = 0, asking = false;
  const call = async (method, params) => {
    const headers = {"Authorization": "Bearer " + by("key").value, "Content-Type": "application/json"};
    const options = {method: "POST", cache: "no-store", credentials: "omit", headers, body: JSON.stringify(params)};
    const answer = await fetch("console/" + method, options), said = await answer.json().catch(() => ({}));
    if (!answer.ok) throw Error((said.error && (said.error.what || said.error.message)) || "HTTP " + answer.status);
    return said;
  };
  const look = async () => {
    if (asking || !by("key").value) return;
    asking = true;
    try {
      for (let more = true, news = 0; more; news = 0) {
        const said = await call("events", {after, limit: MOST_AT_ONCE});
        for (const event of said.events) {
          if (event.type === "lost" && after === 0) continue;  // from before the page was opened
          events.push(event);
          news += 1;
        }
        more = said.events.length >= MOST_AT_ONCE && said.next > after;
        after = said.next;
        if (news) events.splice(0, Math.max(0, events.length - MOST_EVENTS));
      }
      by("said").textContent = "";
      show();
    } catch (problem) {
      by("said").textContent = String(problem.message || problem);
    }
    asking = false;
  };
  by("key").addEventListener("change", look);
  setInterval(look, 1000);
}
)page";

constexpr std::string_view kBehindStyle = "</style></head><body>";
constexpr std::string_view kEnd = "</script></body></html>\n";

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

}  // namespace

std::string event_page_head() {
  return joined({kHead, kStyle, kBehindStyle, kBody, "<script type=\"text/plain\" id=\"events\">\n"});
}
std::string event_page_tail() { return joined({"</script><script>", kScript, kEnd}); }
std::string live_page() { return joined({kLiveHead, kStyle, kBehindStyle, kAsks, kBody, "<script>", kScript, kEnd}); }

}  // namespace torpor::console
