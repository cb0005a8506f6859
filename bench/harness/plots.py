"""Plot kept rows: `python -m bench.harness.plots FOLDER FILE METRIC...` draws figures for the documentation.

`make docs` calls it in an environment that has matplotlib and not specdec, so it imports nothing else.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.rows import Row, read_json


def write_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """One PNG per metric: lines where it was swept, else a bar per system and case where there is more than one.

    Returns:
        The files written. Needs the `bench` extra (matplotlib).
    """
    import matplotlib

    matplotlib.use("Agg")

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in dict.fromkeys(row.metric for row in rows):
        of_metric = [row for row in rows if row.metric == metric]
        bars = [row for row in of_metric if row.x is None]
        if len(bars) > 1 or (bars and bars[0].ratio_to is not None):
            written.append(_plot(bars, directory / f"{bars[0].suite}_{metric}.png", _draw_bars, 1.2 + 0.5 * len(bars)))
        for x_name in dict.fromkeys(row.x_name for row in of_metric if row.x is not None):
            lines = [row for row in of_metric if row.x_name == x_name]
            path = directory / f"{lines[0].suite}_{metric}_by_{x_name}.png"
            written.append(_plot(lines, path, _draw_lines, 4.5))
    return written


def _plot(rows: Sequence[Row], path: Path, draw: Callable[[Any, Sequence[Row]], None], height: float) -> Path:
    from matplotlib import pyplot

    panels = _panels(rows)
    size = (max(8, 5 * len(panels)), height)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (title, of_panel) in zip(axes[0], panels.items(), strict=True):
        draw(axis, of_panel)
        axis.set_title(title)
    notes = dict.fromkeys(row.note for row in rows if row.note)
    footer = "\n".join([*notes, f"{rows[0].origin.hardware}, {rows[0].origin.commit}"])
    figure.supxlabel(footer, x=1, ha="right", fontsize=6)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by title: those of each case that was swept itself, or all in one panel."""
    by_case = {case: [row for row in rows if row.case == case] for case in dict.fromkeys(row.case for row in rows)}
    swept = {case: own for case, own in by_case.items() if len({row.x for row in own}) > 1}
    return swept or (by_case if len(by_case) == 1 else {rows[0].suite: list(rows)})


def _label(row: Row) -> str:
    return row.system + (f" / {row.ratio_to}" if row.ratio_to else "")


def _axis_label(row: Row) -> str:
    return f"{row.metric} ({row.unit}{', simulated' if row.simulated else ''})"


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    several_cases = len({row.case for row in rows}) > 1
    labels = [f"{_label(row)}\n{row.case}" if several_cases else _label(row) for row in rows]
    places = range(len(rows))
    axes.barh(places, [row.value for row in rows], xerr=_interval_lengths(rows), color="#4477aa", capsize=3)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel(_axis_label(rows[0]))
    if rows[0].ratio_to is not None:
        axes.axvline(1.0, color="black", linewidth=0.8)


def _draw_lines(axes: Any, rows: Sequence[Row]) -> None:
    for label in dict.fromkeys(map(_label, rows)):
        line = [row for row in rows if _label(row) == label]
        axes.errorbar(
            [row.x for row in line], [row.value for row in line], yerr=_interval_lengths(line), label=label, marker="o"
        )
    axes.set(xlabel=rows[0].x_name, ylabel=_axis_label(rows[0]), ylim=(0, None))
    if rows[0].ratio_to is not None:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.legend()


def _interval_lengths(rows: Sequence[Row]) -> list[list[float]] | None:
    """Below and above each bar's end, as matplotlib wants them; None where no row has an interval.  [2, N]"""
    if all(row.low is None for row in rows):
        return None
    below = [max(0.0, row.value - row.low) if row.low is not None else 0.0 for row in rows]
    above = [max(0.0, row.high - row.value) if row.high is not None else 0.0 for row in rows]
    return [below, above]


def main() -> None:
    """Draw the rows of a file with the named metrics into a folder."""
    folder, file, *metrics = sys.argv[1:]
    write_plots([row for row in read_json(Path(file)) if row.metric in metrics], Path(folder))


if __name__ == "__main__":
    main()
