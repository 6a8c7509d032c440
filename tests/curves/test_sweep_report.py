"""What a person reads of a sweep: knees, the terminal's table, the page."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import models
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

import rockmate
from rockmate import SweepRow
from rockmate.curves.errors import SweepError
from rockmate.curves.page import page
from rockmate.curves.picture import memory_figure, memory_points, times_ms
from rockmate.curves.sweep import Sweep
from rockmate.curves.sweep_row import compared
from rockmate.curves.sweep_run import SweepOptions, run_sweep
from rockmate.extras import MissingExtraError
from rockmate.planning.curve_choice import knee, least_within, lower_hull, recommended

# --- knees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], None),
        ([(1, 2)], None),
        ([(1, 2), (2, 1)], None),
        ([(0, 4), (1, 3), (2, 2), (4, 0)], None),  # a straight line
        ([(0, 10), (1, 1), (10, 0)], 1),
        ([(10, 0), (1, 1), (0, 10)], 1),  # in another order
        ([(0, 100), (1, 40), (5, 10), (20, 2), (100, 0)], 2),
        ([(0, 10), (1, 1), (5, 9), (10, 0)], 1),  # one that others beat is none
        ([(0, 10), (1, 10), (2, 1), (10, 1)], None),  # nothing is lost by going to (2, 1), an end
        ([(0, 1.0), (1, 1.0)], None),
    ],
)
def test_knee(points: list[tuple[float, float]], expected: int | None) -> None:
    assert knee(points) == expected
    scaled = [(3e9 * x + 7, y / 50 + 1) for x, y in points]
    assert knee(scaled) == expected, "units do not matter"


def test_without_a_knee_the_least_within_a_slowdown_is_recommended() -> None:
    points = [(1.0, 1.2), (2.0, 1.1), (2.5, 1.05), (4.0, 1.0 - 1e-9)]
    assert [least_within(points, most) for most in (1.5, 1.1, 1.05, 1.01, 0.5)] == [
        *(0, 1, 2, 3, None)
    ]
    assert recommended([(1.0, 1.1), (2.0, 1.04), (3.0, 1.0)]) == 1
    assert recommended([(1.0, 1.06), (2.0, 1.03), (3.0, 1.0)]) == 1
    assert recommended([(1.0, 1.3)]) is None


def test_the_knee_is_farthest_below_the_line_between_the_ends() -> None:
    generator = random.Random(3)
    for _ in range(50):
        xs = sorted(generator.uniform(0, 10) for _ in range(9))
        points = [(x, generator.uniform(1, 2) / (x + 0.2)) for x in xs]
        hull = lower_hull(points)
        (left, top), (right, bottom) = points[hull[0]], points[hull[-1]]
        if len(hull) < 3:
            continue
        depths = {
            i: 1 - (points[i][0] - left) / (right - left) - (points[i][1] - bottom) / (top - bottom)
            for i in hull
        }
        deepest = max(depths, key=lambda i: depths[i])
        assert knee(points) == (deepest if depths[deepest] >= 0.05 else None)


def test_no_point_lies_below_the_hull() -> None:
    generator = random.Random(5)
    for _ in range(50):
        points = [(generator.uniform(0, 5), generator.uniform(0, 5)) for _ in range(12)]
        corners = [points[i] for i in lower_hull(points)]
        assert min(points) in corners
        assert min(y for _, y in points) == corners[-1][1]
        for (x1, y1), (x2, y2) in itertools.pairwise(corners):
            assert x1 < x2
            assert y1 > y2
            assert all(
                y >= y1 + (x - x1) / (x2 - x1) * (y2 - y1) - 1e-9
                for x, y in points
                if x1 <= x <= x2
            )


# --- table ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Sweep:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = models.Stack(2).train()
        options = SweepOptions(
            budgets=["1KiB", 0.55, 0.75, 1.0],
            strategies=("rockmate", "none"),
            measure=True,
            num_steps=1,
        )
        return run_sweep(model, torch.randn(64, 16), options, title='two layers <&> "one"')


@pytest.mark.parametrize("width", [45, 60, 80, 100, 200])
def test_table_fits_the_terminal(found: Sweep, width: int) -> None:
    lines = found.text(width=width).split("\n\n")[1].splitlines()
    assert len(lines) == 2 + len(found.rows)
    assert max(map(len, lines)) <= width
    assert {"strategy", "budget", "time"} <= set(lines[0].split())


def test_a_wide_table_has_every_column(found: Sweep) -> None:
    text = str(found).split("\n\n")[1]
    for title in ("share", "peak", "ms", "ms/tenth", "measured peak", "measured ms", "gradients"):
        assert re.search(rf"  {title}(  |$)", text.splitlines()[0]), title
    assert "bitwise" in text
    assert text.count("needs") == sum(not row.is_feasible for row in found.rows)


def test_a_broken_promise_is_in_the_table(found: Sweep) -> None:
    row = next(row for row in found.rows if row.is_measured)
    broken = dataclasses.replace(row, measured_peak_bytes=row.budget_bytes + 1)
    sweep = dataclasses.replace(found, rows=[broken])
    assert "FAILED" in sweep.text(width=100)
    assert "1 bytes above the budget" in sweep.broken_promises[0]
    assert "FAILED" in page(sweep)


def curve(*points: tuple[int, float]) -> list[SweepRow]:
    return compared(
        [
            SweepRow(
                strategy="rockmate",
                budget_bytes=num_bytes,
                budget_share=num_bytes / points[-1][0],
                is_feasible=True,
                predicted_peak_bytes=num_bytes,
                predicted_ratio=ratio,
                predicted_ms=100 * ratio,
            )
            for num_bytes, ratio in points
        ]
    )


def test_recommendations_say_what_less_memory_costs(found: Sweep) -> None:
    mib = 2**20
    rows = curve((100 * mib, 1.5), (200 * mib, 1.1), (1000 * mib, 1.0))
    assert [row.is_recommended for row in rows] == [False, True, False]
    extra = [row.extra_ms_per_tenth for row in rows]
    assert extra == [pytest.approx(40.0), pytest.approx(10 / 8), None]
    alike = curve((100 * mib - 9, 1.6), (100 * mib, 1.5), (1000 * mib, 1.0))
    assert alike[0].extra_ms_per_tenth is None  # nine bytes are no tenth of anything
    assert "None" not in repr(alike[0])
    assert "predicted_ratio=1.6" in repr(alike[0])
    sweep = dataclasses.replace(found, rows=rows)
    assert sweep.recommended is sweep.knee is rows[1]
    assert sweep.remarks() == (
        "Recommended: 200.0 MiB, 0.20 of the peak with nothing recomputed: 1.100x the time; "
        "below it, each tenth less costs 40 ms a step."
    )
    assert str(sweep).count("<- recommended") == 1
    straight = dataclasses.replace(found, rows=curve((1, 1.08), (2, 1.04), (3, 1.0)))
    assert straight.recommended is straight.rows[1]
    assert "the smallest within 1.05x, since the curve has no knee" in straight.remarks()


def test_rows_of_a_faster_run_do_not_bend_the_curve() -> None:
    rows = curve((1, 2.0), (2, 1.2), (5, 1.1), (10, 1.0))
    slow = [
        dataclasses.replace(row, predicted_ms=300 * (row.predicted_ratio or 0))
        if row.budget_bytes == 2
        else row
        for row in rows
    ]
    assert [row.is_recommended for row in compared(slow)] == [row.is_recommended for row in rows]


def test_the_knee_and_the_best_budget_for_a_slowdown(found: Sweep) -> None:
    rows = curve((100, 2.0), (200, 1.3), (300, 1.1), (600, 1.04), (1000, 1.0))
    sweep = dataclasses.replace(found, rows=rows)
    assert sweep.knee is rows[2]
    assert sweep.best(max_slowdown=1.1) is rows[2]
    assert sweep.best() is rows[3]
    slow = dataclasses.replace(found, rows=rows[:3])
    with pytest.raises(SweepError, match=r"within 1.05x .* the fastest takes 1.100x. Allow more"):
        slow.best()
    straight = dataclasses.replace(found, rows=curve((1, 3.0), (2, 2.0), (3, 1.0)))
    assert straight.knee is None


def test_a_sweep_is_its_rows_and_json(found: Sweep, tmp_path: Path) -> None:
    assert list(found) == found.rows
    assert len(found) == len(found.rows)
    assert found[-1] is found.rows[-1]
    found.save(tmp_path / "sweep.json")
    content = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert [SweepRow(**row) for row in content["rows"]] == found.rows
    assert content["baseline_peak_bytes"] == found.baseline.baseline_peak_bytes


# --- pictures -------------------------------------------------------------------------------------


def test_a_notebook_shows_the_picture_above_the_table(found: Sweep, tmp_path: Path) -> None:
    read = Page(found._repr_html_())
    assert read.open == []
    assert [tag for tag, _ in read.elements if tag in ("svg", "table")] == ["svg", "table"]
    assert len(read.all("tr")) == 1 + len(found)
    found.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def shown_texts(figure: Figure) -> list[Text]:
    """Without the labels of ticks beyond the ends of their axis, which are not drawn."""
    beyond = []
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond += [
            tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high
        ]
    texts = [each for each in figure.findobj(Text) if each.get_text() and each.get_visible()]
    return [each for each in texts if each not in beyond]


def test_texts_of_a_picture_do_not_overlap(found: Sweep) -> None:
    plan = found.plans[found.feasible[0].key]
    for figure in (found.figure(), memory_figure(found.baseline, plan)):
        figure.savefig(io.BytesIO(), format="png")
        texts = shown_texts(figure)
        assert len(texts) > 10
        for first, second in itertools.combinations(texts, 2):
            overlaps = first.get_window_extent().overlaps(second.get_window_extent())
            assert not overlaps, (first.get_text(), second.get_text())


def test_without_matplotlib_only_pictures_and_pages_are_missing(
    found: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "rockmate" in str(found)
    read = Page(found._repr_html_())
    assert not read.all("svg")
    assert len(read.all("table")) == 1
    install = r"pip install '\.\[plot\]'"
    with pytest.raises(MissingExtraError, match=install):
        found.plot(tmp_path / "sweep.png")
    with pytest.raises(MissingExtraError, match=f"the page of a sweep needs .*{install}"):
        rockmate.sweep(nn.Identity(), None, out=tmp_path)


# --- page -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects elements, and checks that they close in order."""

    VOID = frozenset(
        {"meta", "link", "input", "br", "img", "line", "circle", "polyline", "polygon", "path"}
    )

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and kind in ("", *attributes.get("class", "").split())
        ]


def test_page_is_whole_and_loads_nothing(found: Sweep) -> None:
    html = page(found)
    read = Page(html)
    assert read.open == []
    assert "$" not in html
    assert "two layers <&>" in "".join(read.texts)
    assert "<&>" not in html
    for _, attributes in read.elements:
        assert not {"src", "target"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("xlink:href", "#").startswith("#")
    assert "http" not in html
    assert "@import" not in html
    assert "url(" not in html.replace("url(#", "")


def test_pictures_of_a_page_share_no_names(found: Sweep) -> None:
    """What one picture defines is hidden with it, so another one must not use it."""
    elements = [each for _, each in Page(page(found)).elements]
    names = [each["id"] for each in elements if "id" in each]
    assert len(names) == len(set(names))
    used = {each["xlink:href"].removeprefix("#") for each in elements if "xlink:href" in each}
    used |= {each["clip-path"][5:-1] for each in elements if "clip-path" in each}
    assert used
    assert used <= set(names)


def test_page_has_a_panel_a_link_and_a_mark_for_each_feasible_budget(found: Sweep) -> None:
    read = Page(page(found))
    names = sorted(f"budget-{row.strategy}-{row.budget_bytes}" for row in found.feasible)
    assert sorted(section["id"] for section in read.all("section")) == names
    assert sorted(panel.get("name", "") for panel in read.all("details")) == ["budget"] * len(names)
    assert sum("open" in panel for panel in read.all("details")) == 1
    marks = [link["xlink:href"] for link in read.all("a") if "xlink:href" in link]
    assert sorted(marks) == [f"#{name}" for name in names]
    rows = [link["href"] for link in read.all("a") if "href" in link]
    assert {f"#{name}" for name in names} == set(rows)
    assert len(read.all("tr")) == 1 + len(found.rows)


def test_no_curve_crosses_its_lower_bound(found: Sweep) -> None:
    lines = {line.get_label(): line.get_xydata() for line in found.figure().axes[0].lines}
    bound, curve = lines["no schedule is faster"], lines["rockmate"]
    assert len(bound) == len(curve) > 1
    for (peak, least), (same, ratio) in zip(bound, curve, strict=True):
        assert peak == same
        assert least <= ratio


def test_predicted_and_measured_times_have_axes_of_their_own(found: Sweep) -> None:
    titles = [each.get_title(loc="left") for each in found.figure().axes]
    assert titles == [
        "Predicted time of a step,\ntimes that without recomputation",
        "Measured time of a step, times eager's",
    ]


def test_page_without_a_feasible_budget() -> None:
    options = SweepOptions(budgets=["1KiB"])
    sweep = run_sweep(models.Stack(1).train(), torch.randn(8, 16), options, title="nothing")
    assert "No budget of this sweep is feasible" in page(sweep)


def test_memory_over_the_step_is_the_plans(found: Sweep) -> None:
    for plan in found.plans.values():
        points = memory_points(plan, plan.costs)
        assert [live for _, live in points] == list(plan.simulation.live_bytes)
        assert max(live for _, live in points) == plan.predicted_peak_bytes
        assert times_ms(plan.schedule, plan.costs)[-1] == pytest.approx(plan.predicted_ms)


def test_long_schedules_keep_their_peak_in_the_drawing(
    found: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rockmate.curves.picture._MAX_POINTS", 7)
    plan = next(iter(found.plans.values()))
    points = memory_points(plan, plan.costs)
    assert len(points) <= 7
    assert max(live for _, live in points) == plan.predicted_peak_bytes
