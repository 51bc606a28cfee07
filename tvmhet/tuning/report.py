"""What a tuning run did, for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tvmhet.cluster.units import duration

_SHOWN = 5  # failed trials in words


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """One kernel on one device type: seconds by the rules and with the best schedule found (the same if none is)."""

    name: str
    device_type: str
    num_trials: int
    rules_s: float
    best_s: float


@dataclass(slots=True)
class TuningReport:
    """`before` and `after` are the plan's objective in seconds; `trials` counts this run's by status."""

    objective: str = ""
    before: float = 0.0
    after: float = 0.0
    trials: Counter[str] = field(default_factory=Counter)
    earlier: int = 0  # trials of the same kernels that earlier runs left
    stale: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    kernels: list[TunedKernel] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # kernels that cannot be tuned
    failed: list[str] = field(default_factory=list)  # trials that ended badly, in words
    unreachable: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()  # of the model whose kernels were tuned last, in words
    ended: str = ""  # why the run ended
    seconds: float = 0.0

    @property
    def num_trials(self) -> int:
        """Trials of this run."""
        return sum(self.trials.values())

    def __str__(self) -> str:
        how = ", ".join(f"{n} {status}" for status, n in sorted(self.trials.items()) if status != "ok")
        lines = [
            f"{self.num_trials} trials in {self.seconds:.1f} s"
            + (f", of which {how}" if how else "")
            + f": {self.ended}"
        ]
        if self.earlier:
            lines.append(f"continues {self.earlier} trials of earlier runs")
        if self.stale:
            why = ", ".join(f"{n} of {what}" for what, n in sorted(self.stale.items()))
            lines.append(f"skipped {sum(self.stale.values())} stale records: {why}")
        lines += [f"with {text}" for text in self.rewrites]
        for kernel in sorted(self.kernels, key=lambda k: (-k.num_trials, k.name, k.device_type)):
            gain = f"{kernel.rules_s / kernel.best_s:.2f} x" if kernel.best_s < kernel.rules_s else "not faster"
            lines.append(
                f"  {kernel.name} on {kernel.device_type}: {kernel.num_trials} trials, "
                f"{duration(kernel.rules_s)} -> {duration(kernel.best_s)} ({gain})"
            )
        if self.before:
            change = f"{duration(self.before)} -> {duration(self.after)} ({1 - self.after / self.before:.1%} less)"
            lines.append(f"{self.objective} objective {change}")
        if self.busy:
            lines.append(f"{self.busy} trials were timed on a busy machine: their times may be too long")
        lines += [f"failed: {text}" for text in self.failed[:_SHOWN]]
        if len(self.failed) > _SHOWN:
            lines.append(f"failed: {len(self.failed) - _SHOWN} more")
        lines += [f"not tuned: {text}" for text in self.refused]
        if self.unreachable:
            lines.append(f"not on this machine and not behind the tracker, so not tuned: {', '.join(self.unreachable)}")
        return "\n".join(lines)
