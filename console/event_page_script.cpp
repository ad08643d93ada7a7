// SPDX-License-Identifier: Apache-2.0
// The script of both pages. fold() and tracks() are functions of events alone; the rest draws what they return.
#include "console/event_page_script.h"

namespace torpor::console {

const std::string_view kPageFolds = R"page(
"use strict";
const COLOURS = {"initialized": "#8b949e", "onboard staged": "#39c5cf", "onboarding": "#1b9aaa",
  "prefilling": "#4f8ff7", "skipped prefill": "#2f5aa8", "decoding": "#3fb950", "skipped decode": "#26703a",
  "preempted": "#d9a520", "finishing": "#bc6cd9", "sleep": "#8250df", "wake": "#db61a2", "checkpoint": "#bf8700",
  "copied": "#7a8ca5", "failed": "#f85149", "unrecoverable": "#f85149", "unproven": "#f85149"};
const MOST_AT_ONCE = 10000, MOST_EVENTS = 200000;
const whose = event => event.process + " " + event.pid;

// Return the state after all events up to this moment. An engine has ended if another one begins its steps after its last
// event; a worker, which takes no steps, has if the engines of its time have.
function fold(events, until) {
  const view = {slots: new Map(), tiers: new Map(), memory: new Map(), operations: new Map(), engines: new Map(),
    processes: new Map(), steps: 0, lost: 0, latest: 0};
  for (const event of events) {
    if (event.type === "lost") { view.lost += event.count; continue; }
    const of = whose(event), process = view.processes.get(of);
    if (process) process.last = event.time;
    else view.processes.set(of, {name: event.process, first: event.time, last: event.time, steps: false});
    if (event.type === "step" || event.type === "slot") view.processes.get(of).steps = true;
    if (event.time > until) continue;
    view.latest = event.time;
    if (event.type === "slot") {
      const key = of + " " + event.request;
      if (event.to === "finished") { view.slots.delete(key); continue; }
      const before = view.slots.get(key);
      view.slots.set(key, {...event, since: before && before.to === event.to ? before.since : event.time});
    } else if (event.type === "tier") {
      view.tiers.set(of + " " + event.from, event);
    } else if (event.type === "engine") {
      view.engines.set(of, event);
    } else if (event.type === "memory") {
      const rank = of + " " + (event.rank || 0) + " ";
      const before = event.from === "device" ? [...view.memory.keys()].filter(key => key.startsWith(rank)) : [];
      for (const key of before) view.memory.delete(key);  // all that follows is published again
      view.memory.set(rank + (event.tag || event.from) + " " + event.to, event);
    } else if (event.type === "operation") {
      const begins = event.to === "begin";
      const key = of + " " + (begins ? event.sequence : event.operation);
      const row = view.operations.get(key) || {phases: [], begin: event.time - (event.nanoseconds || 0) / 1e9};
      view.operations.set(key, {...row, ...event, whose: of});
    } else if (event.type === "phase") {
      const row = view.operations.get(of + " " + event.operation);
      if (!row) continue;
      const open = row.phases.find(phase => phase.from === event.from && phase.to === "begin");
      if (event.to !== "begin" && open) Object.assign(open, event);
      else row.phases.push({...event});
    } else if (event.type === "error") {
      const row = view.operations.get(of + " " + event.operation);
      if (row) row.error = event.words;
    } else if (event.type === "step") {
      view.steps += 1;
    }
  }
  const all = [...view.processes.values()], engines = all.filter(process => process.steps);
  for (const process of engines)
    process.ended = engines.some(other =>
      other.name === process.name && other.first > process.last && other.first <= until);
  for (const worker of all.filter(process => !process.steps)) {
    const near = engines.filter(engine => engine.first <= worker.last && engine.last >= worker.first);
    worker.ended = near.length > 0 && near.every(engine => engine.ended);
  }
  return view;
}

// Return the tracks: the states of each request, the operations, the copies of each lane. A span: begin, end, what.
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
      put("operations", event.time - took, event.time, event.to === "end" ? event.from : event.from + " " + event.to);
    } else if (event.type === "copy" && event.to !== "begin") {
      put(event.lane + " " + event.from, event.time - took, event.time, event.to === "end" ? "copied" : event.to);
    }
  }
  for (const event of open.values()) put(event.request, event.time, last.get(event.pid), event.to);
  return all;
}

// Return what a row draws of its spans [begin, until, what], in pixels by x(time). Spans of less than THIN pixels that
// lie close together are one: a row has no more rectangles than pixels.
const THIN = 1.5;
function drawn_of(spans, x) {
  const drawn = [];
  for (const [begin, until, what] of spans) {
    const left = x(begin), right = Math.max(x(until), left + THIN), last = drawn[drawn.length - 1];
    const thin = right - left <= THIN;
    if (thin && last && last.thin && left < last.left + 2 * THIN) {
      last.right = Math.max(last.right, right);
      last.until = Math.max(last.until, until);
      last.count += 1;
      if (last.what !== what) last.what = "short spans";
    } else {
      const key = COLOURS[what] ? what : what.split(" ").pop();
      drawn.push({begin, until, what, key, left, right, thin, count: 1});
    }
  }
  return drawn;
}

// When the engines slept: from the end of falling asleep until they began to wake, or until the last event. One that
// was killed asleep sleeps until the engine that replaced it publishes its state.
function naps(events) {
  const all = [], open = new Map(), engines = new Map();
  let last = 0;
  for (const event of events) {
    if (!event.time) continue;
    last = event.time;
    const of = whose(event);
    if (engines.has(of)) engines.get(of).last = event.time;
    if (event.type !== "engine") continue;
    if (!engines.has(of)) engines.set(of, {name: event.process, first: event.time, last: event.time});
    if (event.to === "asleep") open.set(of, event.time);
    else if (open.has(of)) {
      all.push([open.get(of), event.time]);
      open.delete(of);
    }
  }
  for (const [of, since] of open) {
    const own = engines.get(of);
    const others = [...engines.values()].filter(other => other.name === own.name && other.first > own.last);
    all.push([since, Math.min(last, ...others.map(other => other.first))]);
  }
  return all;
}
)page";

const std::string_view kPageDraws = R"page(
const bytes_text = bytes => {
  const unit = ["B", "kB", "MB", "GB", "TB"].findIndex((_, at) => bytes < 1000 ** (at + 1) || at === 4);
  return (bytes / 1000 ** unit).toFixed(unit ? (bytes / 1000 ** unit < 10 ? 2 : 1) : 0)
    + " " + ["B", "kB", "MB", "GB", "TB"][unit];
};
const seconds_text = seconds => seconds < 0.001 ? (seconds * 1e6).toFixed(0) + " µs"
  : seconds < 1 ? (seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 0) + " ms"
    : seconds < 120 ? seconds.toFixed(2) + " s" : (seconds / 60).toFixed(1) + " min";

if (typeof document !== "undefined") {
  const by = id => document.getElementById(id), holder = by("events");
  const lines = holder ? holder.textContent.split("\n") : [];
  const events = lines.filter(Boolean).map(line => JSON.parse(line));
  const shown = {ended: false, tracks: false, operations: false, sort: "", down: false};
  const LEFT = 210, ROW = 18, FEW_TRACKS = 40, FEW_OPERATIONS = 6;
  let first = 0, span = 1, width = 1180;

  const SVG = "http://www.w3.org/2000/svg";
  const made = (element, fields, inside) => {
    for (const [field, value] of Object.entries(fields || {})) element.setAttribute(field, value);
    for (const one of inside.flat()) {
      if (one === null || one === undefined || one === "") continue;
      if (typeof one === "object") element.append(one);
      else element.append(made_text(one));
    }
    return element;
  };
  const made_text = words => { const one = document.createElement("span"); one.textContent = words; return one; };
  const h = (name, fields, ...inside) => {
    const one = document.createElement(name);
    if (inside.length === 1 && typeof inside[0] !== "object") { one.textContent = inside[0]; inside = []; }
    return made(one, fields, inside);
  };
  const s = (name, fields, ...inside) => {
    const one = document.createElementNS(SVG, name);
    if (inside.length === 1 && typeof inside[0] === "string") { one.textContent = inside[0]; inside = []; }
    return made(one, fields, inside);
  };
  const into = (id, ...inside) => by(id).replaceChildren(...inside.flat().filter(Boolean));
  const nothing = words => h("p", {class: "empty"}, words);
  const button = (words, press) => {
    const one = h("button", {class: "more"}, words);
    one.addEventListener("click", press);
    return one;
  };
  const legend = items => h("p", {class: "legend"}, items.map(([fill, words, stripes]) =>
    h("span", {class: "key"}, s("svg", {width: 12, height: 12, class: "swatch"},
      s("rect", {width: 12, height: 12, rx: 2, ...(fill ? {fill} : {class: stripes})})), h("span", {}, words))));

  const measure = () => {
    const times = events.filter(event => event.time);
    if (!times.length) return;
    const last = times[times.length - 1].time, wanted = Number(by("window").value) || Infinity;
    first = Math.max(times[0].time, last - wanted);
    span = Math.max(last - first, 1e-9);
    width = Math.max(by("tracks").clientWidth || 1180, 640);
  };
  const x = time => LEFT + (Math.min(Math.max(time, first), first + span) - first) / span * (width - LEFT - 8);
  const step_of = pixels => {
    const least = span / Math.max((width - LEFT) / pixels, 1), power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map(each => each * power).find(each => each >= least);
  };
  let mark;

  const draw_tracks = () => {
    const named = [...tracks(events, by("filter").value)];
    const seen = ([, spans]) => spans.some(([begin, end]) => end >= first && begin <= first + span);
    const place = ([name]) => name === "operations" ? 0 : /^(memory|disk) /.test(name) ? 1 : 2;
    const all = named.filter(seen).sort((a, b) => place(a) - place(b));
    const requests = all.filter(one => place(one) === 2), others = all.filter(one => place(one) < 2);
    const rows = [...others, ...(shown.tracks ? requests : requests.slice(-FEW_TRACKS))];
    if (!rows.length) {
      mark = null;
      return into("tracks", nothing("Nothing has happened yet: a row appears with the first request, sleep or copy."));
    }
    const height = 22 + rows.length * ROW + 4, svg = s("svg", {width, height});
    const step = step_of(90);
    for (let at = 0; at <= span * 1.0001; at += step) {
      const place = x(first + at), words = Number(at.toPrecision(6)) + " s";
      svg.append(s("line", {x1: place, x2: place, y1: 18, y2: height, class: "grid"}));
      svg.append(s("text", {x: place, y: 12, class: "axis",
        "text-anchor": place > width - 40 ? "end" : "middle"}, words));
    }
    const slept = naps(events).filter(([begin, end]) => end >= first && begin <= first + span);
    for (const [begin, end] of slept) {
      const box = s("rect", {x: x(begin), y: 18, width: Math.max(x(end) - x(begin), 1), height: height - 18,
        class: "nap"}, s("title", {}, "asleep for " + seconds_text(end - begin)));
      svg.append(box);
    }
    const used = new Set();
    for (const [at, [name, spans]] of rows.entries()) {
      const y = 20 + at * ROW;
      const words = ["sleep, wake, checkpoint", "copies: " + name, name][place([name])];
      svg.append(s("text", {x: 0, y: y + 13}, words.length > 29 ? words.slice(0, 28) + "…" : words));
      const within = spans.filter(([begin, until]) => until >= first && begin <= first + span);
      for (const one of drawn_of(within, x)) {
        used.add(one.key);
        const said = [one.count > 1 ? one.count + " ×" : "", one.what, seconds_text(one.until - one.begin), "from",
          (one.begin - first).toFixed(3), "s"].join(" ").trim();
        svg.append(s("rect", {x: one.left, y: y + 2, rx: 2, width: one.right - one.left, height: ROW - 4,
          fill: COLOURS[one.key] || "#8b949e"}, s("title", {}, said)));
      }
    }
    mark = s("line", {y1: 16, y2: height, class: "mark"});
    svg.append(mark);
    svg.addEventListener("click", event => {
      by("moment").value = Math.max(0, (event.offsetX - LEFT) / (width - LEFT - 8)) * 1000;
      draw();
    });
    const keys = Object.keys(COLOURS).filter(name => used.has(name)).map(name => [COLOURS[name], name]);
    const hidden = requests.length - FEW_TRACKS;
    into("tracks", legend([...keys, ...(slept.length ? [[null, "asleep", "nap"]] : [])]), svg,
      hidden > 0 ? button(shown.tracks ? "show the last " + FEW_TRACKS : "show " + hidden + " earlier requests",
        () => { shown.tracks = !shown.tracks; draw_tracks(); draw(); }) : null);
  };

  const COLUMNS = [["request", slot => slot.request], ["state", slot => slot.to],
    ["computed of all tokens", slot => slot.computed_tokens / (slot.tokens || 1)],
    ["blocks on the device", slot => slot.device_blocks || 0], ["blocks kept below", slot => slot.staged_blocks || 0],
    ["in this state", slot => -slot.since]];
  const draw_slots = (view, moment) => {
    const wanted = by("filter").value, there = [...view.slots.values()].filter(slot => slot.request.includes(wanted));
    const ended = there.filter(slot => view.processes.get(whose(slot)).ended);
    const rows = shown.ended ? there : there.filter(slot => !ended.includes(slot));
    const order = COLUMNS.find(([name]) => name === shown.sort);
    if (order) rows.sort((a, b) => order[1](a) < order[1](b) ? -1 : order[1](a) > order[1](b) ? 1 : 0);
    if (order && shown.down) rows.reverse();
    const heads = COLUMNS.map(([name]) => {
      const one = h("th", {class: "sortable"}, name + (shown.sort === name ? (shown.down ? " ▼" : " ▲") : ""));
      one.addEventListener("click", () => {
        shown.down = shown.sort === name && !shown.down;
        shown.sort = name;
        draw();
      });
      return one;
    });
    const fold = ended.length ? button(shown.ended ? "fold ended processes away"
      : ended.length + " requests of ended processes: show", () => { shown.ended = !shown.ended; draw(); }) : null;
    if (!rows.length)
      return into("slots", nothing("No request is there at this moment: they appear when clients send some."), fold);
    into("slots", h("table", {}, h("tr", {}, heads), rows.slice(0, 500).map(slot => {
      const part = Math.min((slot.computed_tokens || 0) / (slot.tokens || 1), 1);
      return h("tr", {}, h("td", {}, slot.request),
        h("td", {}, s("svg", {width: 12, height: 10}, s("rect", {width: 8, height: 8, y: 1, rx: 2,
          fill: COLOURS[slot.to] || "#8b949e"})), h("span", {}, slot.to)),
        h("td", {}, s("svg", {width: 92, height: 8}, s("rect", {width: 84, height: 6, y: 1, rx: 3, class: "rest"}),
          s("rect", {width: 84 * part, height: 6, y: 1, rx: 3, class: "part"})),
        h("span", {}, (slot.computed_tokens || 0) + " / " + (slot.tokens || 0))),
        h("td", {class: "n"}, slot.device_blocks || 0), h("td", {class: "n"}, slot.staged_blocks || 0),
        h("td", {class: "n"}, seconds_text(moment - slot.since)));
    })), fold);
  };

  // A bar of parts: [size, class or colour, words]. `whole`: what fills it.
  const bar = (parts, whole, length = 420) => {
    const svg = s("svg", {width: length, height: 14, class: "bar"}, s("rect", {width: length, height: 14, rx: 3,
      class: "rest"}));
    let at = 0;
    for (const [size, style, words] of parts) {
      const wide = whole > 0 ? size / whole * length : 0;
      if (wide > 0)
        svg.append(s("rect", {x: at, width: wide, height: 14, rx: 2, class: style}, s("title", {}, words)));
      at += wide;
    }
    return svg;
  };

  const draw_tiers = view => {
    const ORDER = ["device", "host", "disk"];
    const rows = [...view.tiers.values()].filter(tier => shown.ended || !view.processes.get(whose(tier)).ended)
      .sort((a, b) => ORDER.indexOf(a.from) - ORDER.indexOf(b.from));
    if (!rows.length)
      return into("tiers", nothing("No tier has published events yet: the device's appears with the first step, host memory "
        + "and disk with the KV connector (offload)."));
    into("tiers", legend([[null, "pinned", "pinned"], [null, "used, not pinned", "used"],
      [null, "reusable (cached)", "cached"], [null, "empty", "rest"]]),
    h("table", {}, h("tr", {}, ["tier", "process", "", "pinned", "used", "reusable", "empty"].map(name =>
      h("th", {}, name))), rows.map(tier => {
      const [used, pinned, cached, empty] =
        ["used", "pinned", "cached", "empty"].map(name => tier[name + "_blocks"] || 0);
      const parts = [[Math.min(pinned, used), "pinned", pinned + " pinned"],
        [Math.max(used - pinned, 0), "used", used - pinned + " used, not pinned"],
        [cached, "cached", cached + " reusable"]];
      return h("tr", {}, h("td", {}, tier.from), h("td", {}, whose(tier)),
        h("td", {}, bar(parts, used + cached + empty)),
        [pinned, used, cached, empty].map(count => h("td", {class: "n"}, count)));
    })));
  };

  const draw_memory = view => {
    const parts = [...view.memory.values()].filter(part => shown.ended || !view.processes.get(whose(part)).ended);
    if (!parts.length)
      return into("memory", nothing("No worker has published its memory yet: each does when its KV cache is made, and with "
        + "each sleep and wake."));
    const tags = new Map(), lines = [];
    for (const part of parts) {
      const rank = whose(part) + ", rank " + (part.rank || 0);
      if (part.from === "tag") {
        const key = rank + "\n" + part.tag;
        if (!tags.has(key)) tags.set(key, {rank, tag: part.tag, whole: 0, device: 0, host: 0, disk: 0});
        tags.get(key)[part.to] = part.bytes;
        if (part.to === "device") tags.get(key).whole = part.of_bytes;
      } else {
        const of = part.of_bytes ? " of " + bytes_text(part.of_bytes) : "";
        const names = {"device": "on the device", "arena": "saved in host memory", "arena held": "host memory held"};
        lines.push(rank + ": " + bytes_text(part.bytes) + of + " " + (names[part.from] || part.from));
      }
    }
    const most = Math.max(...[...tags.values()].map(tag => Math.max(tag.whole, tag.device + tag.host + tag.disk)), 1);
    into("memory", legend([[null, "on the device", "device"], [null, "saved in host memory", "host"],
      [null, "saved on disk", "disk"]]),
    h("table", {}, h("tr", {}, ["worker", "what", "", "device", "of", "host memory", "disk"].map(name =>
      h("th", {}, name))), [...tags.values()].map(tag => h("tr", {}, h("td", {}, tag.rank), h("td", {}, tag.tag),
      h("td", {}, bar(["device", "host", "disk"].map(where =>
        [tag[where], where, bytes_text(tag[where]) + " " + where]), most)),
      ["device", "whole", "host", "disk"].map(where => h("td", {class: "n"}, bytes_text(tag[where])))))),
    lines.map(line => h("p", {class: "dim"}, line)));
  };

  const draw_operations = view => {
    const all = [...view.operations.values()].reverse();
    if (!all.length)
      return into("operations", nothing("No sleep, wake or checkpoint since the engine began to publish events."));
    const drawn = all.slice(0, shown.operations ? 200 : FEW_OPERATIONS).map(row => {
      const running = row.to === "begin", took = running ? view.latest - row.begin : (row.nanoseconds || 0) / 1e9;
      const state = running ? "running" : row.to === "end" ? "done" : row.to;
      const moved = row.phases.reduce((sum, phase) => sum + (phase.bytes || 0), 0);
      const heading = h("p", {class: "operation"}, h("b", {}, row.from), h("span", {class: "pill " + state}, state),
        h("span", {}, seconds_text(took)), moved ? h("span", {}, bytes_text(moved)) : "",
        h("span", {class: "dim"}, row.whose + ", after " + (row.begin - first).toFixed(2) + " s"));
      const error = row.error ? h("p", {class: "error"}, row.error) : null;
      const high = row.phases.length * 18, LABEL = 120, BAR = 460;
      const svg = s("svg", {width: LABEL + BAR + 330, height: Math.max(high, 1)});
      for (const [at, phase] of row.phases.entries()) {
        const open = phase.to === "begin", long = open ? view.latest - phase.time : (phase.nanoseconds || 0) / 1e9;
        const begin = (open ? phase.time : phase.time - long) - row.begin;
        const place = Math.min(Math.max(begin / Math.max(took, 1e-9), 0), 1) * BAR;
        const wide = Math.min(Math.max(long / Math.max(took, 1e-9) * BAR, 2), BAR - place + 2);
        const style = open ? "running" : phase.to === "end" ? "done" : "failed";
        const rate = phase.bytes && long > 0 ? (phase.bytes / long / 1e9).toFixed(2) + " GB/s" : "";
        const said = [open ? "running" : phase.to === "end" ? "" : phase.to, seconds_text(long),
          phase.bytes ? bytes_text(phase.bytes) : "", rate].filter(Boolean).join("  ·  ");
        svg.append(s("text", {x: LABEL - 10, y: at * 18 + 13, "text-anchor": "end"}, phase.from),
          s("rect", {x: LABEL, y: at * 18 + 3, width: BAR, height: 12, rx: 3, class: "rest"}),
          s("rect", {x: LABEL + place, y: at * 18 + 3, width: wide, height: 12, rx: 2, class: style}),
          s("text", {x: LABEL + BAR + 10, y: at * 18 + 13}, said));
      }
      return h("div", {class: "card"}, heading, error, high ? svg : null);
    });
    const hidden = all.length - FEW_OPERATIONS;
    into("operations", drawn, hidden > 0 ? button(shown.operations ? "show the last " + FEW_OPERATIONS
      : "show " + hidden + " earlier ones", () => { shown.operations = !shown.operations; draw(); }) : null);
  };

  const draw = () => {
    const moment = first + span * by("moment").value / 1000, now = Number(by("moment").value) >= 1000;
    const view = fold(events, now ? Infinity : moment);
    by("at").textContent = (moment - first).toFixed(3) + " s of " + span.toFixed(3) + " s";
    const states = [...view.engines].filter(([of]) => !view.processes.get(of).ended).map(([of, event]) =>
      h("span", {class: "pill " + event.to.split(" ")[0]}, event.to));
    const said = events.length + " events" + (view.lost ? ", " + view.lost + " lost" : "") + ", " + view.steps
      + " steps, " + view.slots.size + " requests" + (now ? "" : " until this moment");
    into("head", h("span", {}, said), states);
    if (mark) {
      mark.setAttribute("x1", x(moment));
      mark.setAttribute("x2", x(moment));
    }
    draw_slots(view, moment);
    draw_tiers(view);
    draw_memory(view);
    draw_operations(view);
  };
  const draw_all = () => { measure(); draw_tracks(); draw(); };
  by("moment").addEventListener("input", draw);
  by("window").addEventListener("change", draw_all);
  by("filter").addEventListener("input", () => { draw_tracks(); draw(); });
  if (typeof addEventListener === "function") addEventListener("resize", draw_all);
  draw_all();
  if (by("key")) follow(events, by, draw_all);
}
)page";

const std::string_view kPageFollows = R"page(
// Asks the server that the page comes from for what is new, once a second, with the key that was typed in: its core,
// and the workers that the core names. A key that was refused is not sent again.
function follow(events, by, show) {
  const after = new Map();  // by pid; of the core, whose pid is not asked for: ""
  let asking = false, refused = null, trouble = "Give the admin key to see the engine.";
  const say = words => { by("said").textContent = words; };
  const call = async (method, params) => {
    const key = by("key").value;
    const headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"};
    const options = {method: "POST", cache: "no-store", credentials: "omit", headers, body: JSON.stringify(params)};
    const answer = await fetch("console/" + method, options), said = await answer.json().catch(() => ({}));
    if (answer.status === 401 || answer.status === 403) refused = key;
    if (!answer.ok) throw Error((said.error && (said.error.what || said.error.message)) || "HTTP " + answer.status);
    return said;
  };
  // Returns how many events are new, and the workers.
  const news_of = async pid => {
    let news = 0, workers = [];
    for (let more = true; more;) {
      const since = after.get(pid) || 0, whose = pid === "" ? {} : {pid};
      const said = await call("events", {after: since, limit: MOST_AT_ONCE, ...whose});
      if (said.next < since) {  // another engine answers: its events count from 1
        after.set(pid, 0);
        continue;
      }
      for (const event of said.events) {
        if (event.type === "lost" && since === 0) continue;  // from before the page was opened
        event.at = event.time || (events.length ? events[events.length - 1].at : 0);
        events.push(event);
        news += 1;
      }
      more = said.events.length >= MOST_AT_ONCE && said.next > since;
      after.set(pid, said.next);
      workers = said.workers || workers;
    }
    return [news, workers];
  };
  const look = async () => {
    if (asking || !by("key").value || by("key").value === refused) return;
    asking = true;
    try {
      let [news, workers] = await news_of("");
      for (const worker of workers) news += (await news_of(worker.pid).catch(() => [0]))[0];  // it may have ended
      if (workers.length && news) events.sort((a, b) => a.at - b.at);
      if (news) {
        events.splice(0, Math.max(0, events.length - MOST_EVENTS));
        show();
      }
      if (by("said").textContent === trouble) say("");  // what a button said stays
    } catch (problem) {
      say(trouble = String(problem.message || problem) + (refused === null ? "" : ": give another key"));
    }
    asking = false;
  };
  // With a warning, the press that finds it there does it.
  const act = (id, method, params, warning) => {
    by(id).addEventListener("click", async () => {
      if (!by("key").value) return say("give the admin key first");
      if (by("key").value === refused) return say("this key was refused: give another key");
      if (warning && by("said").textContent !== warning) return say(warning);
      say(method + " …");
      try {
        const report = await call(method, params), moved = report.freed_bytes || report.restored_bytes;
        say(method + ": " + (report.status || "done")
          + (moved ? ", " + bytes_text(moved) + (report.freed_bytes ? " given back" : " restored") : "")
          + (report.seconds ? " in " + seconds_text(report.seconds) : ""));
      } catch (problem) {
        say(method + ": " + String(problem.message || problem));
      }
    });
  };
  act("sleep", "sleep", {level: 1}, "sleep stops every answer until a wake: press sleep again");
  act("wake", "wake", {}, "");
  act("checkpoint", "checkpoint", {}, "");
  by("key").addEventListener("change", () => { refused = null; say(""); return look(); });
  setInterval(look, 1000);
}
)page";

}  // namespace torpor::console
