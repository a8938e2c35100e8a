"""The picture of `oat plot`: a title, the lines, and below them what each line is."""

import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from oat.errors import ConfigError, printable
from oat.metrics import NAMES, listed, unit

Against = Literal["steps", "queries", "pairs", "tokens", "time", "kl", "sqrt_kl"]
"""The values of `--against`."""
_INCHES = (8.0, 4.0)
"""Width of the picture, and its height without the text below the axes."""
_DPI = 150
_SIZE = 8.0
"""Size of the text below the axes, in points."""
_ROOM = 7.2
"""Inches that a line of this text may be wide, beside the mark of its line."""
_MARK = 0.7
"""Inches that a mark, and the space between two columns, take."""
_MOST_ROWS = 36
"""The texts of all lines together have about this many rows. Longer ones end in an ellipsis."""
SOFTWARE = "oat plot"
"""The program that a PNG of ours names in its head."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of Okabe and Ito. People with colour blindness can also tell them apart."""
_STYLES = ("-", "--", ":", "-.")
_GREY = "#555555"


class Axis(NamedTuple):
    """An x axis: its column in the table, its label, and its words in the title."""

    column: str
    label: str
    title: str


AXES: Mapping[Against, Axis] = {
    "steps": Axis("steps", "steps", "over steps"),
    "queries": Axis("queries", "oracle queries of training", "over oracle queries"),
    "pairs": Axis("pairs", "compared and paid pairs of training", "over compared pairs"),
    "tokens": Axis("tokens", "tokens of responses that steps learned from", "over tokens"),
    "time": Axis("seconds", "running time, {}", "over time"),
    "kl": Axis("kl", "KL(policy || reference), nats a response", "against the KL"),
    "sqrt_kl": Axis(
        "sqrt_kl", "square root of KL(policy || reference), nats a response", "against the root of the KL"
    ),
}


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a plot: one metric of the runs of one configuration.

    Attributes:
        name: the directories of the runs.
        settings: the settings in which this configuration differs from the others.
        runs: number of runs.
        x: (points,) float64, ascending.
        mean, low, high: (points,) float64: mean, lowest and highest value of the runs at each x.
        changes: the values of x at which an oracle of one of the runs changed. From such an x on, rewards may
            come from the changed oracle.
    """

    name: str
    settings: tuple[str, ...]
    metric: str
    runs: int
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    changes: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """The text about this configuration."""
        runs = f" ({self.runs} runs)" if self.runs > 1 else ""
        return f"{self.name}{runs}" + (f": {', '.join(self.settings)}" if self.settings else "")


def draw(lines: Sequence[Line], file: Path, against: Against) -> None:
    """Draw the lines. The colour shows the configuration, and the line style shows the metric. If there is
    only one metric, the style distinguishes configurations that share a colour."""
    with warnings.catch_warnings():
        # the font has no such letter: a box stands for it, and the table has it
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        _draw(lines, file, against)


def _draw(lines: Sequence[Line], file: Path, against: Against) -> None:
    names, metrics = (
        list(dict.fromkeys(getattr(line, field) for line in lines)) for field in ("name", "metric")
    )
    figure_of, canvas_of = matplotlib()
    figure = figure_of(figsize=_INCHES, dpi=_DPI, layout="constrained")
    width_of = _width_of(canvas_of(figure))
    axes = figure.subplots()
    scale, xlabel = _scale(max(line.x[-1] for line in lines), against)
    for line in lines:
        number = names.index(line.name)
        kind = metrics.index(line.metric) if len(metrics) > 1 else number // len(_COLOURS)
        colour = _COLOURS[number % len(_COLOURS)]
        marker = "o" if len(line.x) < 40 else ""
        style = _STYLES[kind % len(_STYLES)]
        axes.plot(line.x / scale, line.mean, style, color=colour, marker=marker, markersize=3.5)
        if line.runs > 1:
            axes.fill_between(line.x / scale, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    changed = {place for line in lines for place in line.changes}
    for place in changed:
        axes.axvline(place / scale, color="#777777", linestyle=":", linewidth=1)
    counted_in = {unit(metric) for metric in metrics}
    counted = f" ({next(iter(counted_in))})" if len(counted_in) == 1 and all(counted_in) else ""
    of = metrics[0] if len(metrics) == 1 else "values"
    axes.set(xlabel=xlabel, ylabel=_literal("\n".join(textwrap.wrap(of, 40)) + counted))
    runs = sum(line.runs for line in lines if line.metric == metrics[0])
    title = f"{', '.join(metrics)} {AXES[against].title}" + (f", {runs} runs" if runs > 1 else "")
    axes.set_title(_literal("\n".join(textwrap.wrap(title, 80))), fontsize="medium", loc="left")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _explain(figure, axes, _marks(lines, names, metrics, bool(changed)), _remarks(lines, metrics), width_of)
    figure.savefig(file, dpi=_DPI, metadata={"Software": SOFTWARE})


def _marks(
    lines: Sequence[Line], names: Sequence[str], metrics: Sequence[str], has_changes: bool
) -> list[tuple[str, str, str]]:
    """Return a line style, a colour and a text for each configuration, for each of several metrics, and for
    the changes of oracles."""
    first = [next(line for line in lines if line.name == name) for name in names]
    marks = [
        (
            _STYLES[0 if len(metrics) > 1 else number // len(_COLOURS) % len(_STYLES)],
            _COLOURS[number % len(_COLOURS)],
            line.label,
        )
        for number, line in enumerate(first)
    ]
    if len(metrics) > 1:
        marks += [(_STYLES[kind % len(_STYLES)], _GREY, metric) for kind, metric in enumerate(metrics)]
    return marks + ([(":", "#777777", "an oracle changed: two rewards in one curve")] if has_changes else [])


def _remarks(lines: Sequence[Line], metrics: Sequence[str]) -> list[str]:
    """Return what the metric is, if there is only one, and what a band is."""
    found = []
    if len(metrics) == 1 and listed(metrics[0]) in NAMES:
        found.append(f"{metrics[0]}: {NAMES[listed(metrics[0])]}")
    if any(line.runs > 1 for line in lines):
        found.append("line: mean of runs, band: lowest to highest")
    return found


def _explain(
    figure: Any,
    axes: Any,
    marks: Sequence[tuple[str, str, str]],
    remarks: Sequence[str],
    width_of: Callable[[str], float],
) -> None:
    """Write texts below the axes, and make the figure higher by what they take.

    Args:
        marks: for each text beside a mark its line style, colour and words.
        remarks: texts above these.
        width_of: function that returns the width of a text in inches.
    """
    most = max(2, _MOST_ROWS // len(marks))
    texts = [_rows(text, _ROOM, most, width_of, ", ") for *_, text in marks]
    notes = [row for text in remarks for row in _rows(text, _ROOM + _MARK / 2, 3, width_of)]
    columns = 1
    if all(len(rows) == 1 for rows in texts):
        widest = max(width_of(rows[0]) for rows in texts)
        columns = max(1, min(len(texts), int((_ROOM + _MARK) / (widest + _MARK))))
    handles = [
        axes.plot([], [], style, color=colour, label=_literal("\n".join(rows)))[0]
        for (style, colour, _), rows in zip(marks, texts, strict=True)
    ]
    legend = figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=_SIZE,
        title=_literal("\n".join(notes)) if notes else None,
        title_fontsize=_SIZE,
        alignment="left",
    )
    legend.get_title().set_color(_GREY)
    height = legend.get_window_extent(figure.canvas.get_renderer()).height / _DPI
    figure.set_size_inches(_INCHES[0], _INCHES[1] + height)


def _rows(
    text: str, room: float, most: int, width_of: Callable[[str], float], between: str = " "
) -> list[str]:
    """Break a text into at most `most` rows, each about `room` inches wide. If the text is longer, the last
    row ends in an ellipsis.

    Args:
        between: what stands between the parts of the text, which stay together if they are short enough.
    """
    rows = [""]
    for part in _visible(text).split(between):
        longer = f"{rows[-1]}{between}{part}" if rows[-1] else part
        if width_of(longer) <= room:
            rows[-1] = longer
            continue
        if rows[-1]:
            rows[-1] += between.rstrip()
            rows.append("")
        for letter in part:
            if width_of(rows[-1] + letter) > room:
                rows.append("")
            rows[-1] += letter
    if len(rows) <= most:
        return rows
    last = rows[most - 1]
    while width_of(f"{last} …") > room:
        last = last[:-1]
    return [*rows[: most - 1], f"{last.rstrip(', ')} …"]


def _width_of(canvas: Any) -> Callable[[str], float]:
    """Return a function that returns the width of a text below the axes, in inches."""
    from matplotlib.font_manager import FontProperties

    renderer, font = canvas.get_renderer(), FontProperties(size=_SIZE)

    def width(text: str) -> float:
        return float(renderer.get_text_width_height_descent(text, font, False)[0]) / _DPI

    return width


def _visible(text: str) -> str:
    """Return the text in one line, with escapes in place of line breaks and of what cannot be seen."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _literal(text: str) -> str:
    """Escape a text so that matplotlib draws it literally. Matplotlib reads `$` as a formula, and a legend
    omits a label that begins with an underscore."""
    return printable(text if not text.startswith("_") else f" {text}").replace("$", r"\$")


def _scale(most: float, against: Against) -> tuple[float, str]:
    """Return the number by which x is divided, and the label of the x axis.

    Args:
        most: the largest x.
    """
    if against != "time":
        return 1.0, AXES[against].label
    size, name = next(
        ((size, name) for size, name in ((3600.0, "hours"), (60.0, "minutes")) if most >= 2 * size),
        (1.0, "seconds"),
    )
    return size, AXES[against].label.format(name)


def matplotlib() -> tuple[Any, Any]:
    """Return the classes of a figure and of its canvas.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a plot needs matplotlib ({error}): pip install 'oat-align[plot]'; or give --out FILE.csv "
            "for the numbers alone"
        ) from None
    return Figure, FigureCanvasAgg
