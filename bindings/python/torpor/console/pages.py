# SPDX-License-Identifier: Apache-2.0
"""What each screen shows, as lines of text: pure functions of a snapshot and events of the inspector's JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.bar import Bar
from rich.console import Console
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
_BAR, _SHORT_BAR = 24, 16  # columns
# Parts of a bar differ without colours, too.
_PINNED, _USED, _REUSABLE, _EMPTY = ("█", "yellow"), ("▓", "blue"), ("▒", "green"), ("░", "grey50")
_DEVICE, _HOST, _DISK = ("█", "green"), ("▓", "blue"), ("▒", "magenta")
_PLAIN = Console(width=_BAR, color_system=None, force_terminal=False)

# One sentence a screen: what it answers.
HINTS = {
    "1": "What each request does now and what it waits for; Enter shows one over time.",
    "2": "One request over time: its states, operations and copies, and its events.",
    "3": "Blocks on their way between tiers, and what was copied how fast.",
    "4": "Where blocks of KV are: pinned ones are in use, reusable ones can be found.",
    "5": "What each worker holds on its device, in host memory and on disk.",
    "6": "Sleeps, wakes and checkpoints: each phase from when to when, and how fast.",
    "7": "What holds the engine now, who stopped it, and for how long.",
    "8": "All events as they were published; / filters them.",
    "?": "Keys of this console, and the letters of states.",
}
_TABS = (
    ("1", "slots"), ("2", "request"), ("3", "transfers"), ("4", "tiers"), ("5", "memory"), ("6", "operations"),
    ("7", "stops"), ("8", "events"),
)  # fmt: skip


def tabs(page: str) -> Text:
    """Return the names of the screens by their keys, in 80 columns; a click on one shows it."""
    text = Text()
    for key, name in _TABS:
        line = Text(f"{key} {name}", "reverse bold" if key == page else "")
        line.apply_meta({"@click": f"app.page('{key}')"})
        text.append_text(line).append(" ")
    return text


def _style(word: str) -> str:
    return STYLES.get(word, "")


def _row(*cells: tuple[object, int, str]) -> Text:
    """Cells of (value, width, style); a negative width is flush right."""
    text = Text()
    for value, width, style in cells:
        cell = Text(str(value), style)
        cell.truncate(abs(width))
        cell.align("right" if width < 0 else "left", abs(width))
        text.append_text(cell).append("  ")
    return text


def _head(*cells: tuple[str, int]) -> Text:
    return _row(*((name, width, "bold") for name, width in cells))


def _bar(parts: Iterable[tuple[float, tuple[str, str]]], whole: float, columns: int = _BAR) -> Text:
    """Return a bar of parts: how much of `whole` each is, with its character and style."""
    text, before, filled = Text(), 0.0, 0
    for size, (character, style) in parts:
        before += size
        until = min(round(columns * before / whole), columns) if whole > 0 else 0
        text.append(character * (until - filled), style)
        filled = until
    return text.append(_EMPTY[0] * (columns - filled), _EMPTY[1])


def _span(begin: float, end: float, whole: float, style: str) -> Text:
    """Return when something was, as a bar within `whole` seconds."""
    least = whole / _BAR / 8  # an eighth of a column is the least that can be seen
    drawn = _PLAIN.render(Bar(max(whole, 1e-9), begin, max(end, begin + least), width=_BAR))
    return Text("".join(segment.text for segment in drawn).rstrip("\n").ljust(_BAR), style)


def _key(*names: tuple[str, tuple[str, str]]) -> Text:
    """Return the legend of a bar."""
    text = Text()
    for name, (character, style) in names:
        text.append(character, style).append(f" {name}   ", "grey62")
    return text


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
    text = Text(f"{process['process']} pid {process['pid']} ")
    text.append("alive" if process["alive"] else "gone", "green" if process["alive"] else "red")
    text.append(f" {process['engine'] or ''}  step {steps['microseconds']} us  run {steps['running']} ")
    text.append(f"wait {steps['waiting']}")
    if process["lost_events"]:
        text.append(f"  {process['lost_events']} events lost", "yellow")
    return text


def lints(process: dict) -> list[Text]:
    return [
        Text("! ", "bold red").append(f"{each['lint']}  ", "red").append(f"{each['subject']} {each['what']}")
        for each in process["lints"]
    ]


# Heads of the table of slots, each with the field by which a click sorts.
COLUMNS = (
    ("REQUEST", "request"), ("STATE", "state"), ("COMPUTED", "computed_tokens"), ("DEV", "device_blocks"),
    ("HOST", ""), ("DISK", ""), ("IN STATE", "seconds_in_state"), ("WAITING FOR", ""),
)  # fmt: skip


def slot_cells(slot: dict) -> list[Text]:
    """Return a row of the table of slots: a cell for each of COLUMNS."""
    state, right = slot["state"], "right"
    name = Text(slot["request"])
    name.truncate(22, overflow="ellipsis")
    return [
        name,
        Text(f"{LETTERS.get(state, ' ')} {state}", _style(state)),
        Text(f"{slot['computed_tokens']}/{slot['tokens']}", justify=right),
        *(Text(str(slot[name]), justify=right) for name in ("device_blocks", "host_hit_blocks", "disk_hit_blocks")),
        Text(_seconds(slot["seconds_in_state"]), justify=right),
        Text(slot["waiting_for"]),
    ]


NO_SLOTS = "No request is here now: they appear when clients send some."


def waiting(slot: dict) -> Text:
    """A line of its own for the chosen slot: narrow terminals do not show the last column."""
    words = slot["waiting_for"]
    return Text(f"{slot['request']} waits for {words}" if words else "")


# Fields of a slot by which it can be sorted; the first: as they came.
ORDERS = ("", "seconds_in_state", "state", "computed_tokens", "device_blocks", "request")


def chosen_slots(process: dict, wanted: str = "", order: str = "", inverted: bool = False) -> list[dict]:
    rows = [slot for slot in process["slots"] if wanted in slot["request"] or wanted in slot["state"]]
    if order:
        rows.sort(key=lambda slot: slot[order])
    return rows[::-1] if inverted else rows


_HELP = """\
1 to 8           the screens; Enter: the chosen request over time
arrows, h j k l  choose and scroll        tab  the next process
/                filter                   d    show or hide ended processes
s i              sort by another column, turn the order; a click on a column sorts
y                copy the request's name  e    a picture of the screen (SVG)
space            freeze the view          g    now      q  quit
[ ]  { }         to the change, to the lint before and after this moment
t                to so many seconds after the first event
p c n            pause the engine (press twice), go on, one step of a paused one
b x              breakpoint, cancel a transfer
:                any call of the table in docs/console.md

The bar is red while the engine is stopped, and grey while the view is frozen.
Letters of states:"""


def help_text() -> list[Text]:
    letters = [Text(f"  {letter}  {state}", _style(state)) for state, letter in LETTERS.items()]
    return [*map(Text, _HELP.splitlines()), *letters]


def transfers(process: dict, wanted: str = "") -> list[Text]:
    lines = [_head(("WAY", 7), ("WAITING", -8), ("QUEUED", -8), ("PROMOTED", -8), ("OLDEST", -9), ("ENDED BLOCKS", 40))]
    for way in process["transfers"]:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in way["ended_blocks"].items())
        blocks = way["blocks"]
        lines.append(
            _row(
                (way["way"], 7, "bold"), (blocks["waiting"], -8, ""), (blocks["queued"], -8, ""),
                (blocks["promoted"], -8, ""), (_seconds(way["oldest_seconds"]), -9, ""), (ended, 60, ""),
            )
        )  # fmt: skip
    lines += [
        Text(),
        _head(
            ("LANE", 8), ("JOB", 8), ("UNDER WAY", -9), ("BATCHES", -9), ("FAILED", -7), ("BYTES", -10), ("RATE", -12)
        ),
    ]
    if not process["copies"]:
        lines[-1] = Text("No bytes were copied yet: they are with each sleep and wake, and by the KV connector.")
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
    if not process["tiers"]:
        return [
            Text("No tier has published events yet: the device does with its first step, others with a KV connector.")
        ]
    lines = [_head(("TIER", 7), ("USED", -8), ("PINNED", -8), ("REUSABLE", -8), ("EMPTY", -8))]
    for tier in sorted(process["tiers"], key=lambda tier: ("device", "host", "disk").index(tier["tier"])):
        used, cached, empty = tier["used_blocks"], tier["cached_blocks"], tier["empty_blocks"]
        pinned = min(tier["pinned_blocks"], used)
        line = _row(
            (tier["tier"], 7, "bold"),
            (used, -8, ""),
            (tier["pinned_blocks"], -8, ""),
            (cached, -8, ""),
            (empty, -8, ""),
        )
        parts = ((pinned, _PINNED), (used - pinned, _USED), (cached, _REUSABLE))
        line.append_text(_bar(parts, used + cached + empty))
        lines.append(line)
    lines.append(_key(("pinned", _PINNED), ("used", _USED), ("reusable", _REUSABLE), ("empty", _EMPTY)))
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
    if not process["memory"]:
        return [Text("No rank has published its memory yet: it does with each sleep and wake.")]
    lines = [
        _head(("RANK", -4), ("TAG", 9), ("DEVICE", -9), ("OF", -9), ("HOST", -9), ("DISK", -9)),
    ]
    names = ("device_bytes", "region_bytes", "host_bytes", "disk_bytes")
    for rank in process["memory"]:
        sums = [max(tag["region_bytes"], tag["device_bytes"] + tag["host_bytes"]) for tag in rank["tags"]]
        for tag in rank["tags"]:
            cells = [(bytes_text(tag[name]), -9, "") for name in names]
            kinds = zip((names[0], *names[2:]), (_DEVICE, _HOST, _DISK), strict=True)
            bar = _bar([(tag[name], kind) for name, kind in kinds], max(sums), _SHORT_BAR)
            lines.append(_row((rank["rank"], -4, ""), (tag["tag"], 9, "bold"), *cells).append_text(bar))
        whose = f" of {rank['whose']}" if "whose" in rank else ""
        lines.append(Text(f"      device{whose}: {_part(rank['device_bytes'], rank['device_capacity_bytes'])}"))
        if rank["device_bytes_of_anybody"]:
            rest = rank["device_bytes_of_anybody"] - rank["device_bytes"]
            lines.append(
                Text(f"      unexplained: {bytes_text(rest)}, the device's own count less all of the above", "yellow")
            )
        used = _part(rank["arena_bytes"], rank["arena_budget_bytes"])
        lines.append(Text(f"      host memory for saved bytes: {used}, {bytes_text(rank['arena_held_bytes'])} held"))
    return [*lines, _key(("on the device", _DEVICE), ("in host memory", _HOST), ("on disk", _DISK))]


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
        whole = max(
            [operation["seconds"], *(phase["after_seconds"] + phase["seconds"] for phase in operation["phases"])]
        )
        for phase in operation["phases"]:
            began, took, bytes = phase["after_seconds"], phase["seconds"], phase["bytes"]
            line = _row((phase["phase"], 10, ""), (phase["state"], 7, _style(phase["state"])))
            line.append_text(_span(began, began + took, whole, _style(phase["state"])))
            line.append(f" {took:8.3f} s")
            if bytes:
                line.append(f" {bytes_text(bytes):>9}").append(f" {bytes / took / 1e9:6.2f} GB/s" if took > 0 else "")
            lines.append(line)
        lines.append(Text())
    return lines or [Text("No sleep, wake or checkpoint since it began to publish events.")]


def stops(process: dict, wanted: str = "") -> list[Text]:
    if not process["stops"]:
        return [Text("Nothing stops the engine: p pauses it, b sets a breakpoint (:breakpoint.list shows them).")]
    return [
        Text(
            f"stop {stop['stop']} by a {stop['cause']} for {_seconds(stop['seconds'])}  {stop['request'] or ''}", "red"
        )
        for stop in process["stops"]
    ]


def events(published: list[dict], wanted: str = "") -> list[Text]:
    if not published:
        return [Text("No event is there yet.")]
    known = ("time", "process", "pid", "sequence", "type")
    lines = []
    for event in published:
        rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in known)
        line = _row((event.get("sequence", ""), -9, "grey62"), (event["process"], 8, ""), (event["type"], 11, "bold"))
        line.append(rest)
        if wanted in line.plain:
            lines.append(line)
    return lines


def waterfall(published: list[dict], request: str, width: int) -> list[Text]:
    """A request's states, the engine's operations and the copies of that time, on one scale; its events below."""
    own = [event for event in published if event["type"] == "slot" and event.get("request") == request]
    if not own:
        return [Text(f"nothing is known of {request or 'a request'}: choose one on the screen of slots")]
    begin, end = own[0]["time"], max(event["time"] for event in published if "time" in event)
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
    last_words = {event.get("pid"): event["time"] for event in published if "time" in event}
    for event, after in zip(own, [*own[1:], None], strict=True):
        until = after["time"] if after else end
        if after and after.get("pid") != event.get("pid"):  # another process went on with it
            until = last_words.get(event.get("pid"), until)
        if event["to"] in LETTERS:
            states.append((event["time"], until, LETTERS[event["to"]], f"reverse {_style(event['to'])}"))
    lines = [Text(f"{request}  {end - begin:.3f} s", "bold"), track("slot", states)]
    tracks: dict[str, list] = {"engine": []}
    for event in published:
        if event["type"] == "operation" and event.get("to") in ("end", "failed", "unrecoverable"):
            took = event.get("nanoseconds", 0) / 1e9
            tracks["engine"].append(
                (event["time"] - took, event["time"], "█", "red" if event["to"] != "end" else "magenta")
            )
        elif event["type"] == "copy" and event.get("to") == "end":
            took = event.get("nanoseconds", 0) / 1e9
            tracks.setdefault(f"{event['lane']} {event['from']}"[:12], []).append(
                (event["time"] - took, event["time"], "■", "cyan")
            )
    lines += [
        track(name, [span for span in spans if span[1] >= begin and span[0] <= end]) for name, spans in tracks.items()
    ]
    axis = f"{end - begin:.3f} s"
    lines.append(Text(f"{'':>12}  0 s{axis.rjust(columns - 3)}", "grey62"))
    seen = dict.fromkeys(event["to"] for event in own if event["to"] in LETTERS)
    key = _key(*((name, (LETTERS[name], f"reverse {_style(name)}")) for name in seen))
    lines.append(Text(" " * 14).append_text(key))
    return [*lines, Text(), *events([event for event in published if event.get("request") == request])]


# By the key that shows it.
PAGES: dict[str, tuple[str, Callable[[dict, str], list[Text]]]] = {
    "3": ("transfers", transfers),
    "4": ("tiers", tiers),
    "5": ("memory", memory),
    "6": ("operations", operations),
    "7": ("stops", stops),
}
