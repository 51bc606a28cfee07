"""What a plan changes in the operators themselves before they are fused: names only, plain data.

    Recompute("mask", (("add_1",), ("add_7",)))        mask ──► add_1        mask       ──► add_1
                                                          └───► add_7   ==>  mask_again ──► add_7

    Merge((("q", "q_add"), ("k", "k_add")))            x ─► q ─► q_add       x ─► q_merged ─► q_add_merged ─► q_add
                                                       └──► k ─► k_add  ==>                              └──► k_add

A merge computes products of one operand as one product with concatenated weights; slices of its result take the names
of what they replace, so every reader stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmhet.errors import BadGraph

_SHOWN = 3  # rewrites of a kind named in a line


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute the operator `op` again for some of its readers.

    `readers` are disjoint groups of operators, all that read `op` together; the first group reads `op` itself, each
    other one a copy of its own.
    """

    op: str
    readers: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        flat = [name for group in self.readers for name in group]
        if len(self.readers) < 2 or not all(self.readers) or len(set(flat)) != len(flat):
            raise BadGraph(
                f"recomputation of {self.op!r} for readers {self.readers}", "give two groups or more, each reader once"
            )


@dataclass(frozen=True, slots=True)
class Merge:
    """Make one product of several that read one tensor. Each member is a product and what follows it: bias, activation.

    Members are alike: their operators have the same families in the same order.
    """

    members: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        flat = [name for member in self.members for name in member]
        if len(self.members) < 2 or len({len(m) for m in self.members}) != 1 or len(set(flat)) != len(flat):
            raise BadGraph(f"merge of {self.members}", "give two members or more, as long as each other and disjoint")


#: Rewrites of one kind, made at once: all speak of the operators as they are before.
Batch = tuple[Recompute, ...] | tuple[Merge, ...]


def copy_names(rewrites: Sequence[Recompute], taken: Collection[str]) -> list[tuple[str, ...]]:
    """Return what the operator is called for each group of readers: its own name, then `<op>_again`, ..."""
    used, found = set(taken), []
    for rewrite in rewrites:
        found.append((rewrite.op, *(unused(f"{rewrite.op}_again", used) for _ in rewrite.readers[1:])))
    return found


def merged_names(rewrites: Sequence[Merge], taken: Collection[str]) -> list[tuple[str, ...]]:
    """Return the names of the merged operators of each merge: `<first member's>_merged`."""
    used = set(taken)
    return [tuple(unused(f"{name}_merged", used) for name in rewrite.members[0]) for rewrite in rewrites]


def unused(name: str, used: set[str]) -> str:
    """Return `name`, or `name_1`, `name_2`, ...: the first that is not used, and count it as used."""
    k, candidate = 0, name
    while candidate in used:
        k += 1
        candidate = f"{name}_{k}"
    used.add(candidate)
    return candidate


def in_words(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return a line for people about each kind of rewrite; none without rewrites."""
    again = [f"{r.op} (in {len(r.readers)} kernels)" for b in batches for r in b if isinstance(r, Recompute)]
    merges = [" + ".join(m[0] for m in r.members) for b in batches for r in b if isinstance(r, Merge)]
    lines = [("computed again instead of handed on", again), ("products made as one", merges)]
    return tuple(f"{what}: {some_of(found)}" for what, found in lines if found)


def some_of(found: Sequence[str]) -> str:
    """Return the first few of a list in words, and how many more there are."""
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def batch_from(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Return the batch that `dataclasses.asdict` wrote; KeyError, TypeError or BadGraph for anything else."""
    if any("members" in row for row in rows):
        return tuple(Merge(_groups(row["members"])) for row in rows)
    return tuple(Recompute(str(row["op"]), _groups(row["readers"])) for row in rows)


def _groups(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, row)) for row in rows)
