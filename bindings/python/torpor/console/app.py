# SPDX-License-Identifier: Apache-2.0
"""The screens in a terminal. Needs Textual: pip install torpor[console]."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Offset, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import DataTable, Footer, Input, Static

import torpor.console
from torpor.console import pages
from torpor.console.source import Live, printable
from torpor.errors import Busy, Error, NotFound

_LOOKS_A_SECOND = 4
_LEASE = 60
_PATIENCE = 5  # seconds for an answer: the screen stands meanwhile
# What may take longer. Each has a connection and a thread of its own, so that the screen and its stops go on.
_SLOW = torpor.console.FRONT_METHODS | {"transfer.wait"}
_ASKED = {
    "filter": "of a request's name or a state",
    "call": "METHOD NAME=VALUE …",
    "moment": "seconds after the first event",
}
_CHANGES = "slot,operation,engine,stop"
_SAID = 200  # characters of an answer


class Lines(ScrollView, can_focus=True):  # type: ignore[call-arg]  # Textual's, which may not be here
    """Lines of text, of which only those that are seen are drawn."""

    BINDINGS: ClassVar = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("h", "scroll_left", show=False),
        Binding("l", "scroll_right", show=False),
    ]

    def __init__(self, **options):
        super().__init__(**options)
        self.lines: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        self.lines = lines
        self.virtual_size = Size(max((line.cell_len for line in lines), default=0), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        if at >= len(self.lines):
            return Strip.blank(self.size.width, self.rich_style)
        line = self.lines[at].copy()
        line.end = ""
        strip = Strip(line.render(self.app.console), line.cell_len).apply_style(self.rich_style)
        # What is added has a style, too: without colours (NO_COLOR) Textual asks each part for its own.
        return strip.crop(self.scroll_offset.x, self.scroll_offset.x + self.size.width).adjust_cell_length(
            self.size.width, self.rich_style
        )


class Slots(DataTable):
    """The table of slots. When it is filled anew, the chosen row stays chosen, and what is in sight stays there."""

    BINDINGS: ClassVar = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("h", "scroll_left", show=False),
        Binding("l", "scroll_right", show=False),
    ]

    def __init__(self, **options):
        super().__init__(cursor_type="row", zebra_stripes=True, **options)
        self._heads: list[str] = []
        self._shown: list[dict] = []

    def show(self, rows: list[dict], order: str, inverted: bool) -> None:
        heads = [f"{name} {'▼' if inverted else '▲'}" if by and by == order else name for name, by in pages.COLUMNS]
        if rows == self._shown and heads == self._heads:
            return
        self._shown = rows
        row, offset = self.cursor_row, self.scroll_offset
        with self.prevent(DataTable.RowHighlighted):
            self.clear(columns=heads != self._heads)
            if heads != self._heads:
                self._heads = heads
                self.add_columns(*heads)
            for slot in rows:
                self.add_row(*pages.slot_cells(slot))
            row = max(min(row, len(rows) - 1), 0)
            self.move_cursor(row=row)
            self.call_after_refresh(self._scroll_back, offset, row)  # the table has no size before

    def _scroll_back(self, offset: Offset, row: int) -> None:
        if self.cursor_row == row:
            self.scroll_to(x=offset.x, y=offset.y, animate=False, force=True)

    @property
    def lines(self) -> list[Text]:
        """Return the text of its cells by row, the heads first: for a reader without a screen."""
        rows = [[Text(head) for head in self._heads], *(self.get_row_at(at) for at in range(self.row_count))]
        return [Text("  ").join(cells) for cells in rows]


class Console(App):
    """`readonly`: nothing that changes the engine is sent, whatever is pressed."""

    ENABLE_COMMAND_PALETTE = False  # each screen has its keys below it
    CSS = """
    #top { height: auto; max-height: 8; background: $panel; padding: 0 1; }
    #top.past { background: $secondary; } #top.frozen { background: $surface-lighten-2; }
    #top.stopped { background: $error; }
    #tabs { height: 1; background: $boost; padding: 0 1; link-style: none; }
    #hint { height: 1; color: $text-muted; padding: 0 1; }
    #slots, #lines { height: 1fr; padding: 0 1; } .away { display: none; }
    #filter { display: none; } #filter.asked { display: block; }
    """
    BINDINGS: ClassVar = [
        *(Binding(str(key), f"page('{key}')", show=False) for key in range(1, 9)),
        Binding("slash", "ask('filter')", "filter", key_display="/"),
        Binding("colon", "ask('call')", show=False),
        Binding("b", "ask('call', 'breakpoint.add type=slot to=')", show=False),
        Binding("x", "ask('call', 'transfer.cancel candidate=')", show=False),
        Binding("s", "sort", "sort"),
        Binding("i", "invert", show=False),
        Binding("y", "copy", show=False),
        Binding("e", "export", show=False),
        Binding("d", "ended", show=False),
        Binding("question_mark", "page('?')", "help", key_display="?"),
        Binding("enter", "page('2')", show=False),
        Binding("space", "freeze", "freeze"),
        Binding("left_square_bracket", "travel(-1)", "time", key_display="[ ]"),
        Binding("right_square_bracket", "travel(1)", show=False),
        Binding("left_curly_bracket", "lint(-1)", show=False),
        Binding("right_curly_bracket", "lint(1)", show=False),
        Binding("t", "ask('moment')", show=False),
        Binding("g", "now", show=False),
        Binding("p", "control('pause')", "pause"),
        Binding("c", "control('resume')", "go on"),
        Binding("n", "control('step')", show=False),
        Binding("tab", "process", show=False, priority=True),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, source: Live, readonly: bool = False):
        super().__init__()
        self.source = source
        self.readonly = readonly
        self.page = "1"
        self.wanted = ""
        self.asked = "filter"  # what is typed in
        self.order, self.inverted = "", False  # of slots
        self.row = 0
        self.frozen = False
        self.moment: float | None = None  # seconds after the first event; None: now
        self.said = ""
        self.request = ""  # of the screen of a request
        self.kept: tuple | None = None  # the process that was asked for, or acted on: it stays the one that is shown
        self.ended = False  # processes that have ended are shown, too
        self.to_stop: tuple | None = None  # the process that stops when the key of pause is pressed again
        self._snapshot: dict = {"processes": []}
        self._published: list[dict] = []
        self._engines: dict[str, torpor.console.Engine] = {}  # by the path of their ring; each keeps its stops

    def compose(self) -> ComposeResult:
        yield Static(id="top")
        yield Static(id="tabs")
        yield Static(id="hint")
        yield Slots(id="slots")
        yield Lines(id="lines")
        yield Input(id="filter", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.look()
        self.set_interval(1 / _LOOKS_A_SECOND, self.look)

    def on_unmount(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self.source.close()

    # --- what is shown

    @property
    def body(self) -> Slots | Lines:
        """Return the widget that fills the screen."""
        return self.query_one(Lines) if self.query_one(Slots).has_class("away") else self.query_one(Slots)

    @property
    def processes(self) -> list[dict]:
        """Return the processes that keys step through: those that live, or all if none does or all were asked for."""
        all = sorted(self._snapshot["processes"], key=lambda each: (each["alive"], each["steps"]["seen"]), reverse=True)
        alive = [each for each in all if each["alive"]]
        return alive if alive and not self.ended else all

    @property
    def process(self) -> dict | None:
        """The one that was asked for or acted on; else the one with requests, of those that live first of all."""
        there = self.processes
        return next((each for each in there if _name(each) == self.kept), there[0] if there else None)

    @property
    def began(self) -> float | None:
        """When the first event of all was told: moments are counted from there."""
        return min((each["began"] for each in self._snapshot["processes"] if each["began"] is not None), default=None)

    def engine(self) -> dict:
        """The process that is shown, with what all have: operations in their order, because an engine that fell asleep
        may wake in another process; memory and copies, because workers publish them."""
        done = [
            (each["began"] or 0, number, operation | {"whose": f"{each['process']} pid {each['pid']}"})
            for each in self._snapshot["processes"]
            for number, operation in enumerate(each["operations"])
        ]
        process = self.process or {}
        # What an ended process had is not there now: it is shown alone.
        own = process.get("memory") and not process["alive"]
        others = [process] if own else [each for each in self.processes if each["alive"] or not process.get("memory")]
        return process | {
            "operations": [operation for *_, operation in sorted(done, key=lambda each: each[:2])],
            "memory": [
                row | {"whose": f"{each['process']} pid {each['pid']}"} for each in others for row in each["memory"]
            ] or process["memory"],
            "copies": [row for each in others for row in each["copies"]] or process["copies"],
        }  # fmt: skip

    def look(self) -> None:
        if not self.frozen and self.moment is None:
            self._snapshot = self.source.at(None)
        self.draw()

    def draw(self) -> None:
        if not self.query("#top"):
            return  # it is ending
        process, top = self.process, self.query_one("#top", Static)
        top.set_class(self.moment is not None, "past")
        top.set_class(self.frozen, "frozen")
        top.set_class(bool(process and process["stops"]), "stopped")
        if process is None:
            why = f"no engine tells anything in {self.source.path}. {self.source.ended or self.said}"
            top.update(Text(printable(why)))
            return
        mode = (
            "FROZEN"
            if self.frozen
            else ("LIVE" if process["alive"] else "LAST WORDS")
            if self.moment is None
            else f"AT {self.moment:.1f} s"
        )
        text = pages.heading(process).append(f"  {mode}{'  READ-ONLY' if self.readonly else ''}", "bold")
        if hiding := [each for each in self._snapshot["processes"] if each not in self.processes]:
            text.append(f"  {len(hiding)} ended (d)", "grey62")
        if self.said:
            text.append(f"  {printable(self.said)}", "bold")
        for line in [line for each in (process, *hiding) for line in pages.lints(each)][:5]:
            text.append("\n").append_text(line)
        top.update(text)
        self.query_one("#tabs", Static).update(pages.tabs(self.page))
        self.query_one("#hint", Static).update(pages.HINTS[self.page])
        rows = self._rows(process) if self.page == "1" else []
        self.query_one(Slots).set_class(self.page != "1" or not rows, "away")
        self.query_one(Lines).set_class(self.page == "1" and bool(rows), "away")
        if rows:
            self.query_one(Slots).show(rows, self.order, self.inverted)
            self._show_chosen()
        else:
            self.query_one(Lines).show(self._lines(process))
        if self.focused in (None, self.query_one(Slots), self.query_one(Lines)):
            self.body.focus()

    def _lines(self, process: dict) -> list[Text]:
        """Return the lines of a screen that is no table."""
        if self.page == "1":
            return [Text(pages.NO_SLOTS if not self.wanted else f"No request or state has {self.wanted!r} in it.")]
        if self.page == "2":
            return pages.waterfall(self._published, self.request, self.size.width - 2)
        if self.page == "8":
            return pages.events(self._published, self.wanted)
        if self.page == "?":
            return pages.help_text()
        return pages.PAGES[self.page][1](self.engine(), self.wanted)

    def _show_chosen(self) -> None:
        """Say what the chosen request waits for: narrow terminals do not show the last column."""
        rows = self._rows(self.process) if self.process is not None else []
        self.row = self.query_one(Slots).cursor_row
        words = pages.waiting(rows[self.row]) if self.row < len(rows) else Text()
        self.query_one("#hint", Static).update(words if words else pages.HINTS["1"])

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        self._show_chosen()

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        with self._saying_what_failed():
            self.action_page("2")

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if order := pages.COLUMNS[event.column_index][1]:
            self.inverted = self.order == order and not self.inverted
            self.order = order
            self.draw()

    def _rows(self, process: dict) -> list[dict]:
        return pages.chosen_slots(process, self.wanted, self.order, self.inverted)

    # --- keys

    @contextlib.contextmanager
    def _saying_what_failed(self) -> Iterator[None]:
        """Show in the bar what the source or a file refuses, and go on."""
        try:
            yield
        except (Error, OSError, json.JSONDecodeError) as problem:
            self.said = str(problem)
            self.draw()

    async def run_action(self, *action, **options) -> bool:
        """Run what a key or a click means."""
        with self._saying_what_failed():
            return await super().run_action(*action, **options)
        return True

    def action_page(self, page: str) -> None:
        if page == "2" and self.page == "1" and (process := self.process) is not None:
            rows = self._rows(process)
            self.request = rows[self.row]["request"] if self.row < len(rows) else ""
        self.page = page
        self.query_one(Lines).scroll_home(animate=False)
        if page in "28":
            self._published = self.source.events()[-50_000 if page == "2" else -2000 :]
        self.draw()

    def action_ended(self) -> None:
        self.ended = not self.ended
        self.draw()

    def action_sort(self) -> None:
        orders = pages.ORDERS
        self.order = orders[(orders.index(self.order) + 1) % len(orders)]
        self.said = f"by {self.order}" if self.order else ""
        self.draw()

    def action_invert(self) -> None:
        self.inverted = not self.inverted
        self.draw()

    def action_copy(self) -> None:
        rows = self._rows(self.process) if self.process is not None else []
        if self.row < len(rows):
            self.copy_to_clipboard(rows[self.row]["request"])
            self.said = f"copied {rows[self.row]['request']}"
            self.draw()

    def action_export(self) -> None:
        self.said = f"wrote {self.save_screenshot()}"
        self.draw()

    def action_ask(self, what: str, begun: str = "") -> None:
        field = self.query_one("#filter", Input)
        self.asked = what
        field.placeholder = _ASKED[what]
        field.value = self.wanted if what == "filter" else begun
        field.add_class("asked")
        field.focus()
        field.cursor_position = len(field.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.remove_class("asked")
        self.body.focus()
        if self.asked == "filter":
            self.wanted = event.value
        elif self.asked == "moment":
            self._go_to_what_is_typed(event.value)
        elif words := event.value.split():
            self._call(
                words[0], **{name: _value(value) for name, _, value in (word.partition("=") for word in words[1:])}
            )
        self.draw()

    def _go_to_what_is_typed(self, seconds: str) -> None:
        try:
            moment = max(float(seconds), 0.0)
        except ValueError:
            self.said = f"{seconds!r} is no number of seconds"
            return
        with self._saying_what_failed():
            self.go_to(moment)

    def on_key(self, event) -> None:
        if event.key == "escape" and self.query_one("#filter", Input).has_class("asked"):
            self.query_one("#filter", Input).remove_class("asked")
            self.body.focus()

    def action_freeze(self) -> None:
        self.frozen = not self.frozen
        self.look()

    def action_travel(self, by: int) -> None:
        """To the next moment at which a request changed its state, before or after the one that is shown."""
        if (process := self.process) is None:
            return
        self._go_beside(process, by, [event["time"] for event in self.source.events("--type", _CHANGES)])

    def action_lint(self, by: int) -> None:
        """To the next moment at which a lint began, of any process."""
        if (process := self.process) is None:
            return
        moments = [
            (moment["time"], f"{moment['lint']}  {moment['subject']}")
            for each in self.source.lint_moments()
            for moment in each
        ]
        went = self._go_beside(process, by, [time for time, _ in moments])
        self.said = "; ".join(said for time, said in moments if time == went) if went else "no other lint"
        self.draw()

    def _go_beside(self, process: dict, by: int, times: list[float]) -> float | None:
        """To the last of these times before the one that is shown, or to the first after it: to which."""
        if not times or (began := self.began) is None:
            return None
        now = process["time"] if self.moment is None else began + self.moment
        others = [time for time in times if (time < now - 1e-6 if by < 0 else time > now + 1e-6)]
        if not others:
            return None
        went = max(others) if by < 0 else min(others)
        self.go_to(went - began + 5e-7)  # more than seconds since 1970 are rounded by
        return went

    def go_to(self, moment: float) -> None:
        """Seconds after the first event of all."""
        self._snapshot = self.source.at(moment)
        self.moment = moment
        self.draw()

    def action_process(self) -> None:
        if (process := self.process) is None:
            return
        there = self.processes
        self.kept = _name(there[(there.index(process) + 1) % len(there)])
        self.draw()

    def action_now(self) -> None:
        self.moment = None
        self.look()

    def action_control(self, method: str) -> None:
        """A pause of an engine that goes is asked for twice."""
        process, asked, self.to_stop = self.process, self.to_stop, None
        if self.readonly or process is None:
            self._call(method)  # says why not
        elif process["process"].startswith("front"):
            self.said = f"{process['process']} is a server: choose its engine with tab"
        elif method == "step" and _goes(process):
            self.said = "nothing is stopped: p stops the engine"
        elif method == "pause" and _goes(process) and asked != _name(process):
            self.to_stop = _name(process)
            self.said = f"pause: the same key again stops the engine, for {_LEASE} s at most"
        else:
            self._call(method, **({"lease": _LEASE} if method == "pause" else {}))
        self.draw()

    def _call(self, method: str, /, **params) -> None:
        """Ask the process that is shown."""
        if self.readonly:
            self.said = f"read-only: no {method}"
            return
        if (process := self.process) is None:
            self.said = f"no engine is there for {method}"
            return
        self.kept = _name(process)
        if method in _SLOW:
            self.said = f"{method}: under way"
            threading.Thread(target=self._call_slowly, args=(process, method, params), daemon=True).start()
            return
        path = process["path"]
        try:
            if path not in self._engines:
                self._engines[path] = _connect(process, _PATIENCE)
            answer = self._engines[path].call(method, **params)
            self.said = "" if method in ("pause", "resume", "step") else json.dumps(answer)[:_SAID]
        except (Error, OSError) as problem:
            self.said = str(problem)
            # An engine's answer may be an OSError too; then the connection, and the stops that belong to it, stay.
            broken = isinstance(problem, Busy) or not isinstance(problem, Error)
            if broken and (engine := self._engines.pop(path, None)) is not None:
                with contextlib.suppress(Exception):
                    engine.close()

    def _call_slowly(self, process: dict, method: str, params: dict) -> None:
        try:
            with _connect(process, None) as engine:
                said = json.dumps(engine.call(method, **params))[:_SAID]
        except (Error, OSError) as problem:
            said = str(problem)
        self.said = f"{method}: {said}"  # drawn with the next look


def _name(process: dict) -> tuple:
    """Return what tells a process from the others of a directory, at each moment."""
    return process["path"], process["pid"]


def _goes(process: dict) -> bool:
    """Return whether the engine takes steps: a hold is of one request or transfer."""
    return all(stop["cause"] == "hold" for stop in process["stops"])


def _connect(process: dict, timeout: float | None) -> torpor.console.Engine:
    """Connect to the socket beside the process's ring."""
    path = Path(process["path"]).with_suffix(".sock")
    try:
        return torpor.console.connect(path, timeout)
    except NotFound:
        raise NotFound(
            f"{process['process']} pid {process['pid']} has no socket",
            'choose its engine with tab, or start that with the option console="read" or "control"',
        ) from None


def _value(word: str) -> bool | float | str:
    """As `torpor live` takes them: what looks like a number is one."""
    if word in ("true", "false", ""):
        return word != "false"
    try:
        return float(word)
    except ValueError:
        return word
