"""Branches at the same time on the cores of a CPU: what the merged kernel holds, and that it computes the same."""

import re

import numpy as np
import pytest
import torch
import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from tvm import relax

import tvmhet
from tests.placed import assert_same
from tvmhet.candidates import candidate_kernels, makers_on
from tvmhet.cluster import ClusterSpec
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target
from tvmhet.emit.run_together import run_together
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.errors import NotSupported
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.graph.library import place_kernel
from tvmhet.ir.attrs import BRANCHES_ATTR
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.prepare import prepare

CORE = dict(tvmhet.device_type("cpu-x86-64-v3").target)
MAKERS = ("tvm", "library", CONCURRENT)


class Block(torch.nn.Module):
    """A fork, branches of one to three convolutions, one behind a pooling and one with a softmax, and their join."""

    def __init__(self, channels, widths):
        super().__init__()
        one, two, three, four = widths
        self.one = torch.nn.Conv2d(channels, one, 1)
        self.two = torch.nn.ModuleList([torch.nn.Conv2d(channels, two, 1), torch.nn.Conv2d(two, two, 3, padding=1)])
        self.three = torch.nn.Conv2d(channels, three, 3, padding=1)
        self.four = torch.nn.Conv2d(channels, four, 1)

    def forward(self, x):
        x = torch.relu(x)
        one = self.one(x)
        two = torch.relu(self.two[1](torch.relu(self.two[0](x))))
        three = torch.softmax(self.three(x), 1)
        four = self.four(F.avg_pool2d(x, 3, 1, 1)).tanh()
        return torch.cat([one, two, three, four], 1)


def block(channels=32, widths=(24, 16, 16, 8), pixels=9, batch=1):
    torch.manual_seed(0)
    model = Block(channels, widths).eval()
    return model, torch.randn(batch, channels, pixels, pixels)


def concurrent_of(model, x):
    prepared = prepare(tvmhet.from_torch(model, (x,)))
    return prepared, [k for k in candidate_kernels(prepared.graph, MAKERS) if k.branches]


@pytest.mark.parametrize("cores", [1, 2, 3])
@settings(
    max_examples=2, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(32, 40), st.lists(st.integers(16, 30), min_size=4, max_size=4), st.integers(7, 9), st.integers(1, 2))
def test_branches_at_the_same_time_equal_branches_in_turn(cores, channels, widths, pixels, batch):
    model, x = block(channels, widths, pixels, batch)
    prepared, (kernel,) = concurrent_of(model, x)
    executable, _ = lower_stage(
        kernels_module(prepared.mod, [place_kernel(prepared.graph, kernel)]), {**CORE, "num-cores": cores}
    )
    reads = dict.fromkeys(t for i in kernel.ops for t in prepared.graph.operators[i].inputs)
    live_in = [prepared.graph.tensors[t] for t in reads if prepared.graph.tensors[t].producer not in kernel.ops]
    given_ = [prepared.params[t.name].numpy() if t.is_param else torch.relu(x).numpy() for t in live_in]
    made = relax.VirtualMachine(executable, tvm.cpu())["k0"](*[tvm.runtime.tensor(a) for a in given_])
    assert_same(np.concatenate([m.numpy() for m in made], 1), model(x))


def lowered(cores):
    prepared, (kernel,) = concurrent_of(*block())
    target = make_target({**CORE, "num-cores": cores})
    with target:
        mod = tvm.transform.Sequential(kernel_passes())(
            kernels_module(prepared.mod, [place_kernel(prepared.graph, kernel)])
        )
        return run_together(mod, target, ScheduleReport())


def test_one_kernel_with_a_loop_over_shares():
    mod = lowered(2)
    (func,) = [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    text = func.script()
    assert len(re.findall(r"in T\.parallel\(T\.int64\(2\)\)", text)) == len(re.findall("parallel", text)) == 1
    assert text.count("share_apart") == 2  # each share is a function of its own
    assert len(func.params) == 11 + 4 + 3  # x, weights and biases once; four results; three tensors between kernels
    assert text == next(f for _, f in lowered(2).functions_items() if isinstance(f, tvm.tirx.PrimFunc)).script()


def test_one_core_has_no_parallel_loop():
    (func,) = [f for _, f in lowered(1).functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert "parallel" not in func.script()


def test_a_module_without_branches_is_left_alone():
    prepared, _ = concurrent_of(*block())
    assert run_together(prepared.mod, make_target(CORE), ScheduleReport()) is prepared.mod


def test_what_is_no_kernel_is_refused():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("branches", [x], attrs={BRANCHES_ATTR: "[[1.0, 1]]"}):
        with builder.dataflow():
            made = builder.emit_output(relax.call_dps_packed("f", (x,), out_ty=relax.TensorType((4,), "float32")))
        builder.emit_func_output(made)
    with pytest.raises(NotSupported, match="no generated kernel"):
        run_together(builder.get(), make_target(CORE), ScheduleReport())


def test_a_plan_runs_branches_at_the_same_time_where_cores_are(tmp_path):
    model, x = block(channels=960, widths=(30, 30, 42, 30), pixels=7)  # five and seven tiles of rows: no even shares
    imported = tvmhet.from_torch(model, (x,))
    plans = {
        (cores, ablate): tvmhet.plan(
            imported,
            cluster=ClusterSpec.of({f"cpu-x86-64-v3{cores}": 1}),
            objective="latency",
            ablate=ablate,
            makers=("tvm", CONCURRENT),
            database=tmp_path / "none.db",
        )
        for cores in ("", "-2core")
        for ablate in ("", "no-concurrent")
    }
    makers = {key: {k.maker for k in plan.stages[0].kernels} for key, plan in plans.items()}
    assert makers == {("", ""): {"tvm"}, ("", "no-concurrent"): {"tvm"}, ("-2core", "no-concurrent"): {"tvm"},
                      ("-2core", ""): {"tvm", CONCURRENT}}  # fmt: skip
    best, lesser = plans["-2core", ""], plans["-2core", "no-concurrent"]
    assert best.latency_s < lesser.latency_s
    assert "1 concurrent" in str(best)
    assert tvmhet.Plan.from_json(best.to_json()) == best
    with tvmhet.build(imported, cluster=ClusterSpec.of({"cpu-x86-64-v3-2core": 1}), plan=best, inline=True) as lib:
        assert_same(lib(x), model(x))


def test_makers_of_devices():
    one, two, gpu = (tvmhet.device_type(n) for n in ("cpu-x86-64-v3", "cpu-x86-64-v3-2core", "a100"))
    assert makers_on(("tvm", CONCURRENT), [one, gpu]) == ("tvm",)
    assert makers_on(("tvm", CONCURRENT), [one, two]) == ("tvm", CONCURRENT)
    assert makers_on(("tvm", "library"), [two]) == ("tvm", "library")
