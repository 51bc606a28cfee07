"""Which values of a program may be needed at the same time, whatever the order in which its stages run.

    x ─► stage 0 ─► h ─► stage 1 ─► g ─► stage 2 ─► y        x and g do not clash: stage 0 has read x once stage 1 runs
     ╰──────────────────────────────────► stage 2            they do if stage 2 reads x as well

A stage runs when all that it reads is there, so what its ancestors read is read. Stages without a way from one to the
other may run at any time, and what the program returns, or states become, is needed to the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tvmhet.runtime.program import PipelineProgram


def clashes(program: PipelineProgram) -> Callable[[str, str], bool]:
    """Return whether two values, by name, may be needed at the same time."""
    before: list[int] = []  # by stage: its ancestors, a bit each
    for stage in program.stages:
        own = 0
        for p in program.predecessors(stage.index):
            own |= before[p] | 1 << p
        before.append(own)
    touched: dict[str, int] = {}  # by value: the stages that make or read it
    for stage in program.stages:
        for name in (*stage.inputs, *stage.outputs):
            touched[name] = touched.get(name, 0) | 1 << stage.index
    returned = frozenset((*program.outputs, *(s.renewed for s in program.states)))

    def is_over(value: str, other: str) -> bool:
        """Whether all stages that make or read `value` are done before `other` is made."""
        maker = program.producer(other)
        return maker is not None and value not in returned and not touched.get(value, 0) & ~before[maker]

    return lambda a, b: not is_over(a, b) and not is_over(b, a)
