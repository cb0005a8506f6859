"""The picture at the top of README.md: tokens per second of one greedy stream, from bench/results/latency.json."""

from __future__ import annotations

from typing import NamedTuple

from tools.reference.figures import rate

_WIDTH, _BAR_LEFT, _BAR_HEIGHT, _ROW_HEIGHT, _TOP = 720, 270, 22, 34, 44
_MAX_BAR = 340
_FONT = "font-family='system-ui, sans-serif'"


class _Bar(NamedTuple):
    label: str
    system: str
    colour: str


_BARS = (
    _Bar("Transformers generate()", "hf_plain", "#9aa4b2"),
    _Bar("Transformers, assisted generation", "hf_assisted", "#9aa4b2"),
    _Bar("specdec, target alone", "specdec_target_only", "#6ea8fe"),
    _Bar("specdec, with a draft model", "specdec", "#2b6cb0"),
)


def chart() -> str:
    """Return the picture as SVG."""
    rates = [rate(bar.system) for bar in _BARS]
    height = _TOP + _ROW_HEIGHT * len(_BARS) + 12
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' role='img' "
        f"viewBox='0 0 {_WIDTH} {height}'>",
        "<title>Tokens per second of one greedy stream</title>",
        f"<rect width='{_WIDTH}' height='{height}' rx='6' fill='#ffffff'/>",
        f"<text x='16' y='26' font-size='15' font-weight='600' fill='#1a202c' {_FONT}>"
        "Tokens per second, one greedy stream, 24-layer target, two CPU cores</text>",
    ]
    for index, (bar, value) in enumerate(zip(_BARS, rates, strict=True)):
        lines += _row(bar, value, _MAX_BAR * value / max(rates), _TOP + _ROW_HEIGHT * index)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(bar: _Bar, value: float, length: float, top: int) -> list[str]:
    baseline = top + _BAR_HEIGHT - 6
    return [
        f"<text x='{_BAR_LEFT - 12}' y='{baseline}' font-size='14' text-anchor='end' fill='#1a202c' {_FONT}>"
        f"{bar.label}</text>",
        f"<rect x='{_BAR_LEFT}' y='{top}' width='{length:.0f}' height='{_BAR_HEIGHT}' fill='{bar.colour}'/>",
        f"<text x='{_BAR_LEFT + length + 8:.0f}' y='{baseline}' font-size='14' fill='#1a202c' {_FONT}>"
        f"{value:.0f}</text>",
    ]
