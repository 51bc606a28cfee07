"""A tuned schedule is replayed on its function and on no other."""

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.emit.modules import chain
from tvmhet._tvm import PrimFunc, s_tir, trace_json
from tvmhet.emit.build import compile_to
from tvmhet.emit.cache import StageCache
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target
from tvmhet.emit.tuned import apply_schedule, function_hash
from tvmhet.errors import PlanMismatch

LLVM = {"kind": "llvm", "mcpu": "x86-64-v2"}


def function():
    """The only function of a stage of one exp."""
    with make_target(LLVM):
        lowered = tvm.transform.Sequential(kernel_passes())(chain("exp"))
    (func,) = (f for _, f in lowered.functions_items() if isinstance(f, PrimFunc))
    return func


def trace_of(func):
    """The loops fused and split by 4, as a MetaSchedule trace in JSON."""
    schedule = s_tir.Schedule(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    block = schedule.get_sblock("compute")
    schedule.split(schedule.fuse(*schedule.get_loops(block)), [None, 4])
    return trace_json(schedule.trace), schedule.mod["main"]


def test_the_trace_is_replayed_and_attributes_stay():
    func = function()
    trace, expected = trace_of(func)
    scheduled = apply_schedule(func, trace)
    tvm.ir.assert_structural_equal(scheduled, expected.without_attr("global_symbol"))
    assert dict(scheduled.attrs) == dict(func.attrs)


def test_the_hash_is_of_the_body_alone():
    func = function()
    assert function_hash(func.with_attr("global_symbol", "other").with_attr("tvmhet.x", 1)) == function_hash(func)
    with make_target(LLVM):
        lowered = tvm.transform.Sequential(kernel_passes())(chain("tanh"))
    (other,) = (f for _, f in lowered.functions_items() if isinstance(f, PrimFunc))
    assert function_hash(func) != function_hash(other)


def test_a_stage_takes_its_tuned_schedule_before_the_rules():
    func = function()
    traces = {function_hash(func): trace_of(func)[0]}
    _, report = lower_stage(chain("exp"), LLVM, traces)
    assert str(report) == "1 kernels: 1 tuned"
    _, report = lower_stage(chain("exp"), LLVM)
    assert str(report) == "1 kernels: 1 injective"


def test_a_schedule_of_another_function_is_refused():
    func = function()
    with pytest.raises(PlanMismatch, match="which this stage does not have"):
        lower_stage(chain("tanh"), LLVM, {function_hash(func): trace_of(func)[0]})


def test_a_trace_that_does_not_fit_raises():
    with pytest.raises(Exception, match=r"no_such_block"):
        lower_stage(
            chain("exp"), LLVM, {function_hash(function()): '[[["GetSBlock",[],["no_such_block","main"],["b0"]]],[]]'}
        )


def test_results_are_those_of_the_rules_bit_by_bit(tmp_path):
    func, results = function(), []
    for name, traces in (("rules", None), ("tuned", {function_hash(func): trace_of(func)[0]})):
        compile_to(chain("exp"), LLVM, tmp_path / f"{name}.so", traces=traces)
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / f"{name}.so")), tvm.cpu())
        x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)
        results.append(machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(x))[0].numpy())
    np.testing.assert_array_equal(results[0], results[1])


def test_the_cache_tells_schedules_apart(tmp_path):
    cache, mod = StageCache(tmp_path), chain("exp")
    plain = cache.place(mod, LLVM)
    assert cache.place(mod, LLVM, traces={}) == plain  # entries from before tuning stay valid
    a, b = (cache.place(mod, LLVM, traces={"f": t}) for t in ("[1]", "[2]"))
    assert len({plain, a, b}) == 3
