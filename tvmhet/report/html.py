"""A plan as one HTML page that needs nothing else: summary, stages, timeline, and a kernel table to search and sort.

Everything that comes from the plan is escaped: a plan from a stranger can put text on the page, and no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from tvmhet.cluster.units import duration, gib
from tvmhet.report import facts
from tvmhet.report.page import SCRIPT, STYLE
from tvmhet.report.timeline import hue, plan_to_svg

if TYPE_CHECKING:
    from tvmhet.plans import Plan, PlannedStage

# no network, no plug-ins, no forms: only the page's own style and script
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def plan_to_html(plan: Plan) -> str:
    """Return the page. It loads nothing, and the same plan gives the same text."""
    title = escape(f"plan of {plan.model}")
    svg = plan_to_svg(plan)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>",
            f'<header><h1>{title}</h1><button id="theme" type="button">dark / light</button></header>',
            _summary(plan),
            *_notes(plan),
            f"<h2>Stages</h2>\n{_stages(plan)}",
            *([] if facts.plan_unknown(plan) else [f'<p class="dim">{escape(facts.COLUMN_HELP)}</p>']),
            *([f"<h2>Timeline <small>simulated; pale: transfers</small></h2>\n{svg}"] if svg else []),
            f"<h2>Kernels</h2>\n{_kernels(plan)}",
            f'<p class="dim">module {escape(plan.module_key[:16])}, cluster {escape(plan.cluster_key[:16])}, '
            f"TVM {escape(plan.tvm_version)}</p>",
            f"<script>\n{SCRIPT}\n</script>\n</body>\n</html>\n",
        ]
    )


def _summary(plan: Plan) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.head_lines(plan)) + "</dl>"


def _notes(plan: Plan) -> Iterator[str]:
    if plan.notes:
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>"


def _stages(plan: Plan) -> str:
    head = _head(
        ("stage", "devices, operators, kernels", "compute>", "transfer>", "load>", "busy>", "memory>", "times from")
    )
    rows = "\n".join(_stage_row(s, plan.period_s) for s in plan.stages)
    return f'<div class="scroll"><table id="stages">{head}<tbody>\n{rows}\n</tbody></table></div>'


def _stage_row(stage: PlannedStage, period_s: float) -> str:
    devices = ", ".join(stage.placement.devices)
    what = [
        f'<strong title="{escape(devices)}">{escape(facts.devices_text(stage))}</strong>',
        f'<span class="ops">{escape(facts.span_text(stage))}</span>',
        f'<span class="dim">{escape(" ".join(facts.kernels_text(stage)))}</span>',
    ]
    memory = f"{gib(stage.memory_bytes)}<br><span class='dim'>{facts.counted(len(stage.weights), 'weight')}</span>"
    times = "".join(f'<td class="n">{escape(t)}</td>' for t in facts.stage_times(stage, period_s))
    sources = escape(facts.shares_text(stage.predictions)).replace(", ", "<br>")
    return (
        f"<tr><td>{_chip(stage.index)}{stage.index}</td><td>{'<br>'.join(what)}</td>{times}"
        f'<td class="n">{memory}</td><td>{sources}</td></tr>'
    )


def _kernels(plan: Plan) -> str:
    options = "".join(f'<option value="{s.index}">stage {s.index}</option>' for s in plan.stages)
    tools = (
        '<div class="tools"><input id="find" type="search" placeholder="search operators, kernels, sources" '
        'aria-label="search kernels"><select id="stage" aria-label="stage"><option value="">all stages</option>'
        f'{options}</select><span id="seen" class="dim"></span></div>'
    )
    head = _head(("stage", "kernel", "operators", "made by", "time>", "80 % interval>", "source"), sort=True)
    rows = "\n".join(row for stage in plan.stages for row in _kernel_rows(stage))
    return f'{tools}<div class="scroll"><table id="kernels">{head}<tbody>\n{rows}\n</tbody></table></div>'


def _kernel_rows(stage: PlannedStage) -> Iterator[str]:
    for kernel, guess in zip(stage.kernels, stage.predictions, strict=True):
        known = guess.source != facts.UNKNOWN
        time = duration(guess.time_s) if known else facts.UNKNOWN
        interval = f"{duration(guess.low_s)} … {duration(guess.high_s)}" if known else ""
        yield (
            f'<tr data-stage="{stage.index}"><td data-v="{stage.index}">{_chip(stage.index)}{stage.index}</td>'
            f'<td>{escape(kernel.name)}</td><td class="ops">{escape(", ".join(kernel.ops))}</td>'
            f'<td>{escape(kernel.maker)}</td><td class="n" data-v="{guess.time_s!r}">{escape(time)}</td>'
            f'<td class="n" data-v="{guess.high_s - guess.low_s!r}">{escape(interval)}</td>'
            f"<td>{escape(guess.source)}</td></tr>"
        )


def _head(columns: Sequence[str], sort: bool = False) -> str:
    """A table head; names that end in ">" are set flush right."""
    cells = []
    for name in columns:
        classes = " ".join([*(["n"] if name.endswith(">") else []), *(["sort"] if sort else [])])
        cells.append(f"<th{f' class={chr(34)}{classes}{chr(34)}' if classes else ''}>{escape(name.rstrip('>'))}</th>")
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _chip(stage: int) -> str:
    return f'<span class="chip" style="--h:{hue(stage):g}"></span>'
