"""A line chart as inline SVG text, without colours.

Every mark has a class, which the page's style sheet paints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 26, 44
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Point = tuple[float, float]


class Chart:
    """Axes with marks on them, in the order in which they are drawn."""

    def __init__(
        self, *, x_range: Point, y_range: Point, width: int = 860, height: int = 380
    ) -> None:
        """Empty axes.

        Args:
            x_range: values at the left and at the right end.
            y_range: values at the bottom and at the top.
            width: of the drawing, in pixels before the page scales it.
            height: the same.
        """
        self._x_range, self._y_range = x_range, y_range
        self._width, self._height = width, height
        self._marks: list[str] = []

    def x(self, value: float) -> float:
        """The place of a value from the left."""
        first, last = self._x_range
        return _LEFT + (value - first) / (last - first) * (self._width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """The place of a value from the top."""
        first, last = self._y_range
        return (
            self._height
            - _BOTTOM
            - (value - first) / (last - first) * (self._height - _TOP - _BOTTOM)
        )

    def axes(
        self,
        *,
        x_label: str,
        y_label: str,
        x_text: Callable[[float], str],
        y_text: Callable[[float], str],
    ) -> None:
        """Grid lines, their values, and what they are."""
        bottom, right = self._height - _BOTTOM, self._width - _RIGHT
        for value in ticks(*self._y_range):
            place = self.y(value)
            self._marks.append(
                f'<line class="grid" x1="{_LEFT}" y1="{place:.1f}" x2="{right}" y2="{place:.1f}"/>'
            )
            self.text(_LEFT - 8, place + 4, y_text(value), "tick", anchor="end")
        for value in ticks(*self._x_range):
            place = self.x(value)
            self._marks.append(
                f'<line class="axis" x1="{place:.1f}" y1="{bottom}" x2="{place:.1f}" '
                f'y2="{bottom + 5}"/>'
            )
            self.text(place, bottom + 19, x_text(value), "tick", anchor="middle")
        self._marks.append(
            f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        )
        self.text((_LEFT + right) / 2, self._height - 6, x_label, "label", anchor="middle")
        self.text(_LEFT - 52, 14, y_label, "label")

    def line(self, points: Sequence[Point], kind: str) -> None:
        """Straight lines from point to point."""
        if points:
            places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
            self._marks.append(f'<polyline class="{kind}" points="{places}"/>')

    def steps(self, points: Sequence[Point], end: float, kind: str) -> None:
        """A filled step curve: each value holds until the next point, the last until `end`."""
        bottom = self.y(self._y_range[0])
        path = [f"M{self.x(points[0][0]):.1f} {bottom:.1f}"]
        for x, y in points:
            path.append(f"H{self.x(x):.1f}V{self.y(y):.1f}")
        path.append(f"H{self.x(end):.1f}V{bottom:.1f}Z")
        self._marks.append(f'<path class="{kind}" d="{"".join(path)}"/>')

    def horizontal(self, value: float, kind: str, text: str) -> None:
        """A line across at a value, with a text at its right end."""
        place = self.y(value)
        self._marks.append(
            f'<line class="{kind}" x1="{_LEFT}" y1="{place:.1f}" x2="{self._width - _RIGHT}" '
            f'y2="{place:.1f}"/>'
        )
        self.text(self._width - _RIGHT, place - 5, text, f"{kind} note", anchor="end")

    def vertical(self, value: float, kind: str, text: str, *, anchor: str = "middle") -> None:
        """A line from the bottom to the top at a value, with a text over it."""
        place = self.x(value)
        self._marks.append(
            f'<line class="{kind}" x1="{place:.1f}" y1="{_TOP}" x2="{place:.1f}" '
            f'y2="{self._height - _BOTTOM}"/>'
        )
        self.text(place, _TOP - 5, text, f"{kind} note", anchor=anchor)

    def dot(self, point: Point, kind: str, title: str, *, key: str = "", radius: float = 5) -> None:
        """A circle that tells its title under the pointer.

        With a key, the page reacts to a click on it.
        """
        marked = f' data-key="{escape(key)}"' if key else ""
        place = f'cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" r="{radius}"'
        self._marks.append(
            f'<circle class="{kind}" {place}{marked}><title>{escape(title)}</title></circle>'
        )

    def diamond(self, point: Point, kind: str, title: str, *, key: str = "") -> None:
        """As `dot`, in another shape."""
        marked = f' data-key="{escape(key)}"' if key else ""
        x, y = self.x(point[0]), self.y(point[1])
        corners = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
        self._marks.append(
            f'<polygon class="{kind}" '
            f'points="{corners}"{marked}><title>{escape(title)}</title></polygon>'
        )

    def note(self, point: Point, text: str, kind: str) -> None:
        """A text beside a point, on the side where there is room."""
        x, y = self.x(point[0]), self.y(point[1])
        is_right = x > self._width / 2
        self.text(
            x - 10 if is_right else x + 10,
            y - 10,
            text,
            kind,
            anchor="end" if is_right else "start",
        )

    def text(self, x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> None:
        """A text at a place in pixels."""
        self._marks.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, title: str) -> str:
        """The drawing; `title` tells what it shows to those who do not see it."""
        head = (
            f'<svg viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{escape(title)}">'
        )
        return "\n".join([head, *self._marks, "</svg>"])


def ticks(first: float, last: float, *, about: int = 6) -> list[float]:
    """Round values from `first` to `last`, some `about` of them."""
    rough = (last - first) / about
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in _STEPS if factor * magnitude >= rough * 0.999)
    begin = math.ceil(first / step - 1e-9)
    return [round(index * step, 12) for index in range(begin, math.floor(last / step + 1e-9) + 1)]
