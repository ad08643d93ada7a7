// SPDX-License-Identifier: Apache-2.0
#include "console/event_page.h"

#include <initializer_list>
#include <string_view>

#include "console/event_page_script.h"

namespace torpor::console {
namespace {

// Style and layout of both pages. Each colour has a name, so that it is readable on a light and on a dark screen.
constexpr std::string_view kStyle = R"page(
:root { --page: #f6f8fa; --card: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --accent: #0969da;
  --good: #1a7f37; --bad: #cf222e; --warm: #9a6700; --sleep: #8250df; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #151b23; --ink: #f0f6fc; --dim: #9198a1;
  --line: #3d444d; --accent: #4493f8; --good: #3fb950; --bad: #f85149; --warm: #d29922; --sleep: #ab7df8; } }
body { font: 13px/1.5 ui-sans-serif, system-ui, sans-serif; background: var(--page); color: var(--ink); margin: 0; }
header { background: var(--card); border-bottom: 1px solid var(--line); padding: 10px 24px; position: sticky; top: 0;
  display: flex; flex-wrap: wrap; gap: 8px 20px; align-items: center; z-index: 1; }
h1 { font-size: 17px; margin: 0; letter-spacing: 0.02em; }
#head { display: inline-flex; gap: 10px; color: var(--dim); }
main { padding: 4px 24px 40px; max-width: 1400px; margin: 0 auto; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px;
  margin-top: 16px; overflow-x: auto; }
h2 { font-size: 14px; margin: 0; } .help { color: var(--dim); margin: 0 0 8px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 3px 18px 3px 0; text-align: left; white-space: pre; } th { color: var(--dim); font-weight: 500; }
tr + tr td { border-top: 1px solid var(--line); } td.n { text-align: right; } th.sortable { cursor: pointer; }
input, select, button { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 8px; }
button { cursor: pointer; } button.more { margin-top: 8px; color: var(--accent); }
input[type=range] { flex: 1; min-width: 200px; accent-color: var(--accent); } label { color: var(--dim); }
#said { color: var(--warm); } .dim { color: var(--dim); margin: 2px 0; }
.empty { color: var(--dim); font-style: italic; }
.error { color: var(--bad); margin: 2px 0 6px; white-space: pre-wrap; }
.legend { margin: 0 0 6px; color: var(--dim); } .key { margin-right: 14px; white-space: nowrap; }
.swatch { margin-right: 5px; }
.pill { border-radius: 10px; padding: 0 9px; color: #ffffff; background: var(--dim); }
.pill.done, .pill.awake { background: #1a7f37; } .pill.running, .pill.falling, .pill.waking { background: #9a6700; }
.pill.asleep { background: #8250df; } .pill.failed, .pill.unrecoverable { background: #cf222e; }
.operation { display: flex; gap: 12px; margin: 0 0 4px; align-items: center; }
#slots { max-height: 28em; overflow: auto; }
.card + .card { border-top: 1px solid var(--line); margin-top: 8px; padding-top: 8px; }
svg text { fill: var(--ink); font-size: 12px; } svg text.axis { fill: var(--dim); font-size: 11px; }
.grid { stroke: var(--line); } .mark { stroke: var(--accent); stroke-width: 2; }
.nap { fill: var(--sleep); fill-opacity: 0.18; } .rest { fill: var(--line); fill-opacity: 0.6; }
.part, .done, .device { fill: var(--good); } .host, .used { fill: var(--accent); }
.pinned { fill: var(--warm); } .cached { fill: var(--good); fill-opacity: 0.6; } .disk { fill: var(--sleep); }
.failed { fill: var(--bad); } .running { fill: var(--warm); }
)page";
constexpr std::string_view kHeading = R"page(<header><h1>torpor</h1><span id="head"></span>)page";
constexpr std::string_view kBody = R"page(</header><main>
<section><h2>Timeline</h2>
<p class="help">Each request is a row, coloured by its state; click to go to a moment. In purple bands the engine
slept.</p>
<div class="operation"><label>show <select id="window"><option value="0">everything</option>
<option value="600">last 10 minutes</option><option value="60">last minute</option>
<option value="10">last 10 seconds</option></select></label><label>requests with <input id="filter" size="16"></label>
<input type="range" id="moment" min="0" max="1000" value="1000"><label id="at"></label></div>
<div id="tracks"></div></section>
<section><h2>Requests</h2>
<p class="help">Requests that had not ended at this moment, and what each does; click a column's name to sort.</p>
<div id="slots"></div></section>
<section><h2>Sleeps, wakes and checkpoints</h2>
<p class="help">The newest first: each phase from when to when, how much it moved and how fast.</p>
<div id="operations"></div></section>
<section><h2>Tiers</h2>
<p class="help">Blocks of KV in each place: pinned ones are in use, reusable ones can be found by later requests.</p>
<div id="tiers"></div></section>
<section><h2>Memory</h2>
<p class="help">What each worker holds on its device, and what it saved in host memory and on disk.</p>
<div id="memory"></div></section></main>
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
<label>admin key <input id="key" type="password" size="24" autocomplete="off"></label>
<button id="sleep">sleep</button><button id="wake">wake</button><button id="checkpoint">checkpoint</button>
<span id="said">Give the admin key to see the engine.</span>)page";

constexpr std::string_view kBehindStyle = "</style></head><body>";
constexpr std::string_view kEnd = "</script></body></html>\n";

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

}  // namespace

std::string event_page_head() {
  return joined({kHead, kStyle, kBehindStyle, kHeading, kBody, "<script type=\"text/plain\" id=\"events\">\n"});
}
std::string event_page_tail() { return joined({"</script><script>", kPageFolds, kPageDraws, kPageFollows, kEnd}); }
std::string live_page() {
  return joined({kLiveHead, kStyle, kBehindStyle, kHeading, kAsks, kBody, "<script>", kPageFolds, kPageDraws,
                 kPageFollows, kEnd});
}

}  // namespace torpor::console
