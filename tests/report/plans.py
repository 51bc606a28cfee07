"""Plans and measurements made by hand for the tests of the reports."""

from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.plans import KernelPrediction, Plan, PlannedStage, TimelineEvent
from tvmhet.runtime.stats import RunStats, Sample, StageRun, StageStats


def stage(index, kernels, device_type, devices, times, inputs, outputs, weights=(), transfer_s=0.0005, memory=2**30):
    """A stage of `kernels` (name, ops, maker) with `times` (seconds, source); the interval is 20 % either way."""
    placed = tuple(KernelPlacement(name, tuple(ops), maker) for name, ops, maker in kernels)
    compute_s = sum(t for t, _ in times)
    return PlannedStage(
        placement=StagePlacement(index, placed, device_type, tuple(devices)),
        predictions=tuple(KernelPrediction(t, t * 0.8, t * 1.2, source) for t, source in times),
        inputs=tuple(inputs),
        weights=tuple(weights),
        outputs=tuple(outputs),
        compute_s=compute_s,
        transfer_s=transfer_s,
        load_s=(compute_s + transfer_s + 0.00025) / len(devices),
        memory_bytes=memory,
    )


def two_stages(**changes) -> Plan:
    """Two V100 feed one T4; measured and roofline times mixed; not proved optimal."""
    first = stage(
        0,
        [("k0", ["conv1", "bn1_add", "relu1", "pool", "cast"], "tvm"), ("k1", ["layer1.conv"], "library")],
        "v100-sxm2-16gb",
        ["node0/v100-sxm2-16gb:0", "node0/v100-sxm2-16gb:1"],
        [(0.012, "measured"), (0.004, "roofline")],
        ["x"],
        ["h", "skip"],
        ["w0", "w1", "w2"],
    )
    second = stage(
        1,
        [("k2", ["layer2.conv"], "library"), ("k3", ["layer2.add", "softmax"], "tvm")],
        "t4",
        ["node0/t4:0"],
        [(0.0065, "measured"), (0.00001, "learned")],
        ["h", "skip", "x"],
        ["y"],
        ["w3"],
        memory=81 * 2**20,
    )
    period_s = max(first.load_s, second.load_s)
    fields = dict(
        model="resnet_toy",
        module_key="m" * 64,
        cluster_key="c" * 64,
        tvm_version="0.27.0",
        objective="throughput",
        objective_value=period_s,
        lower_bound=0.9 * period_s,
        status="feasible",
        solver="pipeline dp",
        steps=1234,
        latency_s=0.02426,
        period_s=period_s,
        usd_per_h=5.31,
        stages=(first, second),
        timeline=timeline(),
        notes=("t4: 3 kernels have no measurement; a roofline stood in",),
    )
    return Plan(**{**fields, **changes})


def timeline() -> tuple[TimelineEvent, ...]:
    """Two inputs on the three devices of `two_stages`."""
    a, b, c = "node0/v100-sxm2-16gb:0", "node0/v100-sxm2-16gb:1", "node0/t4:0"
    return (
        TimelineEvent(0, a, 0, "receive", 0.0, 0.0002),
        TimelineEvent(0, b, 1, "receive", 0.0, 0.0002),
        TimelineEvent(0, a, 0, "compute", 0.0002, 0.0162),
        TimelineEvent(0, b, 1, "compute", 0.0002, 0.0162),
        TimelineEvent(0, a, 0, "send", 0.0162, 0.0165),
        TimelineEvent(1, c, 0, "receive", 0.0162, 0.0165),
        TimelineEvent(1, c, 0, "compute", 0.0165, 0.02301),
        TimelineEvent(0, b, 1, "send", 0.02301, 0.02331),
        TimelineEvent(1, c, 1, "receive", 0.02301, 0.02331),
        TimelineEvent(1, c, 1, "compute", 0.02331, 0.02982),
    )


def whole() -> Plan:
    """A model that could not be cut: nothing is predicted."""
    only = stage(0, [("main", ["main"], "tvm")], "t4", ["t4:0"], [(0.0, "unknown")], ["x"], [], ["w"], transfer_s=0.0)
    return two_stages(
        model="loop",
        objective_value=0.0,
        lower_bound=0.0,
        latency_s=0.0,
        period_s=0.0,
        usd_per_h=0.0,
        solver="whole model on the fastest device that holds it",
        steps=0,
        stages=(only,),
        timeline=(),
        notes=("placed whole: control flow in 'main'",),
        whole_reason="control flow in 'main'",
    )


def measured(shared_cores=()) -> RunStats:
    """A run of `two_stages` that takes a little longer than predicted."""
    names = [("node0/v100-sxm2-16gb:0", "node0/v100-sxm2-16gb:1"), ("node0/t4:0",)]
    compute, slower = [0.0171, 0.00651], [0.0181, 0.0082]
    hops = [None, Sample(0.0003, 0.00025, 0.0004, 3)]

    def stats(seconds, hops):
        return tuple(
            StageStats(
                i, f"stage {i}", names[i], Sample(s, s * 0.99, s * 1.02, 3), Sample(0.0004, 0.0003, 0.0006, 3), hop
            )
            for i, (s, hop) in enumerate(zip(seconds, hops, strict=True))
        )

    runs = (
        StageRun(0, names[0][0], 3, 100.0, 100.0002, 100.0173, 100.0175),
        StageRun(0, names[0][1], 4, 100.0001, 100.0003, 100.0174, 100.0176),
        StageRun(1, names[1][0], 3, 100.0178, 100.018, 100.0245, 100.0247),
        StageRun(1, names[1][0], 4, 100.0247, 100.0249, 100.0314, 100.0316),
    )
    return RunStats(
        (0.0252, 0.0248, 0.0266), 98.5, stats(compute, hops), stats(slower, [None, None]), runs, shared_cores
    )
