"""Pictures: what the text says, what the figure shows, and that files appear whole."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure

from jpipe.schedule import (
    SCHEDULES,
    CostModel,
    draw_text,
    forward_only_schedule,
    make_schedule,
    save_figure,
)
from jpipe.schedule.phases import Phase, find_phases, find_pipeline_phases


def test_text_without_colour_tells_forward_from_backward():
    assert draw_text(make_schedule("1f1b", 2, 4), width=60).plain.splitlines() == [
        "        warm  ├──── steady ───┤ cool ",
        "tick    0              5",
        "stage 0 F0 ·  F1 B0 F2 B1 F3 B2 ·  B3 ",
        "stage 1 ·  F0 B0 F1 B1 F2 B2 F3 B3 ·  ",
    ]


def test_text_colours_forward_and_backward_differently():
    text = draw_text(make_schedule("1f1b", 1, 1), width=60)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["F0"] != styles["B0"]


def test_a_wide_table_loses_its_middle_and_says_so():
    schedule = make_schedule("1f1b", 8, 32)
    lines = draw_text(schedule, width=80).plain.splitlines()
    assert all(len(line) <= 80 for line in lines)
    names = ("warm-up", "steady", "cool-down")
    assert [word for word in lines[0].split() if word in names] == list(names)
    assert lines[2].startswith("stage 0 F0 ")
    assert " … " in lines[2]
    assert lines[2].endswith(" B31 ")
    assert lines[-1] == "ticks 9 to 69 are not shown: all need 320 columns"
    whole = draw_text(schedule, width=320).plain
    assert "…" not in whole
    assert "not shown" not in whole


def test_text_takes_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    schedule = make_schedule("1f1b", 8, 32)
    assert draw_text(schedule).plain == draw_text(schedule, width=50).plain
    # A terminal too narrow for anything still gets the least that makes sense.
    monkeypatch.setenv("COLUMNS", "5")
    assert draw_text(schedule).plain == draw_text(schedule, width=20).plain


def test_too_little_width_is_refused():
    with pytest.raises(ValueError, match="width=19 must be at least 20 for this table"):
        draw_text(make_schedule("1f1b", 8, 32), width=19)


def test_text_of_forwards_alone_has_no_phases():
    lines = draw_text(forward_only_schedule(2, 3), width=60).plain.splitlines()
    assert lines[0].strip() == ""
    assert lines[2] == "stage 0 F0 F1 F2 ·  "


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    P=st.integers(1, 16),
    M=st.integers(1, 40),
    width=st.integers(21, 300),
)
def test_text_fits_and_lines_up(name, P, M, width):
    schedule = make_schedule(name, P, M)
    lines = draw_text(schedule, width=width).plain.splitlines()
    assert all(len(line) <= width for line in lines)
    assert len({len(line) for line in lines[2 : 2 + P]}) == 1
    # Nothing stands above a column that is not there.
    assert all(len(line) < len(lines[2]) for line in lines[:2])


def test_phases_of_1f1b():
    phases = find_phases(make_schedule("1f1b", 4, 8))
    # First B of stage s in tick 2P - 1 - s, last F in tick 2(M - 1) + s.
    for s in range(4):
        expected = [
            Phase.WARM_UP if t < 7 - s else Phase.STEADY if t <= 14 + s else Phase.COOL_DOWN
            for t in range(22)
        ]
        assert phases[:, s].tolist() == expected


def test_phases_of_the_pipeline():
    assert find_pipeline_phases(make_schedule("1f1b", 2, 3)).tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    gpipe = find_pipeline_phases(make_schedule("gpipe", 2, 3)).tolist()
    assert gpipe == [0] * 4 + [2] * 4
    assert (find_phases(forward_only_schedule(2, 3)) == Phase.WARM_UP).all()


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, to look into."""
    saved, original = [], Figure.savefig

    def savefig(self, *args, **kwargs):
        saved.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def boxes(figure):
    """`{fill: [(left, width)]}` of the operations."""
    found = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PatchCollection)
        for path, colour in zip(collection.get_paths(), collection.get_facecolor(), strict=True):
            x = path.get_extents()
            found.setdefault(tuple(colour), []).append((x.x0, x.width))
    return found


def words(figure):
    return [t.get_text() for t in (*figure.texts, *figure.axes[0].texts)]


def test_figure_shows_simulated_time(tmp_path, figures):
    save_figure(make_schedule("1f1b", 4, 8), tmp_path / "a.png", costs=CostModel(1.0, 2.0))
    (figure,) = figures
    widths = [{round(w, 9) for _, w in group} for group in boxes(figure).values()]
    # Two shades each: forwards are one wide, backwards two.
    assert widths == [{1.0}, {1.0}, {2.0}, {2.0}]
    assert sum(len(group) for group in boxes(figure).values()) == 2 * 4 * 8
    assert figure.axes[0].get_xlim() == (0, 33)
    text = words(figure)
    assert "1f1b" in text
    assert "stages P = 4,   microbatches M = 8,   bubble 27.3%" in text
    assert text.count("7") == 2 * 4
    assert [text.count(phase.label) for phase in Phase] == [4, 4, 4]
    assert text[text.index("microbatches\nkept at most") + 1 :] == ["4", "3", "2", "1"]
    assert figure.axes[0].get_xlabel() == "time (F = 1, B = 2, exchange = 0)"
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "warm-up", "steady", "cool-down"]


def test_figure_drops_numbers_that_do_not_fit(tmp_path, figures):
    costs = CostModel(1.0, (2.0, 3.0), 0.5)
    save_figure(make_schedule("1f1b", 2, 300), tmp_path / "a.png", costs=costs)
    text = words(figures[0])
    assert "299" not in text
    assert figures[0].axes[0].get_xlabel() == "time (F = 1, B = 2 to 3, exchange = 0.5)"
    # A figure that nobody can open would be no help either.
    assert max(figures[0].get_size_inches()) <= 20


def test_figure_of_forwards_alone(tmp_path, figures):
    save_figure(forward_only_schedule(4, 8), tmp_path / "a.png")
    assert not {phase.label for phase in Phase} & set(words(figures[0]))
    assert [t.get_text() for t in figures[0].legends[0].get_texts()] == ["forward"]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("P", "M"), [(1, 1), (3, 2)])
def test_png_and_svg(tmp_path, name, P, M):
    schedule = make_schedule(name, P, M)
    save_figure(schedule, tmp_path / "a.PNG")
    save_figure(schedule, str(tmp_path / "a.svg"))
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.PNG", "a.svg"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_table_gives_the_same_file(tmp_path, suffix):
    for name in ("a", "b"):
        save_figure(make_schedule("1f1b", 2, 2), tmp_path / f"{name}.{suffix}")
    a, b = (tmp_path / f"{name}.{suffix}" for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("name", ["a.pdf", "a", "png"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"path='.*{name}' must end in \.png or \.svg"):
        save_figure(make_schedule("1f1b", 2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_figure(make_schedule("1f1b", 2, 2), path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.svg"]
    assert path.read_text() == "old"


def test_costs_for_another_number_of_stages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one for each of the 2 stages"):
        save_figure(make_schedule("1f1b", 2, 2), tmp_path / "a.png", costs=CostModel((1, 2, 3)))


def test_a_figure_leaves_the_global_state_of_matplotlib_alone(tmp_path):
    probe = (
        "import sys, matplotlib\n"
        "from jpipe.schedule import make_schedule, save_figure\n"
        "def settings():\n"
        "    # To read the backend would choose one.\n"
        "    return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\n"
        f"save_figure(make_schedule('1f1b', 2, 2), {str(tmp_path / 'a.png')!r})\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


def test_drawn_times_are_finite(tmp_path, figures):
    save_figure(make_schedule("1f1b-overlap", 3, 5), tmp_path / "a.svg", costs=CostModel(1, 2, 0.4))
    spans = np.array([span for group in boxes(figures[0]).values() for span in group])
    assert np.isfinite(spans).all()
    assert (spans[:, 1] > 0).all()
