# SPDX-License-Identifier: Apache-2.0
"""The screens in a terminal. Needs Textual: pip install torpor[console]."""

from __future__ import annotations

import contextlib
import json
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

import torpor.console
from torpor.console import pages
from torpor.console.source import Live
from torpor.errors import Busy, Error

_LOOKS_A_SECOND = 4
_LEASE = 60
_ASKED = {
    "filter": "of a request's name or a state",
    "call": "METHOD NAME=VALUE …",
    "moment": "seconds after the first event",
}
_CHANGES = "slot,operation,engine,stop"
_SAID = 200  # characters of an answer


class Lines(ScrollView, can_focus=True):  # type: ignore[call-arg]  # Textual's, which may not be here
    """Lines of text, of which only those that are seen are drawn. Where one is chosen, arrows choose another one."""

    BINDINGS: ClassVar = [
        Binding("k", "scroll_up", show=False),
        Binding("j", "scroll_down", show=False),
        Binding("h", "scroll_left", show=False),
        Binding("l", "scroll_right", show=False),
    ]

    def __init__(self, **options):
        super().__init__(**options)
        self._lines: list[Text] = []
        self.chosen = -1  # line

    def show(self, lines: list[Text], chosen: int) -> None:
        moved, self._lines, self.chosen = chosen != self.chosen, lines, chosen
        self.virtual_size = Size(max((line.cell_len for line in lines), default=0), len(lines))
        if moved and chosen >= 0:
            self.scroll_to_region(Region(self.scroll_offset.x, chosen, 1, 1), animate=False)
        self.refresh()

    def action_scroll_up(self) -> None:
        self.app.action_choose(-1) if self.chosen >= 0 else super().action_scroll_up()

    def action_scroll_down(self) -> None:
        self.app.action_choose(1) if self.chosen >= 0 else super().action_scroll_down()

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        if at >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        line = self._lines[at].copy()
        line.end = ""
        if at == self.chosen:
            line.stylize("reverse")
        strip = Strip(line.render(self.app.console), line.cell_len)
        # What is added has a style, too: without colours (NO_COLOR) Textual asks each part for its own.
        return strip.crop(self.scroll_offset.x, self.scroll_offset.x + self.size.width).adjust_cell_length(
            self.size.width, self.rich_style
        )


class Console(App):
    """`readonly`: nothing that changes the engine is sent, whatever is pressed."""

    CSS = """
    #top { height: auto; max-height: 8; background: $panel; padding: 0 1; }
    #top.past { background: $secondary; } #top.frozen { background: $surface-lighten-2; }
    #top.stopped { background: $error; }
    #filter { display: none; } #filter.asked { display: block; }
    """
    BINDINGS: ClassVar = [
        Binding("1", "page('1')", "slots"),
        Binding("2", "page('2')", "request"),
        *(Binding(key, f"page('{key}')", name) for key, (name, _) in pages.PAGES.items()),
        Binding("8", "page('8')", "events"),
        Binding("slash", "ask('filter')", "filter", key_display="/"),
        Binding("colon", "ask('call')", "call", key_display=":"),
        Binding("b", "ask('call', 'breakpoint.add type=slot to=')", "break"),
        Binding("x", "ask('call', 'transfer.cancel candidate=')", show=False),
        Binding("s", "sort", "sort", show=False),
        Binding("i", "invert", show=False),
        Binding("y", "copy", show=False),
        Binding("e", "export", "picture", show=False),
        Binding("question_mark", "page('?')", "help", key_display="?"),
        Binding("enter", "page('2')", show=False),
        Binding("space", "freeze", "freeze"),
        Binding("left_square_bracket", "travel(-1)", "back", key_display="["),
        Binding("right_square_bracket", "travel(1)", "on", key_display="]"),
        Binding("left_curly_bracket", "lint(-1)", show=False),
        Binding("right_curly_bracket", "lint(1)", show=False),
        Binding("t", "ask('moment')", show=False),
        Binding("g", "now", "now"),
        Binding("p", "control('pause')", "pause"),
        Binding("c", "control('resume')", "go on"),
        Binding("n", "control('step')", "step"),
        Binding("tab", "process", "process", priority=True),
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
        self.others = 0  # how often another process was asked for
        self.asked_to = ""  # the method of a key that is to be pressed again
        self._snapshot: dict = {"processes": []}
        self._told: list[dict] = []
        self._engine: torpor.console.Engine | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="top")
        yield Lines(id="lines")
        yield Input(id="filter", select_on_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Lines).focus()
        self.look()
        self.set_interval(1 / _LOOKS_A_SECOND, self.look)

    def on_unmount(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self.source.close()

    # --- what is shown

    @property
    def process(self) -> dict | None:
        """The one with requests, of those that live first of all; then the others."""
        there = sorted(
            self._snapshot["processes"], key=lambda each: (each["alive"], each["steps"]["seen"]), reverse=True
        )
        return there[self.others % len(there)] if there else None

    @property
    def began(self) -> float | None:
        """When the first event of all was told: moments are counted from there."""
        return min((each["began"] for each in self._snapshot["processes"] if each["began"] is not None), default=None)

    def engine(self) -> dict:
        """All processes' operations, in their order: an engine that fell asleep may wake in another one."""
        done = [
            (each["began"] or 0, number, operation | {"whose": f"{each['process']} pid {each['pid']}"})
            for each in self._snapshot["processes"]
            for number, operation in enumerate(each["operations"])
        ]
        return {"operations": [operation for *_, operation in sorted(done, key=lambda each: each[:2])]}

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
            top.update(f"no engine tells anything in {self.source.path}. {self.source.ended or ''}")
            return
        mode = (
            "FROZEN"
            if self.frozen
            else ("LIVE" if process["alive"] else "LAST WORDS")
            if self.moment is None
            else f"AT {self.moment:.1f} s"
        )
        text = pages.heading(process).append(f"  {mode}{'  READ-ONLY' if self.readonly else ''}  ", "bold")
        text.append(self.said, "bold")
        for line in pages.lints(process)[:6]:
            text.append("\n").append_text(line)
        top.update(text)
        chosen = -1
        if self.page == "2":
            lines = pages.waterfall(self._told, self.request, self.size.width)
        elif self.page == "8":
            lines = pages.events(self._told, self.wanted)
        elif self.page == "?":
            lines = pages.help_text()
        elif self.page == "1":
            rows = self._rows(process)
            lines = pages.slots(rows)
            if rows:
                self.row = min(self.row, len(rows) - 1)
                chosen = self.row + 1
                top.update(text.append_text(pages.waiting(rows[self.row])))
        else:
            shown = self.engine() if self.page == "6" else process
            lines = pages.PAGES[self.page][1](shown, self.wanted)
        self.query_one(Lines).show(lines, chosen)

    def _rows(self, process: dict) -> list[dict]:
        return pages.chosen_slots(process, self.wanted, self.order, self.inverted)

    # --- keys

    def action_page(self, page: str) -> None:
        if page == "2" and self.page == "1" and (process := self.process) is not None:
            rows = self._rows(process)
            self.request = rows[self.row]["request"] if self.row < len(rows) else ""
        self.page = page
        if page in "28":
            self._told = self.source.events()[-50_000 if page == "2" else -2000 :]
        self.draw()

    def action_choose(self, by: int) -> None:
        self.row = max(self.row + by, 0)
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
        self.query_one(Lines).focus()
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
            self.go_to(max(float(seconds), 0.0))
        except ValueError:
            self.said = f"{seconds!r} is no number of seconds"

    def on_key(self, event) -> None:
        if event.key == "escape" and self.query_one("#filter", Input).has_class("asked"):
            self.query_one("#filter", Input).remove_class("asked")
            self.query_one(Lines).focus()

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
        self.moment = moment
        self._snapshot = self.source.at(moment)
        self.draw()

    def action_process(self) -> None:
        self.others += 1
        self.row = 0
        self.draw()

    def action_now(self) -> None:
        self.moment = None
        self.look()

    def action_control(self, method: str) -> None:
        """What stops an engine that goes is asked for twice."""
        goes = self.process is not None and not self.process["stops"]
        if method != "resume" and goes and not self.readonly and self.asked_to != method:
            self.asked_to = method
            self.said = f"{method}: the same key again stops the engine, for {_LEASE} s at most"
            self.draw()
            return
        self.asked_to = ""
        self._call(method, **({"lease": _LEASE} if method == "pause" else {}))
        self.draw()

    def _call(self, method: str, **params) -> None:
        if self.readonly:
            self.said = f"read-only: no {method}"
            return
        try:
            if self._engine is None:
                self._engine = torpor.console.connect(self.source.path, timeout=5)
            answer = self._engine.call(method, **params)
            self.said = "" if method in ("pause", "resume", "step") else json.dumps(answer)[:_SAID]
        except (Error, OSError) as problem:
            self.said = str(problem)
            if isinstance(problem, (Busy, OSError)):  # the connection is of no use any more
                broken, self._engine = self._engine, None
                if broken is not None:
                    with contextlib.suppress(Exception):
                        broken.close()


def _value(word: str) -> bool | float | str:
    """As `torpor live` takes them: what looks like a number is one."""
    if word in ("true", "false", ""):
        return word != "false"
    try:
        return float(word)
    except ValueError:
        return word
