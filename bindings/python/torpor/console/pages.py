# SPDX-License-Identifier: Apache-2.0
"""What each screen shows, as lines of text: pure functions of a snapshot and events of the inspector's JSON."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

STYLES = {
    "initialized": "grey62", "onboard staged": "cyan", "onboarding": "cyan", "prefilling": "blue",
    "skipped prefill": "blue", "decoding": "green", "skipped decode": "green", "preempted": "yellow",
    "finishing": "magenta", "finished": "grey50",
    "running": "yellow", "done": "green", "failed": "bold red", "unrecoverable": "bold red", "undone": "magenta",
}  # fmt: skip
# One letter a state: every terminal shows it one column wide.
LETTERS = {
    "initialized": "I", "onboard staged": "s", "onboarding": "o", "prefilling": "P", "skipped prefill": "p",
    "decoding": "D", "skipped decode": "d", "preempted": "x", "finishing": "F",
}  # fmt: skip
_BAR = 24  # columns


def _style(word: str) -> str:
    return STYLES.get(word, "")


def _row(*cells: tuple[object, int, str]) -> Text:
    """Cells of (value, width, style); a negative width is flush right."""
    text = Text()
    for value, width, style in cells:
        words = str(value)[: abs(width)]
        text.append(words.rjust(-width) if width < 0 else words.ljust(width), style)
        text.append("  ")
    return text


def _head(*cells: tuple[str, int]) -> Text:
    return _row(*((name, width, "bold") for name, width in cells))


def _bar(part: float, whole: float, style: str, other: float = 0) -> Text:
    """`other`: of the rest, marked otherwise."""
    full, both = (round(_BAR * of / whole) if whole > 0 else 0 for of in (part, part + other))
    return Text("#" * full, style).append("=" * (both - full), "cyan").append("." * (_BAR - both), "grey50")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def heading(process: dict) -> Text:
    steps = process["steps"]
    text = Text(f"{process['process']} pid {process['pid']}  ")
    text.append("alive" if process["alive"] else "gone", "green" if process["alive"] else "red")
    text.append(f"  {process['engine'] or ''}  step {steps['microseconds']} us  run {steps['running']} ")
    text.append(f"wait {steps['waiting']}  lost {process['lost_events']}")
    return text


def lints(process: dict) -> list[Text]:
    return [
        Text("! ", "bold red").append(f"{each['lint']}  ", "red").append(f"{each['subject']} {each['what']}")
        for each in process["lints"]
    ]


def slots(rows: list[dict]) -> list[Text]:
    """Below the heading a line for each of `chosen_slots`."""
    lines = [
        _head(
            ("SLOT", -5),
            ("REQUEST", 24),
            ("STATE", 15),
            ("COMPUTED/ALL", -13),
            ("DEV", -5),
            ("HOST", -5),
            ("DISK", -5),
            ("IN STATE", -9),
            ("WAITING FOR", 20),
        )
    ]
    for slot in rows:
        state = slot["state"]
        computed = f"{slot['computed_tokens']}/{slot['tokens']}"
        lines.append(
            _row(
                (slot["slot"], -5, ""), (slot["request"], 24, ""),
                (f"{LETTERS.get(state, ' ')} {state}", 15, _style(state)),
                (computed, -13, ""), (slot["device_blocks"], -5, ""), (slot["host_hit_blocks"], -5, ""),
                (slot["disk_hit_blocks"], -5, ""), (_seconds(slot["seconds_in_state"]), -9, ""),
                (slot["waiting_for"], 60, ""),
            )
        )  # fmt: skip
    return lines


def waiting(slot: dict) -> Text:
    """A line of its own for the chosen slot: narrow terminals do not show the last column."""
    words = slot["waiting_for"]
    return Text(f"\n{slot['request']} waits for {words}" if words else "")


# Fields of a slot by which it can be sorted; the first: as they came.
ORDERS = ("", "seconds_in_state", "state", "computed_tokens", "device_blocks", "request")


def chosen_slots(process: dict, wanted: str = "", order: str = "", inverted: bool = False) -> list[dict]:
    rows = [slot for slot in process["slots"] if wanted in slot["request"] or wanted in slot["state"]]
    if order:
        rows.sort(key=lambda slot: slot[order])
    return rows[::-1] if inverted else rows


_HELP = """\
1 slots    2, Enter the chosen request    3 transfers    4 tiers    5 memory    6 operations    7 stops    8 events
arrows, h j k l  choose and scroll   / filter   s sort   i invert   y copy the request's name   tab the next process
space  freeze the view   [ ]  to the change before and after   { }  to the lint before and after
t  to so many seconds after the first event   g  now   e  a picture of the screen (SVG)   q  quit
p pause   c go on   n one step   b breakpoint   x cancel a transfer   : any call of the table in docs/console.md
What stops an engine that goes is pressed twice.

The bar is red while the engine is stopped, and grey while the view is frozen. Letters of states:"""


def help_text() -> list[Text]:
    letters = "   ".join(f"{letter} {state}" for state, letter in LETTERS.items())
    return [*map(Text, _HELP.splitlines()), Text(letters)]


def transfers(process: dict, wanted: str = "") -> list[Text]:
    lines = [_head(("WAY", 5), ("WAITING", -8), ("QUEUED", -8), ("PROMOTED", -8), ("OLDEST", -9), ("ENDED BLOCKS", 40))]
    for way in process["transfers"]:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in way["ended_blocks"].items())
        blocks = way["blocks"]
        lines.append(
            _row(
                (way["way"], 5, "bold"), (blocks["waiting"], -8, ""), (blocks["queued"], -8, ""),
                (blocks["promoted"], -8, ""), (_seconds(way["oldest_seconds"]), -9, ""), (ended, 60, ""),
            )
        )  # fmt: skip
    lines += [
        Text(),
        _head(
            ("LANE", 8), ("JOB", 8), ("UNDER WAY", -9), ("BATCHES", -9), ("FAILED", -7), ("BYTES", -10), ("RATE", -12)
        ),
    ]
    for copy in process["copies"]:
        rate = copy["bytes"] / copy["batch_seconds"] if copy["batch_seconds"] > 0 else 0
        lines.append(
            _row(
                (copy["lane"], 8, ""), (copy["job"], 8, ""), (copy["under_way"], -9, ""), (copy["batches"], -9, ""),
                (copy["failed"], -7, "red" if copy["failed"] else ""), (bytes_text(copy["bytes"]), -10, ""),
                (f"{bytes_text(rate)}/s", -12, ""),
            )
        )  # fmt: skip
    return lines


def tiers(process: dict, wanted: str = "") -> list[Text]:
    lines = [_head(("TIER", 7), ("USED", -8), ("PINNED", -8), ("CACHED", -8), ("EMPTY", -8), ("", _BAR))]
    for tier in process["tiers"]:
        used, cached, empty = tier["used_blocks"], tier["cached_blocks"], tier["empty_blocks"]
        line = _row(
            (tier["tier"], 7, "bold"),
            (used, -8, ""),
            (tier["pinned_blocks"], -8, ""),
            (cached, -8, ""),
            (empty, -8, ""),
        )
        line.append_text(_bar(used, used + cached + empty, "green", cached))
        lines.append(line)
    asked = sum(slot["asked_blocks"] for slot in process["slots"])
    host, disk = (sum(slot[f"{tier}_hit_blocks"] for slot in process["slots"]) for tier in ("host", "disk"))
    return [
        *lines, Text(),
        Text(
            f"requests that are here asked for {asked} blocks below the device: "
            f"{host} in host memory, {disk} on disk"
        ),
        *_comings(process["blocks"]),
    ]  # fmt: skip


def _comings(blocks: dict) -> list[Text]:
    """How many blocks of each tier became findable, and how many no longer are, and why."""
    lines = []
    for tier, of in (("device", blocks), *((tier, blocks[tier]) for tier in ("host", "disk") if tier in blocks)):
        dropped = ", ".join(f"{count} {reason}" for reason, count in of["dropped"].items() if count)
        lines.append(Text(f"{tier}: {of['registered']} blocks became findable; no longer: {dropped or 'none'}"))
    return lines


def memory(process: dict, wanted: str = "") -> list[Text]:
    """What each rank held after its last operation, or when its KV cache was made."""
    lines = [_head(("RANK", -4), ("TAG", 16), ("DEVICE", -10), ("OF", -10), ("HOST", -10), ("DISK", -10), ("", _BAR))]
    for rank in process["memory"]:
        for tag in rank["tags"]:
            there, whole = tag["device_bytes"], tag["region_bytes"]
            cells = [
                (bytes_text(tag[name]), -10, "")
                for name in ("device_bytes", "region_bytes", "host_bytes", "disk_bytes")
            ]
            lines.append(
                _row((rank["rank"], -4, ""), (tag["tag"], 16, "bold"), *cells).append_text(_bar(there, whole, "green"))
            )
        lines.append(Text(f"      device: {_part(rank['device_bytes'], rank['device_capacity_bytes'])}"))
        if rank["device_bytes_of_anybody"]:
            rest = rank["device_bytes_of_anybody"] - rank["device_bytes"]
            lines.append(
                Text(f"      unexplained: {bytes_text(rest)}, the device's own count less all of the above", "yellow")
            )
        used = _part(rank["arena_bytes"], rank["arena_budget_bytes"])
        lines.append(Text(f"      host memory for saved bytes: {used}, {bytes_text(rank['arena_held_bytes'])} held"))
    return lines if len(lines) > 1 else [Text("no rank has told its memory yet: it does with each sleep and wake")]


def _part(bytes: int, of: int) -> str:
    return bytes_text(bytes) + (f" of {bytes_text(of)}" if of else "")


def operations(process: dict, wanted: str = "") -> list[Text]:
    """`whose`, where there is one: the process that carried it out."""
    lines = []
    for operation in reversed(process["operations"]):
        state = operation["state"]
        line = Text(f"{operation['operation']} {operation['number']}  ", "bold").append(state, _style(state))
        line.append(f"  {operation['whose']}" if "whose" in operation else "", "grey62")
        lines.append(line.append(f"  {operation['seconds']:.3f} s  ").append(operation["error"], "red"))
        longest = max((phase["seconds"] for phase in operation["phases"]), default=0)
        for phase in operation["phases"]:
            line = _row(("", 2, ""), (phase["phase"], 10, ""), (phase["state"], 8, _style(phase["state"])))
            line.append_text(_bar(phase["seconds"], longest, _style(phase["state"])))
            lines.append(line.append(f"  {phase['seconds']:.3f} s  {bytes_text(phase['bytes'])}"))
        lines.append(Text())
    return lines or [Text("no sleep, wake or checkpoint since it began to tell")]


def stops(process: dict, wanted: str = "") -> list[Text]:
    if not process["stops"]:
        return [Text("nothing stops the engine; p pauses it, b sets a breakpoint (:breakpoint.list shows them)")]
    return [
        Text(
            f"stop {stop['stop']} by a {stop['cause']} for {_seconds(stop['seconds'])}  {stop['request'] or ''}", "red"
        )
        for stop in process["stops"]
    ]


def events(told: list[dict], wanted: str = "") -> list[Text]:
    known = ("time", "process", "pid", "sequence", "type")
    lines = []
    for event in told:
        rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in known)
        line = _row((event.get("sequence", ""), -9, "grey62"), (event["process"], 8, ""), (event["type"], 11, "bold"))
        line.append(rest)
        if wanted in line.plain:
            lines.append(line)
    return lines


def waterfall(told: list[dict], request: str, width: int) -> list[Text]:
    """A request's states, the engine's operations and the copies of that time, on one scale; its events below."""
    own = [event for event in told if event["type"] == "slot" and event.get("request") == request]
    if not own:
        return [Text(f"nothing is known of {request or 'a request'}: choose one on the screen of slots")]
    begin, end = own[0]["time"], max(event["time"] for event in told if "time" in event)
    if own[-1]["to"] == "finished":
        end = own[-1]["time"]
    columns = max(width - 14, 10)

    def column(moment: float) -> int:
        return round((moment - begin) / max(end - begin, 1e-9) * (columns - 1))

    def track(name: str, spans: list[tuple[float, float, str, str]]) -> Text:
        cells = [(" ", "")] * columns
        for first, last, letter, style in spans:
            for at in range(max(column(first), 0), min(column(last), columns - 1) + 1):
                cells[at] = (letter, style)
        line = Text(f"{name:>12}  ", "bold")
        for letter, style in cells:
            line.append(letter, style)
        return line

    states = []
    last_words = {event.get("pid"): event["time"] for event in told if "time" in event}
    for event, after in zip(own, [*own[1:], None], strict=True):
        until = after["time"] if after else end
        if after and after.get("pid") != event.get("pid"):  # another process went on with it
            until = last_words.get(event.get("pid"), until)
        if event["to"] in LETTERS:
            states.append((event["time"], until, LETTERS[event["to"]], _style(event["to"])))
    lines = [Text(f"{request}  {end - begin:.3f} s", "bold"), track("slot", states)]
    tracks: dict[str, list] = {"engine": []}
    for event in told:
        if event["type"] == "operation" and event.get("to") in ("end", "failed", "unrecoverable"):
            took = event.get("nanoseconds", 0) / 1e9
            tracks["engine"].append(
                (event["time"] - took, event["time"], "=", "red" if event["to"] != "end" else "magenta")
            )
        elif event["type"] == "copy" and event.get("to") == "end":
            took = event.get("nanoseconds", 0) / 1e9
            tracks.setdefault(f"{event['lane']} {event['from']}"[:12], []).append(
                (event["time"] - took, event["time"], "-", "cyan")
            )
    lines += [
        track(name, [span for span in spans if span[1] >= begin and span[0] <= end]) for name, spans in tracks.items()
    ]
    return [*lines, Text(), *events([event for event in told if event.get("request") == request])]


# By the key that shows it.
PAGES: dict[str, tuple[str, Callable[[dict, str], list[Text]]]] = {
    "3": ("transfers", transfers),
    "4": ("tiers", tiers),
    "5": ("memory", memory),
    "6": ("operations", operations),
    "7": ("stops", stops),
}
