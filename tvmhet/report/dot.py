"""A plan as Graphviz text: stages as boxes, the tensors between them as edges.

inputs ──x──► [stage 0: 2 x v100, 41 kernels, 12.3 ms] ──relu_7, 3.1 MiB──► [stage 1: ...] ──► outputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvmhet.cluster.units import duration, gib
from tvmhet.report import facts

if TYPE_CHECKING:
    from tvmhet.plans import Plan, PlannedStage

_NAMES_SHOWN = 3


def plan_to_dot(plan: Plan, value_bytes: Mapping[str, int] | None = None) -> str:
    """Return the plan as a Graphviz digraph.

    `value_bytes` gives the sizes of tensors by name; edges show names and total bytes where all of theirs are known.
    Values that no other stage reads count as outputs of the model.
    """
    sizes = dict(value_bytes or {})
    lines = [
        f"digraph {_quote(plan.model)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style=rounded, fontname="sans-serif"];',
        '  edge [fontname="sans-serif", fontsize=10];',
        f"  label={_quote(_title(plan))};",
        '  inputs [label="inputs", shape=plaintext];',
        '  outputs [label="outputs", shape=plaintext];',
    ]
    lines += [f"  stage{s.index} [label={_quote(_stage_label(s))}];" for s in plan.stages]
    for (src, dst), names in _edges(plan.stages).items():
        lines.append(f"  {src} -> {dst} [label={_quote(_edge_label(names, sizes))}];")
    return "\n".join([*lines, "}"]) + "\n"


def _title(plan: Plan) -> str:
    return f"{plan.model}: {facts.throughput_text(plan)}" if not facts.plan_unknown(plan) else plan.model


def _stage_label(stage: PlannedStage) -> str:
    known = not facts.times_unknown(stage)
    return "\n".join(
        [
            f"stage {stage.index}: {facts.devices_text(stage)}",
            facts.span_text(stage),
            *facts.kernels_text(stage),
            f"compute {duration(stage.compute_s)}, load {duration(stage.load_s)}" if known else "times unknown",
            f"{gib(stage.memory_bytes)} on each device",
        ]
    )


def _edges(stages: Sequence[PlannedStage]) -> dict[tuple[str, str], list[str]]:
    """Value names by (from, to): stage to stage, from the model's inputs, and to its outputs."""
    maker = {value: s.index for s in stages for value in s.outputs}
    read = {value for s in stages for value in s.inputs}
    edges: dict[tuple[str, str], list[str]] = {}
    for s in stages:
        for value in s.inputs:
            src = f"stage{maker[value]}" if value in maker else "inputs"
            edges.setdefault((src, f"stage{s.index}"), []).append(value)
        results = [value for value in s.outputs if value not in read]
        if results or s.index == len(stages) - 1:
            edges.setdefault((f"stage{s.index}", "outputs"), []).extend(results)
    return edges


def _edge_label(names: Sequence[str], sizes: Mapping[str, int]) -> str:
    shown = [*names[:_NAMES_SHOWN], *([f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else [])]
    if names and all(n in sizes for n in names):
        shown.append(gib(sum(sizes[n] for n in names)))
    return "\n".join(shown)


def _quote(text: str) -> str:
    """Return a Graphviz string: quotes and backslashes escaped, line breaks as \\n."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", "\\n")
    return f'"{escaped}"'
