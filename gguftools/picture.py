"""Pictures made of rectangles, lines, dots and words: written as SVG by hand, as PNG where matplotlib is installed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from gguftools.errors import GGUFError
from gguftools.files import atomic_output

SUFFIXES = (".svg", ".png")
FONT = 12  # pixels

#: dark to light; the middle ones of matplotlib's `viridis`
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_GREY = "#e0e0e0"

#: for marking kinds: tones that most people can tell apart (Okabe and Ito 2008), then lighter ones
# fmt: off
PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1", "#9ecae1", "#fdd0a2",
    "#a1d99b", "#dadaeb", "#bdbdbd",
)
# fmt: on


@dataclass
class Picture:
    """Shapes in drawing order. width, height: pixels; the origin is at the top left.

    Each shape is (kind, numbers, colour, text): `rect` x y width height, `line` x1 y1 x2 y2, `dot` x y radius, `text` x
    y with an anchor of start, middle or end and an angle.
    """

    width: float
    height: float
    title: str = ""
    shapes: list[tuple] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, colour: str, tip: str = "") -> None:
        self.shapes.append(("rect", (x, y, max(0.0, w), max(0.0, h)), colour, tip))

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#888888") -> None:
        self.shapes.append(("line", (x1, y1, x2, y2), colour, ""))

    def dot(self, x: float, y: float, radius: float, colour: str, tip: str = "") -> None:
        self.shapes.append(("dot", (x, y, radius), colour, tip))

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", angle: float = 0, colour: str = "#222222"
    ) -> None:
        self.shapes.append(("text", (x, y, anchor, angle), colour, text))

    def svg(self) -> str:
        """The picture as an SVG element."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" font-family="sans-serif" font-size="{FONT}">'
        )
        title = f"<title>{_xml(self.title)}</title>" if self.title else ""
        return (
            head
            + title
            + "".join(_SVG[kind](numbers, colour, text) for kind, numbers, colour, text in self.shapes)
            + "</svg>"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write .svg or .png. Raises GGUFError for another ending, and for .png without matplotlib."""
        path = check_picture(path)
        if path.suffix.lower() == ".svg":
            with atomic_output(path) as file:
                file.write(self.svg().encode())
            return
        with atomic_output(path) as file:
            self._png(file)

    def _png(self, file) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Circle, Rectangle

        dpi = 100
        figure = Figure((self.width / dpi, self.height / dpi), dpi=2 * dpi)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for kind, numbers, colour, text in self.shapes:
            if kind == "rect":
                axes.add_patch(Rectangle(numbers[:2], *numbers[2:], facecolor=colour, linewidth=0))
            elif kind == "line":
                axes.plot(numbers[::2], numbers[1::2], color=colour, linewidth=0.8)
            elif kind == "dot":
                axes.add_patch(Circle(numbers[:2], numbers[2], facecolor=colour, linewidth=0))
            else:
                x, y, anchor, angle = numbers
                side = {"start": "left", "middle": "center", "end": "right"}[anchor]
                axes.text(
                    x, y, text, color=colour, ha=side, va="baseline", rotation=-angle, fontsize=FONT * 72 / dpi,
                    rotation_mode="anchor", parse_math=False,
                )  # fmt: skip
        figure.savefig(file, format="png")


def check_picture(path: str | os.PathLike) -> Path:
    """The path, if a picture can be written there. Raises GGUFError before any work if not."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise GGUFError(f"{path}: pictures are written as {' or '.join(SUFFIXES)}; choose one of these endings")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise GGUFError(f"{path}: PNG needs matplotlib; pip install 'gguftools[plot]', or write .svg") from None
    return path


def shade(value: float | None, low: float, high: float) -> str:
    """A colour for a value between low (dark) and high (light); grey where there is none."""
    if value is None or not math.isfinite(value):
        return _GREY
    at = (len(_RAMP) - 1) * min(1.0, max(0.0, (value - low) / (high - low) if high > low else 0.5))
    i = min(int(at), len(_RAMP) - 2)
    mixed = (a + (b - a) * (at - i) for a, b in zip(_RAMP[i], _RAMP[i + 1]))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    tips: Sequence[Sequence[str]] | None = None,
    labels: Sequence[Sequence[str]] | None = None,
    log: bool = False,
    unit: str = "",
) -> Picture:
    """A table of colours. values: per row and column, None where there is none; log: colours follow the logarithm."""
    cell = 60 if labels else 22
    left, top = 12 + 7 * max(map(len, rows), default=0), 44 + 6 * max(map(len, columns), default=0)
    width, height = left + cell * len(columns) + 110, top + 18 * len(rows) + 12
    p = Picture(max(width, 8 * len(title) + 20), height, title)
    p.text(8, 18, title)
    flat = [_scale(v, log) for row in values for v in row]
    known = [v for v in flat if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    for j, name in enumerate(columns):
        p.text(left + cell * (j + 0.5) + 4, top - 6, name, angle=-60)
    for i, name in enumerate(rows):
        p.text(left - 6, top + 18 * i + 13, name, "end")
        for j in range(len(columns)):
            colour = shade(_scale(values[i][j], log), low, high)
            p.rect(left + cell * j, top + 18 * i, cell - 1, 17, colour, tips[i][j] if tips else "")
            if labels and labels[i][j]:
                p.text(left + cell * (j + 0.5), top + 18 * i + 13, labels[i][j], "middle", colour=_ink(colour))
    if known:
        x, steps = left + cell * len(columns) + 12, 20
        for k in range(steps):
            p.rect(x, top + k * 5, 12, 5, shade(low + (high - low) * (1 - k / (steps - 1)), low, high))
        ends = [10**v if log else v for v in (high, low)]
        p.text(x + 16, top + 10, f"{ends[0]:.3g}{unit}")
        p.text(x + 16, top + 5 * steps, f"{ends[1]:.3g}{unit}")
        p.height = max(p.height, top + 5 * steps + 12)
    return p


def scatter(
    title: str, x_name: str, y_name: str, points: Sequence[tuple[str, float, float]], log_y: bool = False
) -> Picture:
    """Named points; the vertical axis may be logarithmic, points that it cannot show are left out."""
    p = Picture(760, 480, title)
    left, top, right, bottom = 80, 40, 620, 420
    p.text(left, 22, title)
    shown = [(name, x, y) for name, x, y in points if not log_y or y > 0]
    xs, ys = [x for _, x, _ in shown] or [0.0, 1.0], [math.log10(y) if log_y else y for _, _, y in shown] or [0.0, 1.0]
    x_low, x_high = _margin(min(xs), max(xs))
    y_low, y_high = _margin(min(ys), max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (x - x_low) / (x_high - x_low), bottom - (bottom - top) * (y - y_low) / (
            y_high - y_low
        )

    p.line(left, bottom, right, bottom)
    p.line(left, bottom, left, top)
    for tick in ticks(x_low, x_high):
        p.line(at(tick, y_low)[0], bottom, at(tick, y_low)[0], bottom + 4)
        p.text(at(tick, y_low)[0], bottom + 18, f"{tick:g}", "middle")
    for tick in ticks(y_low, y_high):
        y = at(x_low, tick)[1]
        p.line(left, y, right, y, "#eeeeee")
        p.text(left - 6, y + 4, f"{10**tick:.2g}" if log_y else f"{tick:g}", "end")
    p.text((left + right) / 2, bottom + 42, x_name, "middle")
    p.text(20, (top + bottom) / 2, y_name, "middle", -90)
    for i, ((name, x, y), height) in enumerate(zip(shown, ys)):
        px, py = at(x, height)
        p.dot(px, py, 4.5, PALETTE[i % 8], f"{name}: {x:.4g}, {y:.6g}")
        p.text(px + 8, py - 5, name)
    return p


def bars(
    title: str, names: Sequence[str], values: Sequence[float], tips: Sequence[str] | None = None, every: int = 1
) -> Picture:
    """Upright bars; every: how many bars share a name below the axis."""
    p = Picture(760, 300, title)
    left, top, right, bottom = 60, 40, 740, 240
    p.text(left, 22, title)
    p.line(left, bottom, right, bottom)
    step, highest = (right - left) / max(1, len(values)), max([*values, 0]) or 1
    for i, value in enumerate(values):
        h = (bottom - top) * value / highest
        p.rect(left + step * i + 1, bottom - h, step - 2, h, PALETTE[0], tips[i] if tips else "")
        if i % every == 0:
            p.text(left + step * i + 3, bottom + 16, names[i])
    p.text(left - 6, top + 4, f"{highest:g}", "end")
    p.text(left - 6, bottom + 4, "0", "end")
    return p


def treemap(
    title: str, items: Sequence[tuple[str, float, str, str]], width: float = 1000, height: float = 480
) -> Picture:
    """Areas in proportion to sizes (squarified: Bruls, Huizing and van Wijk 2000). items: name, size, colour, tip."""
    p = Picture(width, height + 28, title)
    p.text(4, 18, title)
    order = sorted((item for item in items if item[1] > 0), key=lambda item: -item[1])
    total = sum(item[1] for item in order)
    x, y, w, h = 0.0, 28.0, width, height
    scale = width * height / total if total else 0
    while order:
        side = min(w, h)
        n, worst = 1, math.inf
        while n <= len(order):
            area = scale * sum(item[1] for item in order[:n])
            ratio = max(side**2 * scale * order[0][1] / area**2, area**2 / (side**2 * scale * order[n - 1][1]))
            if ratio > worst:
                break
            worst, n = ratio, n + 1
        row, order = order[: n - 1], order[n - 1 :]
        thick = scale * sum(item[1] for item in row) / side
        along = 0.0
        for name, size, colour, tip in row:
            length = scale * size / thick
            box = (x, y + along, thick, length) if w >= h else (x + along, y, length, thick)
            p.rect(box[0], box[1], box[2] - 1, box[3] - 1, colour, tip)
            if box[2] > 7 * len(name) + 6 and box[3] > 16:
                p.text(box[0] + 4, box[1] + 14, name, colour=_ink(colour))
            along += length
        x, y, w, h = (x + thick, y, w - thick, h) if w >= h else (x, y + thick, w, h - thick)
    return p


def ticks(low: float, high: float) -> list[float]:
    """Some round numbers between both.

    >>> ticks(0.3, 4.2)
    [1.0, 2.0, 3.0, 4.0]
    """
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _margin(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(low) * 0.1 or 1.0
    return low - room, high + room


def _scale(value: float | None, log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log10(value) if log else value


def _ink(colour: str) -> str:
    """Black or white, whichever is read more easily on the colour."""
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.3 * r + 0.6 * g + 0.1 * b > 130 else "#ffffff"


def _xml(text: str) -> str:
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _closed(element: str, tip: str) -> str:
    name = element[1:].split()[0]
    return f"{element}><title>{_xml(tip)}</title></{name}>" if tip else f"{element}/>"


_SVG = {
    "rect": lambda n, colour, tip: _closed(
        f'<rect x="{n[0]:.1f}" y="{n[1]:.1f}" width="{n[2]:.1f}" height="{n[3]:.1f}" fill="{colour}"', tip
    ),
    "line": lambda n, colour, _: (
        f'<line x1="{n[0]:.1f}" y1="{n[1]:.1f}" x2="{n[2]:.1f}" y2="{n[3]:.1f}" stroke="{colour}"/>'
    ),
    "dot": lambda n, colour, tip: _closed(f'<circle cx="{n[0]:.1f}" cy="{n[1]:.1f}" r="{n[2]:g}" fill="{colour}"', tip),
    "text": lambda n, colour, text: (
        f'<text x="{n[0]:.1f}" y="{n[1]:.1f}" text-anchor="{n[2]}" fill="{colour}"'
        + (f' transform="rotate({n[3]:g} {n[0]:.1f} {n[1]:.1f})"' if n[3] else "")
        + f">{_xml(text)}</text>"
    ),
}
