# SPDX-License-Identifier: Apache-2.0
"""The picture of a run of the demo: `tools/dev demo --svg FILE`.

`Timeline` notes what happens while it happens; `draw()` makes an SVG of it that loads nothing and is readable on a
light and on a dark page. Times are seconds since the timeline began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape

_SAMPLES_A_SECOND = 20
_WIDTH, _LEFT, _RIGHT = 960, 236, 92
_TOP, _ROW, _MEMORY = 92, 22, 84  # pixels: above the first request, of a request, of the memory's chart
_BREAK = 96  # pixels of the time in which no engine runs
_NAME = 32  # characters of a prompt
_STYLE = """
svg { --page: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --before: #1a7f37; --after: #0969da;
  --asleep: #8250df; --killed: #cf222e; --memory: #9a6700; font: 12px ui-sans-serif, system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #f0f6fc; --dim: #9198a1; --line: #3d444d;
  --before: #3fb950; --after: #4493f8; --asleep: #ab7df8; --killed: #f85149; --memory: #d29922; } }
text { fill: var(--ink); } .dim { fill: var(--dim); font-size: 11px; } .title { font-size: 16px; font-weight: 600; }
.before { stroke: var(--before); } .after { stroke: var(--after); } .rest { stroke: var(--line); }
.box-before { fill: var(--before); } .box-after { fill: var(--after); } .box-asleep { fill: var(--asleep); }
.page { fill: var(--page); } .sleep { fill: var(--asleep); } .killed { stroke: var(--killed); }
.word-killed { fill: var(--killed); font-weight: 600; } .word-sleep { fill: var(--asleep); font-weight: 600; }
.gap { fill: var(--dim); fill-opacity: 0.12; } .memory { fill: var(--memory); fill-opacity: 0.25; }
.memory-line { stroke: var(--memory); fill: none; }
.memory-dot { fill: var(--memory); } .word-memory { fill: var(--memory); font-weight: 600; }
"""


class Timeline:
    """What a run does, and when: tokens of each request, sleep, kill, start and wake, resident memory.

    Memory is sampled in a thread from `watch()` to `close()`. One thread calls the other methods.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began = clock, clock()
        self.tokens: dict[str, list[float]] = {}  # when each token of a request was there
        self.spans: dict[str, tuple[float, float]] = {}
        self.seconds: dict[str, float] = {}  # of a span, as its report has them; they are shown instead of the span's
        self.memory: list[tuple[float, int]] = []
        self._resident: Callable[[], int] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="demo-memory", daemon=True)

    def now(self) -> float:
        return self._clock() - self._began

    def watch(self, resident: Callable[[], int]) -> None:
        """Sample what `resident` returns from now on: bytes, 0 while there is no process."""
        self._resident = resident
        self.sample()
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def count(self, tokens: dict[str, int]) -> None:
        """Note how many tokens each request has by now."""
        now = self.now()
        for request, count in tokens.items():
            known = self.tokens.setdefault(request, [])
            known += [now] * (count - len(known))

    def span(self, name: str) -> _Span:
        """`with timeline.span("sleep"):` notes when that began and ended."""
        return _Span(self, name)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def sample(self) -> None:
        if self._resident is not None:
            self.memory.append((self.now(), self._resident()))

    def _sample(self) -> None:
        while not self._ended.wait(1 / _SAMPLES_A_SECOND):
            self.sample()


class _Span:
    def __init__(self, timeline: Timeline, name: str):
        self._timeline, self._name = timeline, name

    def __enter__(self) -> None:
        self._begin = self._timeline.now()

    def __exit__(self, *_) -> None:
        self._timeline.spans[self._name] = self._begin, self._timeline.now()


def draw(timeline: Timeline, prompts: list[str], differing: list[int], facts: dict[str, str], title: str) -> str:
    """Return the SVG. `prompts`: of the requests "0", "1", …; `differing`: those whose answer is another one than
    that of the run that never slept; `facts`: name and value of what stands below the picture."""
    scale = _Scale(timeline)
    bottom = _TOP + _ROW * len(prompts)
    base = bottom + 34 + _MEMORY
    height = base + 76
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" x="16" y="28">{escape(title)}</text>',
        *_happenings(timeline, scale, base),
    ]
    for number, prompt in enumerate(prompts):
        parts += _request(timeline, scale, number, prompt, number in differing)
    parts += [*_memory(timeline, scale, base), *_axis(scale, base), *_legend(timeline, base + 40)]
    said = "  ·  ".join(f"{name}: {value}" for name, value in facts.items())
    parts += [f'<text class="dim" x="16" y="{height - 12}">{escape(said)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


class _Scale:
    """Pixels of moments. The time from the kill until the new process is ready is drawn short."""

    def __init__(self, timeline: Timeline):
        ends = [times[-1] for times in timeline.tokens.values() if times]
        begins = [times[0] for times in timeline.tokens.values() if times]
        self.first, self.last = min(begins, default=0.0), max(ends, default=1.0)
        self.gap = timeline.spans.get("start")
        self._short = _BREAK if self.gap else 0
        drawn = self.last - self.first - (self.gap[1] - self.gap[0] if self.gap else 0)
        self.pixels_a_second = (_WIDTH - _LEFT - _RIGHT - self._short) / max(drawn, 1e-3)

    def x(self, moment: float) -> float:
        moment = min(max(moment, self.first), self.last)
        if self.gap is None or moment <= self.gap[0]:
            return _LEFT + (moment - self.first) * self.pixels_a_second
        begin = _LEFT + (self.gap[0] - self.first) * self.pixels_a_second
        if moment < self.gap[1]:
            return begin + (moment - self.gap[0]) / (self.gap[1] - self.gap[0]) * self._short
        return begin + self._short + (moment - self.gap[1]) * self.pixels_a_second


def _request(timeline: Timeline, scale: _Scale, number: int, prompt: str, differs: bool) -> list[str]:
    y = _TOP + number * _ROW
    times = timeline.tokens.get(str(number), [])
    asleep = timeline.spans["sleep"][0]
    name = prompt if len(prompt) <= _NAME else prompt[: _NAME - 1].rstrip() + "…"
    parts = [
        f'<text x="16" y="{y + 14}">{number + 1}</text><text class="dim" x="32" y="{y + 14}">{escape(name)}</text>'
    ]
    if times:
        line = f'x1="{scale.x(times[0]):.1f}" x2="{scale.x(times[-1]):.1f}" y1="{y + 10}" y2="{y + 10}"'
        parts.append(f'<line class="rest" {line}/>')
    for style, some in (
        ("before", [each for each in times if each <= asleep]), ("after", [each for each in times if each > asleep])
    ):  # fmt: skip
        if some:
            strokes = "".join(f"M{scale.x(each):.1f} {y + 4}v12" for each in some)
            parts.append(f'<path class="{style}" stroke-width="{_stroke(scale, some):.1f}" d="{strokes}"/>')
    said = f"{len(times)} tokens {'✗' if differs else '✓'}"
    parts.append(f'<text class="dim" x="{_WIDTH - _RIGHT + 12}" y="{y + 14}">{said}</text>')
    return parts


def _stroke(scale: _Scale, times: list[float]) -> float:
    """Leave a gap between tokens, but show each."""
    apart = (scale.x(times[-1]) - scale.x(times[0])) / max(len(times) - 1, 1)
    return min(max(apart * 0.7, 1.0), 6.0)


def _happenings(timeline: Timeline, scale: _Scale, base: float) -> list[str]:
    """The sleep, the kill, the start of a new process and the wake, behind all of it."""
    parts, top = [], _TOP - 6
    for name, anchor in (("sleep", "end"), ("wake", "start")):
        begin, end = timeline.spans[name]
        width = max(scale.x(end) - scale.x(begin), 2)
        at = scale.x(begin) - 6 if anchor == "end" else scale.x(begin) + width + 6
        parts += [
            f'<rect class="sleep" fill-opacity="0.25" x="{scale.x(begin):.1f}" y="{top}" width="{width:.1f}" '
            f'height="{base - top}"/>',
            f'<text class="word-sleep" x="{at:.1f}" y="{top - 6}" text-anchor="{anchor}">{name} '
            f"{timeline.seconds.get(name, end - begin):.2f} s</text>",
        ]
    if (gap := scale.gap) is not None:
        left, right = scale.x(gap[0]), scale.x(gap[1])
        middle = (left + right) / 2
        parts += [
            f'<rect class="gap" x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{base - top}"/>',
            f'<line class="killed" stroke-width="2" x1="{left:.1f}" x2="{left:.1f}" y1="{top}" y2="{base}"/>',
            f'<text class="word-killed" x="{middle:.1f}" y="{top - 22}" text-anchor="middle">kill -9</text>',
            f'<text class="dim" x="{middle:.1f}" y="{top - 6}" text-anchor="middle">'
            f"new process: {gap[1] - gap[0]:.0f} s</text>",
        ]
    return parts


def _memory(timeline: Timeline, scale: _Scale, base: float) -> list[str]:
    columns: dict[int, int] = {}  # of the samples that fall on a pixel, the last
    for moment, resident in timeline.memory:
        if scale.first <= moment <= scale.last:
            columns[round(scale.x(moment))] = resident
    if not columns:
        return []
    most = max(columns.values()) or 1

    def y(resident: int) -> float:
        return base - resident / most * (_MEMORY - 8)

    points = [f"{x} {y(resident):.1f}" for x, resident in sorted(columns.items())]
    first, last = min(columns), max(columns)
    parts = [
        f'<path class="memory" d="M{first} {base}L{"L".join(points)}L{last} {base}Z"/>',
        f'<path class="memory-line" d="M{"L".join(points)}"/>',
        f'<text x="16" y="{base - _MEMORY / 2 - 4}">resident memory</text>',
        f'<text class="dim" x="16" y="{base - _MEMORY / 2 + 12}">of the engine\'s process</text>',
        f'<text class="dim" x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>',
    ]
    sleep, wake = timeline.spans["sleep"], timeline.spans["wake"]
    awake = [resident for moment, resident in timeline.memory if scale.first <= moment <= sleep[0]]
    until = scale.gap[0] if scale.gap else wake[0]
    asleep = [(moment, resident) for moment, resident in timeline.memory if sleep[1] <= moment <= until]
    if awake:
        parts.append(
            f'<text class="word-memory" x="{_LEFT + 4}" y="{y(awake[-1]) - 6:.1f}">{_bytes(awake[-1])} awake</text>'
        )
    if asleep:
        moment, resident = asleep[-1]
        at, height = scale.x(moment), y(resident)
        parts.append(f'<circle class="memory-dot" cx="{at:.1f}" cy="{height:.1f}" r="3.5"/>')
        parts.append(
            f'<text class="word-memory" x="{at - 8:.1f}" y="{height + 4:.1f}" text-anchor="end">'
            f"{_bytes(resident)} asleep</text>"
        )
    return parts


def _axis(scale: _Scale, base: float) -> list[str]:
    wanted = 90 / scale.pixels_a_second  # seconds between two numbers
    step = next((each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if each >= wanted), 100)
    parts = [f'<line class="rest" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    at = 0.0
    while scale.first + at <= scale.last:
        moment = scale.first + at
        if scale.gap is None or not scale.gap[0] - step / 2 < moment < scale.gap[1]:
            parts.append(f'<text class="dim" x="{scale.x(moment):.1f}" y="{base + 14}">{at:g} s</text>')
        at = round(at + step, 3)
    return parts


def _legend(timeline: Timeline, y: float) -> list[str]:
    parts, x = [], _LEFT
    later = "in the process that woke" if "start" in timeline.spans else "after the wake"
    for style, words in (("before", "a token before the sleep"), ("after", f"a token {later}")):
        parts.append(f'<rect class="box-{style}" x="{x}" y="{y - 10}" width="5" height="12"/>')
        parts.append(f'<text class="dim" x="{x + 11}" y="{y}">{words}</text>')
        x += 220
    parts.append(f'<rect class="box-asleep" fill-opacity="0.4" x="{x}" y="{y - 10}" width="12" height="12"/>')
    parts.append(f'<text class="dim" x="{x + 18}" y="{y}">falling asleep, waking</text>')
    return parts


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
