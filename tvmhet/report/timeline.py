"""A plan's simulated run as an SVG picture: one lane per device, one colour per stage, time from left to right.

v100:0  |▒|██ 0 ██|▒|      |██ 2 ██|▒|
t4:0              |▒|█ 0 █|        |▒|█ 2 █|
        0 ms      10 ms    20 ms   30 ms
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from tvmhet.cluster.units import duration

if TYPE_CHECKING:
    from tvmhet.plans import Plan, TimelineEvent

_WIDTH, _LANE, _LABEL, _AXIS = 1000.0, 26.0, 170.0, 22.0  # user units of the SVG's view box
_GOLDEN_ANGLE = 137.508  # successive hues are far apart
_LABEL_CHARS = 26
_MIN_TEXT_WIDTH = 14.0
_TICKS = 6


def hue(stage: int) -> float:
    """Return the hue, in degrees, of a stage's colour."""
    return round((210 + stage * _GOLDEN_ANGLE) % 360, 1)


def plan_to_svg(plan: Plan) -> str:
    """Return an `<svg>` element, "" for a plan without a timeline. Colours come from the page's style."""
    end_s = max((e.finish_s for e in plan.timeline), default=0.0)
    if end_s <= 0:
        return ""
    devices = list(dict.fromkeys(d for s in plan.stages for d in s.placement.devices))
    height = len(devices) * _LANE + _AXIS
    parts = [f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="simulated timeline">']
    for seconds in _ticks(end_s):
        x = _x(seconds, end_s)
        parts.append(f'<line class="grid" x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{height - _AXIS:g}"/>')
        parts.append(
            f'<text class="axis" x="{x:.2f}" y="{height - 6:g}">{escape(duration(seconds) if seconds else "0")}</text>'
        )
    for lane, device in enumerate(devices):
        short = device if len(device) <= _LABEL_CHARS else "…" + device[1 - _LABEL_CHARS :]
        y = lane * _LANE + _LANE * 0.65
        parts.append(f'<text class="lane" x="0" y="{y:g}">{escape(short)}<title>{escape(device)}</title></text>')
    parts += [_box(event, devices.index(event.device), end_s) for event in plan.timeline]
    return "".join([*parts, "</svg>"])


def _x(seconds: float, end_s: float) -> float:
    return _LABEL + (_WIDTH - _LABEL - 40) * seconds / end_s


def _ticks(end_s: float) -> list[float]:
    """Round times from 0 to `end_s`, about `_TICKS` of them."""
    raw = end_s / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [i * step for i in range(int(end_s / step) + 1)]


def _box(event: TimelineEvent, lane: int, end_s: float) -> str:
    x, right = _x(event.start_s, end_s), _x(event.finish_s, end_s)
    width, y = max(right - x, 0.3), lane * _LANE + 3
    kind = "work" if event.kind == "compute" else "move"
    told = (
        f"stage {event.stage}, input {event.input_index}: {event.kind}, "
        f"{duration(event.start_s)} to {duration(event.finish_s)} on {event.device}"
    )
    box = (
        f'<rect class="{kind}" style="--h:{hue(event.stage):g}" x="{x:.2f}" y="{y:g}" '
        f'width="{width:.2f}" height="{_LANE - 6:g}"><title>{escape(told)}</title></rect>'
    )
    if kind == "move" or width < _MIN_TEXT_WIDTH:
        return box
    return box + f'<text class="number" x="{x + width / 2:.2f}" y="{y + 14:g}">{event.input_index}</text>'
