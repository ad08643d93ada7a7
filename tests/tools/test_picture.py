# SPDX-License-Identifier: Apache-2.0
"""The picture of a run of the demo has what happened: each token, where it was made, sleep, kill, wake and memory."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import demo_options
import pytest
from conftest import ROOT
from picture import Timeline, draw

SPACE = "{http://www.w3.org/2000/svg}"
PROMPTS = ["Why is <the sky> blue & high?", "A prompt that is longer than its place in the picture"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def a_run(killed: bool = True) -> Timeline:
    """Two requests: 3 and 2 tokens, a sleep of 1 s, 40 s without an engine, a wake of 1 s, then 2 and 1 tokens."""
    clock, resident = Clock(), [2_000_000_000]
    timeline = Timeline(clock)
    timeline._thread = type("None", (), {"is_alive": lambda _: True, "join": lambda _: None})()  # samples by hand
    timeline.watch(lambda: resident[0])

    def passes(seconds: float, **counts: int) -> None:
        clock.now += seconds
        timeline.sample()
        timeline.count({name.removeprefix("r"): count for name, count in counts.items()})

    passes(1, r0=1)
    passes(1, r0=2, r1=1)
    passes(1, r0=3, r1=2)
    with timeline.span("sleep"):
        passes(1)
    resident[0] = 700_000_000
    timeline.sample()
    if killed:
        with timeline.span("start"):
            resident[0] = 0
            passes(40)
    with timeline.span("wake"):
        clock.now += 1
    resident[0] = 1_900_000_000
    passes(1, r0=4, r1=2)
    passes(1, r0=5, r1=3)
    timeline.close()
    return timeline


def drawn(timeline: Timeline, differing: tuple[int, ...] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(draw(timeline, PROMPTS, list(differing), {"tokens recomputed": "0"}, "Two chats"))


def words(picture: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in picture.iter(f"{SPACE}text")]


def strokes(picture: ElementTree.Element, style: str) -> list[list[float]]:
    """Where the tokens of each request are."""
    return [
        [float(x) for x in re.findall(r"M([\d.]+) ", each.get("d", ""))]
        for each in picture.iter(f"{SPACE}path")
        if each.get("class") == style
    ]


def test_each_token_stands_before_or_behind_the_sleep():
    picture = drawn(a_run())
    before, after = strokes(picture, "before"), strokes(picture, "after")
    assert [len(each) for each in before] == [3, 2] and [len(each) for each in after] == [2, 1]
    [killed] = [float(each.get("x1")) for each in picture.iter(f"{SPACE}line") if each.get("class") == "killed"]
    assert max(map(max, before)) < killed < min(map(min, after))
    assert [each for each in words(picture) if "tokens ✓" in each] == ["5 tokens ✓", "3 tokens ✓"]


def test_time_without_an_engine_is_drawn_short_and_all_else_on_one_scale():
    [first, _] = strokes(drawn(a_run()), "before")
    [after, _] = strokes(drawn(a_run()), "after")
    second = first[1] - first[0]
    assert after[1] - after[0] == pytest.approx(second, abs=0.2)
    # From the last token before to the first one after: sleep 1 s, 40 s in 96 pixels, wake 1 s, and a step of 1 s.
    assert after[0] - first[2] == pytest.approx(3 * second + 96, abs=0.5)


def test_it_says_sleep_kill_wake_and_memory():
    said = words(drawn(a_run()))
    assert {"sleep 1.00 s", "kill -9", "new process: 40 s", "wake 1.00 s", "2.00 GB awake", "700 MB asleep"} <= set(
        said
    )
    timeline = a_run()
    timeline.seconds = {"sleep": 0.75}  # as the report has it
    assert "sleep 0.75 s" in words(drawn(timeline))


def test_a_process_that_wakes_itself_was_not_killed():
    picture = drawn(a_run(killed=False))
    assert "kill -9" not in words(picture) and "700 MB asleep" in words(picture)
    assert [each for each in picture.iter() if each.get("class") in ("killed", "gap")] == []


def test_an_answer_that_differs_is_marked():
    assert "3 tokens ✗" in words(drawn(a_run(), differing=(1,)))


def test_prompts_are_words_and_nothing_is_loaded():
    text = draw(a_run(), PROMPTS, [], {}, "<Two & more>")
    said = words(ElementTree.fromstring(text))
    assert PROMPTS[0] in said and any(each.endswith("…") and len(each) <= 32 for each in said)
    assert not re.search(r"href|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_it_has_colours_for_light_and_dark_pages():
    light, dark = draw(a_run(), PROMPTS, [], {}, "Two").split("@media (prefers-color-scheme: dark)")
    names = re.findall(r"(--\w+): (#\w{6})", light)
    assert len(names) >= 7 and names != re.findall(r"(--\w+): (#\w{6})", dark)
    assert [name for name, _ in names] == [name for name, _ in re.findall(r"(--\w+): (#\w{6})", dark)]


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--server"], "--server shows others"), ([], "there is no folder"), (["--standby"], "--standby shows others")],
)
def test_what_has_no_picture_is_refused(tmp_path, capsys, more, said):
    file = tmp_path / ("none/run.svg" if not more else "run.svg")
    with pytest.raises(SystemExit) as ended:
        demo_options.parse(["--model", "none", "--svg", str(file), *more])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_picture_in_the_readme_is_one_of_the_demo():
    picture = ElementTree.fromstring((ROOT / "docs/demo.svg").read_text())
    assert "docs/demo.svg" in (ROOT / "README.md").read_text()
    prompts = (ROOT / "tools/demo/prompts.txt").read_text().splitlines()
    assert len(strokes(picture, "before")) == len(strokes(picture, "after")) == len(prompts)
    assert any(re.fullmatch(r"sleep \d+\.\d\d s", each) for each in words(picture)) and "kill -9" in words(picture)


def test_the_demo_draws_its_run(shown):
    picture = ElementTree.fromstring(Path(shown["picture"]).read_text())
    made = strokes(picture, "before") + strokes(picture, "after")
    assert sum(map(len, made)) == shown["tokens"]
    assert sum(map(len, strokes(picture, "before"))) == shown["tokens_before_sleep"]
    assert any(each.endswith("asleep") for each in words(picture))
