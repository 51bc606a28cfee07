"""Compile stages for their targets: equal ones once, known ones from the cache, the rest on all cores."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tvm
from tvm import relax

from tvmhet._tvm import host_compiler
from tvmhet.emit.cache import StageCache
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.emit.cubins import keep_sources
from tvmhet.emit.lower import lower_plain, lower_stage
from tvmhet.errors import MissingPackage, PlanMismatch, UnsupportedOperator
from tvmhet.ir.bindings import Bindings, flatten, live_ins, outline
from tvmhet.ir.stages import standalone

_LOG = logging.getLogger("tvmhet.emit")  # at level INFO: how many kernels each rule made, failed on, and none took
# A worker imports TVM for 2 s and its first kernels take longer. Two stages of 37 to 209 kernels, library ones
# included, were built 0.1 to 2.1 s faster by this process alone, of 327 and 367 1.7 and 2.1 s slower (two cores).
_MIN_KERNELS_FOR_WORKERS = 250


@dataclass(frozen=True, slots=True)
class StageSource:
    """One stage to compile: its module (`main` and its kernels), its target description, and a name for reports.

    `plain` asks for what `tvm.compile` does by default: for a model that is placed whole, without planned kernels.
    `traces` are tuned schedules by the hash of their function.
    """

    name: str
    module: tvm.IRModule
    target: Mapping[str, Any]
    plain: bool = False
    traces: Mapping[str, str] = field(default_factory=dict)


def compile_to(
    mod: tvm.IRModule,
    target: Mapping[str, Any],
    library: Path,
    *,
    plain: bool = False,
    traces: Mapping[str, str] | None = None,
) -> str:
    """Compile `mod` and write it as a shared library that the Relax VM loads; return which rules made its kernels."""
    if host_compiler() is None:
        raise MissingPackage("no C++ compiler was found to link a stage", "install g++ or clang++, or set CXX")
    executable, report = (lower_plain(mod, target), "TVM's default") if plain else lower_stage(mod, target, traces)
    try:
        executable.export_library(str(library))
    except FileNotFoundError as error:
        raise MissingPackage(
            f"the C++ compiler {host_compiler()!r} does not exist, so no stage can be linked",
            "set CXX to one that does",
        ) from error
    keep_sources(executable.mod, target, library)
    return str(report)


def compile_stages(
    sources: Sequence[StageSource],
    cache: StageCache,
    *,
    on_progress: Callable[[int, int, str], None] | None = None,
    num_workers: int | None = None,
) -> tuple[Path, ...]:
    """Return the compiled library of each source, in order.

    `on_progress(done, total, name)` is told of each stage as it is ready. Raises UnsupportedOperator naming the stage
    when TVM cannot compile it; libraries compiled until then stay in the cache, nothing else is left behind.
    """
    places = [cache.place(s.module, s.target, s.plain, s.traces) for s in sources]
    ready: dict[Path, Path] = {}
    misses: dict[Path, StageSource] = {}
    for place, source in zip(places, sources, strict=True):
        if place in ready or place in misses:
            continue
        found = cache.find(source.module, source.target, source.plain, source.traces)
        if found is not None:
            ready[place] = found
        else:
            misses[place] = source
    report = on_progress or (lambda done, total, name: None)
    report(len(ready), len(ready) + len(misses), "from the cache")
    for place, library in _compile_all(misses, cache, num_workers or os.cpu_count() or 1):
        ready[place] = library
        report(len(ready), len(set(places)), misses[place].name)
    return tuple(ready[place] for place in places)


def _compile_all(misses: Mapping[Path, StageSource], cache: StageCache, num_workers: int) -> Any:
    """Yield (place, library) as stages are compiled."""
    num_kernels = sum(_num_calls(s.module) for s in misses.values())
    with tempfile.TemporaryDirectory(prefix="tvmhet-") as folder:
        if len(misses) < 2 or num_workers < 2 or num_kernels < _MIN_KERNELS_FOR_WORKERS:
            for i, (place, source) in enumerate(misses.items()):
                library = Path(folder) / f"{i}.so"
                _compile_here(source, library)
                yield place, cache.add(source.module, source.target, source.plain, library, source.traces)
            return
        yield from _compile_in_workers(misses, cache, Path(folder), min(num_workers, len(misses)))


def _num_calls(mod: tvm.IRModule) -> int:
    return sum(len(b.bindings) for f in mod.functions.values() if isinstance(f, relax.Function) for b in f.body.blocks)


def _compile_here(source: StageSource, library: Path) -> None:
    try:
        report = compile_to(source.module, source.target, library, plain=source.plain, traces=source.traces)
        _LOG.info("%s: %s", source.name, report)
    except (MissingPackage, PlanMismatch):
        raise
    except Exception as error:
        raise _refusal(source, f"{type(error).__name__}: {error}") from error


def _refusal(source: StageSource, text: str, *, crashed: bool = False) -> UnsupportedOperator:
    first = next((line for line in reversed(text.strip().splitlines()) if line.strip()), text)
    operator = None if crashed or source.plain else _culprit(source)
    what = f"operator {operator!r} of {source.name}" if operator else source.name
    return UnsupportedOperator(
        f"TVM cannot compile {what} for {dict(source.target)}: {first[:300]}",
        "pin its operators to another device type, or report the operator to Apache TVM",
    )


def _culprit(source: StageSource) -> str | None:
    """The first kernel of a stage that does not compile alone either, by the name of its last operator."""
    bindings = Bindings(source.module["main"])
    for name in bindings.calls:
        results = tuple(flatten(bindings.results[name]))
        alone = outline(bindings, [name], live_ins(bindings, [name]), results, always_tuple=True)
        try:
            lower_stage(standalone(source.module, alone), source.target)
        except Exception:  # whatever TVM raises: this is the kernel that is looked for
            return name
    return None


def _compile_in_workers(misses: Mapping[Path, StageSource], cache: StageCache, folder: Path, num_workers: int) -> Any:
    idle: SimpleQueue[CompilerProcess] = SimpleQueue()
    workers = [CompilerProcess() for _ in range(num_workers)]
    for worker in workers:
        worker.start()
        idle.put(worker)

    def compile_one(item: tuple[int, StageSource]) -> None:
        i, source = item
        module = folder / f"{i}.json"
        module.write_text(tvm.ir.save_json(source.module))
        worker = idle.get()
        try:
            _ask(worker, source, module, folder / f"{i}.so")
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(num_workers) as pool:
            done = pool.map(compile_one, enumerate(misses.values()))
            for i, (place, source) in enumerate(misses.items()):
                next(done)
                yield place, cache.add(source.module, source.target, source.plain, folder / f"{i}.so", source.traces)
    finally:
        for worker in workers:
            worker.close()


def _ask(worker: CompilerProcess, source: StageSource, module: Path, library: Path) -> None:
    answer = worker.compile(module, source.target, library, plain=source.plain, traces=source.traces)
    if answer.status != "ok":
        raise _refusal(source, answer.text, crashed=answer.status == "crash")
    _LOG.info("%s: %s", source.name, answer.text)
