"""States between calls: kept by the device that alone has to do with them, else in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import tvmhet
from tests import emulated_cuda
from tests.runtime.programs import SHAPE, add_scale_module, full, specs, two_cpus
from tests.stateful import Decoder, step
from tvmhet.cluster import local
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import BadGraph, WorkerFailed
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, ValueSpec, fleet, vm
from tvmhet.runtime.kept_states import KeptStates
from tvmhet.runtime.lifetimes import clashes
from tvmhet.runtime.program import StateProgram
from tvmhet.runtime.states import StateLayout, States, kept_by_stages
from tvmhet.runtime.tensors import array_over, empty_aligned

CompileStage = Callable[[str, tvm.IRModule], Path]


def counting(add_scale: Callable[..., Path], devices: tuple[str, ...] = ("cpu0",), sessions: int = 1):
    """h, n' = x + n, 2 (x + n) on the first devices; y = h + 1 on cpu1."""
    stages = (
        StageProgram(0, "count", add_scale(2, 2), ("x", "n"), ("h", "next"), devices, ("zero",)),
        StageProgram(1, "last", add_scale(1), ("h",), ("y",), ("cpu1",), ("w",)),
    )
    params = {"zero": full(0), "w": full(1), "n at first": full(5)}
    state = StateProgram("n", "n", "next", "n at first")
    values = specs("x", "n", "h", "next", "y")
    return PipelineProgram(values, ("x",), ("y",), stages, params, two_cpus(), "single", (state,), sessions)


def elsewhere(program: PipelineProgram, add_scale: Callable[..., Path]) -> PipelineProgram:
    """The same; who renews the state is on the other device than who reads it."""
    stages = (
        StageProgram(0, "count", add_scale(2, 1), ("x", "n"), ("h",), ("cpu0",), ("zero",)),
        StageProgram(1, "last", add_scale(1, 2), ("h",), ("g", "next"), ("cpu1",), ("zero",)),
        StageProgram(2, "more", add_scale(1), ("g",), ("y",), ("cpu0",), ("w",)),
    )
    return replace(program, stages=stages, values=dict(program.values) | specs("g"))


class Count:
    """What the programs compute."""

    def __init__(self, first: float = 5.0):
        self.n = first

    def __call__(self, x: float) -> float:
        self.n, h = 2 * (x + self.n), x + self.n
        return h + 1


@pytest.mark.parametrize("apart", [False, True])
def test_each_call_reads_what_the_last_one_left(apart: bool, add_scale: Callable[..., Path]) -> None:
    program = counting(add_scale)
    program = elsewhere(program, add_scale) if apart else program
    assert kept_by_stages(program) == ({} if apart else {0: {"n": "next"}})
    count = Count()
    with HetRuntime(program) as runtime:
        for x in range(6):
            np.testing.assert_array_equal(runtime(full(x)), full(count(x)))
            np.testing.assert_array_equal(runtime.states(0)["n"], full(count.n))
        runtime.set_states(0, {"n": full(2)})
        count.n = 2
        for x, y in enumerate(runtime.map(full(x) for x in range(6))):
            np.testing.assert_array_equal(y, full(count(x)))
        runtime.set_states(0, None)
        np.testing.assert_array_equal(runtime.states(0)["n"], full(5))
        np.testing.assert_array_equal(runtime(full(1)), full(7))
    with HetRuntime(program) as runtime:  # begun anew
        np.testing.assert_array_equal(runtime(full(1)), full(7))


@pytest.mark.parametrize("first", [True, False])
def test_replicas_have_the_sessions_of_their_own(first: bool, add_scale: Callable[..., Path]) -> None:
    """Three sessions on two devices, in an order by dice; none is moved, whoever hands its calls to them."""
    program = counting(add_scale, ("cpu0", "cpu1"), 3)
    if not first:
        count, last = program.stages
        before = StageProgram(0, "before", add_scale(1), ("x",), ("v",), ("cpu1",), ("zero",))
        stages = (before, replace(count, index=1, inputs=("v", "n")), replace(last, index=2))
        program = replace(program, stages=stages, values=dict(program.values) | specs("v"))
    assert kept_by_stages(program) == {1 - first: {"n": "next"}}
    counts, dice = [Count() for _ in range(3)], np.random.default_rng(0)
    with HetRuntime(program) as runtime:
        order = dice.integers(0, 3, 40).tolist()
        results = runtime.map((full(i % 2) for i in range(40)), sessions=order)
        for i, (session, y) in enumerate(zip(order, results, strict=True)):
            count = counts[session]
            count.n = count.n if count.n < 1e6 else float(count.n)
            np.testing.assert_array_equal(y, full(np.float32(count(i % 2))))
        for session, count in enumerate(counts):
            np.testing.assert_array_equal(runtime.states(session)["n"], full(np.float32(count.n)))


def _refusing() -> tvm.IRModule:
    """main(x, n, ok) = (x + n, x + n + 1), which raises unless `ok` is true."""
    builder = relax.BlockBuilder()
    x, n = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in "xn")
    ok = relax.Var("ok", relax.TensorType((), "bool"))
    with builder.function("main", [x, n, ok], {"relax.force_pure": True}):
        builder.emit(relax.op.assert_op(ok, format="refused"))
        both = builder.emit(relax.op.add(x, n))
        out = builder.emit(relax.Tuple([both, builder.emit(relax.op.add(both, relax.const(1.0)))]))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.parametrize("first", [True, False])
def test_a_call_that_fails_leaves_every_state(
    first: bool, compile_stage: CompileStage, add_scale: Callable[..., Path]
) -> None:
    """Whether the stage that fails comes before or after another that has already renewed a state of its own."""
    picky = StageProgram(0, "picky", compile_stage("refusing", _refusing()), ("x", "n", "ok"), ("h", "n2"), ("cpu0",))
    count = StageProgram(1, "count", add_scale(2, 2), ("h", "m"), ("y", "m2"), ("cpu1",), ("w",))
    if not first:
        picky = replace(picky, index=1, inputs=("y", "n", "ok"))
        count = replace(count, index=0, inputs=("x", "m"))
    stages = (picky, count) if first else (count, picky)
    values = specs("x", "n", "n2", "m", "m2", "h", "y") | {"ok": ValueSpec.of("ok", (), "bool")}
    states = (StateProgram("n", "n", "n2", "0"), StateProgram("m", "m", "m2", "0"))
    params = {"w": full(1), "0": full(0)}
    outputs = ("y",) if first else ("h",)
    program = PipelineProgram(values, ("x", "ok"), outputs, stages, params, two_cpus(), "single", states)
    with HetRuntime(program) as runtime:
        want, states_before = [], []
        for i in range(4):
            want.append(runtime(full(i), np.array(True)))
            states_before.append(runtime.states(0))
    with HetRuntime(program) as runtime:
        for i in range(4):
            for _ in range(2):
                with pytest.raises(WorkerFailed, match="refused"):
                    runtime(full(9), np.array(False))
            np.testing.assert_array_equal(runtime(full(i), np.array(True)), want[i])
            for name, value in runtime.states(0).items():
                np.testing.assert_array_equal(value, states_before[i][name])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, DeviceBinding]:
    """Two emulated GPUs, as this machine's."""
    emulated_cuda.install()
    found = {"local/a100-sxm-80gb:0": 0, "local/a100-sxm-80gb:1": 1}
    monkeypatch.setattr(fleet, "cuda_ordinals", lambda: found)
    monkeypatch.setattr(local, "cuda_ordinals", lambda: found)
    return {f"gpu{i}": DeviceBinding(f"gpu{i}", "cuda", ordinal=i) for i in range(2)}


def test_states_stay_on_gpus(two_gpus: dict[str, DeviceBinding], add_scale: object, tmp_path: Path) -> None:
    """Two replicas, three sessions: the state that one stage has, and one that goes over the host."""
    library = tmp_path / "cuda.so"
    lower_stage(add_scale_module(3, 2, "float32"), emulated_cuda.A100)[0].export_library(str(library))
    stages = (
        StageProgram(0, "own", library, ("x", "n", "far"), ("h", "n2"), ("gpu0", "gpu1"), ("zero",)),
        StageProgram(1, "last", add_scale(1, 2), ("h",), ("y", "far2"), ("cpu1",), ("zero",)),  # type: ignore[operator]
    )
    states = (StateProgram("n", "n", "n2", "one"), StateProgram("far", "far", "far2", "zero"))
    values, params = specs("x", "n", "n2", "far", "far2", "h", "y"), {"zero": full(0), "one": full(1)}
    program = PipelineProgram(
        values, ("x",), ("y",), stages, params, two_cpus() | two_gpus, "single", states, num_sessions=3
    )
    assert kept_by_stages(program) == {0: {"n": "n2"}}
    kept = [(1.0, 0.0)] * 3
    with HetRuntime(program) as runtime:
        for i in range(12):
            session = (i * i) % 3
            n, far = kept[session]
            total = i + n + far
            np.testing.assert_array_equal(runtime.call((full(i),), session), full(total))
            kept[session] = 2 * total, 2 * total
        for session, (n, far) in enumerate(kept):
            found = runtime.states(session)
            np.testing.assert_array_equal(found["n"], full(n))
            np.testing.assert_array_equal(found["far"], full(far))
        runtime.set_states(1, {"n": full(3)})
        np.testing.assert_array_equal(runtime.call((full(1),), 1), full(4 + kept[1][1]))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_sessions_and_failures_in_any_order(
    on_gpu: bool,
    two_gpus: dict[str, DeviceBinding],
    compile_stage: CompileStage,
    add_scale: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """The first device has renewed its state when the second one fails; other sessions come between, or read it."""
    library = add_scale(2, 2)
    if on_gpu:
        library = tmp_path / "cuda.so"
        lower_stage(add_scale_module(2, 2, "float32"), emulated_cuda.A100)[0].export_library(str(library))
    refusing = compile_stage("refusing", _refusing())
    stages = (
        StageProgram(0, "own", library, ("x", "n"), ("h", "n2"), ("gpu0" if on_gpu else "cpu0",), ("zero",)),
        StageProgram(1, "picky", refusing, ("h", "x", "ok"), ("y", "z"), ("cpu1",)),
    )
    values = specs("x", "n", "n2", "h", "y", "z") | {"ok": ValueSpec.of("ok", (), "bool")}
    states = (StateProgram("n", "n", "n2", "one"),)
    program = PipelineProgram(
        values,
        ("x", "ok"),
        ("y",),
        stages,
        {"zero": full(0), "one": full(1)},
        two_cpus() | two_gpus,
        "single",
        states,
        3,
    )
    assert kept_by_stages(program) == {0: {"n": "n2"}}
    dice, kept = np.random.default_rng(1), [1.0] * 3
    with HetRuntime(program) as runtime:
        for _ in range(150):
            session, what = int(dice.integers(3)), int(dice.integers(8))
            if what == 0:
                np.testing.assert_array_equal(runtime.states(session)["n"], full(kept[session]))
            elif what == 1:
                kept[session] = float(dice.integers(9))
                runtime.set_states(session, {"n": full(kept[session])})
            elif what < 4:
                with pytest.raises(WorkerFailed, match="refused"):
                    runtime.call((full(1), np.array(False)), session)
            else:
                np.testing.assert_array_equal(runtime.call((full(2), np.array(True)), session), full(kept[session] + 4))
                kept[session] = (2 * (kept[session] + 2)) % 1e6
                if kept[session] > 1e5:
                    kept[session] = 1.0
                    runtime.set_states(session, None)


def test_a_decoder_on_two_gpus_and_a_cpu_device(
    two_gpus: dict[str, DeviceBinding], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    cluster = tvmhet.ClusterSpec.of({"a100-sxm-80gb": 2, "cpu-x86-64-v2": 1})
    models = [Decoder().eval() for _ in range(3)]
    imported = tvmhet.from_torch(models[0], step(1, 0), num_sessions=3)
    pin = {"words": "a100-sxm-80gb", "attentions_0*": "a100-sxm-80gb", "head": "cpu-x86-64-v2"}
    with tvmhet.build(imported, cluster=cluster, pin=pin, makers=("tvm",)) as lib:
        for i in range(12):
            session, at = i % 3, i // 3
            got, want = lib.sessions[session](*step(7 * i % 50, at)), models[session](*step(7 * i % 50, at))
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
        for session, model in enumerate(models):
            for name, value in lib.sessions[session].state().items():
                want = dict(model.named_buffers())[name]
                np.testing.assert_allclose(value, want.numpy(), rtol=1e-4, atol=1e-5)


def test_an_input_that_is_kept_lies_apart_from_what_comes_later(add_scale: Callable[..., Path]) -> None:
    """Nobody reads x after the first stage, but it is the state of the next call."""
    names = ("x", "last", "a", "b", "c", "y")
    one = add_scale(1)
    stages = (
        StageProgram(0, "first", add_scale(2), ("x", "last"), ("a",), ("cpu0",), ("w",)),
        StageProgram(1, "second", one, ("a",), ("b",), ("cpu1",), ("w",)),
        StageProgram(2, "third", one, ("b",), ("c",), ("cpu0",), ("w",)),
        StageProgram(3, "fourth", one, ("c",), ("y",), ("cpu1",), ("w",)),
    )
    states = (StateProgram("last", "last", "x", "w"),)
    program = PipelineProgram(specs(*names), ("x",), ("y",), stages, {"w": full(1)}, two_cpus(), "single", states)
    assert all(clashes(program)("x", other) for other in "bcy")
    with HetRuntime(program) as runtime:
        last = 1
        for x in (3, 5, 9, 2):
            np.testing.assert_array_equal(runtime(full(x)), full(x + last + 4))
            last = x


def test_what_lies_in_an_arguments_memory_is_copied() -> None:
    """A stage may return a part of what it was given, which the next call overwrites; others are kept as they are."""
    stage = StageProgram(0, "a", Path("none"), ("x", "n", "m"), ("y", "n2", "m2"), ("cpu0",))
    kept = KeptStates(stage, {"n": "n2", "m": "m2"})
    memory = [empty_aligned(spec) for spec in specs("x", "n", "m", "own").values()]
    for i, array in enumerate(memory):
        array[:] = i
    x, n, m, own = (vm.host_view(array) for array in memory)
    assert kept.begin(0, [x, n, m], ()) == [x, n, m] and kept.results == {1, 2}
    kept.end(0, [own, x, own], [x, n, m])  # n becomes the input itself, m a tensor of its own
    memory[0][:] = 9
    _, renewed, other = kept.begin(1, [x, n, m], ())
    np.testing.assert_array_equal(array_over(renewed), full(0))
    assert other is own and vm.span(renewed) != vm.span(x)


def test_slots_take_no_memory_until_they_are_written() -> None:
    size = 1 << 20
    values = {name: ValueSpec.of(name, (size,), "float32") for name in ("s", "t")}
    stage = StageProgram(0, "a", Path("none"), ("s",), ("t",), ("cpu0",))
    params = {"0": np.zeros(size, "float32")}
    program = PipelineProgram(
        values, (), ("t",), (stage,), params, two_cpus(), "single", (StateProgram("s", "s", "t", "0"),), 4
    )
    layout = StateLayout.of(program)
    assert layout.size_bytes == 8 * 4 * size and layout.made == {"t": "s"}
    states = States(program)
    assert Path(f"/proc/self/fd/{states.segment.fd}").stat().st_blocks == 0
    states.write(2, {"s": np.ones(size, "float32")})
    assert states.read(2)["s"].all() and not states.read(1)["s"].any()
    states.close()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (StateProgram("n", "x", "next", "n at first"), "state 'n' is 'x', which an input or a stage makes"),
        (StateProgram("n", "n", "next", "none"), "state 'n' has no first value 'none'"),
        (StateProgram("n", "n", "nowhere", "n at first"), "a state becomes 'nowhere', which nothing provides"),
    ],
)
def test_a_program_whose_states_do_not_fit_is_refused(
    state: StateProgram, text: str, add_scale: Callable[..., Path]
) -> None:
    program = counting(add_scale)
    with pytest.raises(BadGraph, match=text):
        replace(program, states=(state,), values=dict(program.values) | specs("nowhere"))
