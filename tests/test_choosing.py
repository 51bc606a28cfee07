"""Plans where devices slow each other down: priced as they run together, and one alone where that is as fast."""

from contextlib import closing
from dataclasses import replace

import pytest

import tvmhet
from tests.placed import cpus
from tests.small_models import SMALL_MODELS
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.choosing import best_or_alone, best_plan
from tvmhet.context import beside, company, keep_context, keep_operators, keep_run, kernel_factors
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import Infeasible
from tvmhet.ir.prepare import prepare
from tvmhet.known_times import known_times
from tvmhet.profiling import Profiler, ProfileReport
from tvmhet.proposing import KINDS
from tvmhet.rewriting import Wanted
from tvmhet.solve import Objective
from tvmhet.times import Candidates

TWO = cpus(v2=1, v3=1)
V2, V3 = TWO.device_types()
THROUGHPUT = Wanted(Objective.THROUGHPUT, MAKERS, {}, kinds=frozenset())


@pytest.fixture(scope="module")
def prepared():
    return prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]()))


def keep(database, prepared, alone, together):
    for device in TWO.device_types():
        keep_context(database, prepared.key, device, (alone,), 1.0)
        keep_context(database, prepared.key, device, (together,), 1.0, beside(1))


def test_times_of_pipelines_are_those_of_devices_at_work_together(prepared, database):
    keep(database, prepared, 1.5, 3.0)
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))

    def table(cluster, together):
        return known_times(prepared, candidates, database, cluster, in_context=True, together=together)

    alone, together = table(TWO, False).seconds, table(TWO, True).seconds
    assert together == pytest.approx(2 * alone)
    one = cpus(v2=1)
    assert table(one, True).seconds == pytest.approx(table(one, False).seconds)
    three = cpus(v2=2, v3=1)  # never measured: as alone
    assert table(three, True).seconds == pytest.approx(table(three, False).seconds)
    assert (company(one), company(TWO), company(three)) == ("", beside(1), beside(2))


def test_a_kernels_factor_is_that_of_its_operators(prepared, database):
    """The second half of the operators is three times as slow inside, the first as alone; all 1.2 times in company."""
    names = [op.name for op in prepared.graph.operators]
    half = len(names) // 2
    for device in TWO.device_types():
        inside = [2.0 if i < half else 6.0 for i in range(len(names))]
        keep_context(database, prepared.key, device, (2.0,), 1.0)
        keep_context(database, prepared.key, device, (2.4,), 1.0, beside(1))
        keep_operators(database, prepared.key, device, [(n,) for n in names], inside, [2.0] * len(names))
    kernels = candidate_kernels(prepared.graph, MAKERS)
    by_name = [[names[o] for o in k.ops] for k in kernels]
    for part, slower in (("", 1.0), (beside(1), 1.2)):
        factors = kernel_factors(database, prepared.key, V2, by_name, part)
        want = [slower * sum(1.0 if o < half else 3.0 for o in k.ops) / len(k.ops) for k in kernels]
        assert factors == pytest.approx(want)
    assert kernel_factors(database, "another model", V2, by_name) is None
    assert kernel_factors(database, prepared.key, V2, [["another operator"]]) == pytest.approx([2.0])


def test_a_kernel_that_ran_in_a_plan_takes_its_own_factor(prepared, database):
    """The others take their operators', corrected as those that ran were; with hope 15 % less.

    A tenth of the model counts as having taken what was expected.
    """
    keep_context(database, prepared.key, V2, (2.0,), 1.0)
    keep_run(database, prepared.key, V2, ["a", "b"], (3.0, 2.0), (2.0, 2.0))
    keep_run(database, prepared.key, V2, ["a"], (5.0,), (2.0,))
    keep_run(database, prepared.key, V2, ["c"], (9.0,), (1.0,), beside(1))  # in company: another matter
    names = [[op.name] for op in prepared.graph.operators[:4]]
    corrected = 2.0 * (3 + 2 + 5 + 0.2) / (2 * (2 + 2 + 2) + 0.2)

    def factors(**options):
        return kernel_factors(database, prepared.key, V2, names, ran=[["a"], ["b"], ["c"], ["d"]], **options)

    assert factors() == pytest.approx([2.0, 1.0, corrected, corrected])
    assert factors(hopeful=True) == pytest.approx([2.0, 1.0, 0.85 * corrected, 0.85 * corrected])
    assert kernel_factors(database, prepared.key, V2, names) == pytest.approx([2.0] * 4)


def test_a_stage_of_next_to_nothing_corrects_next_to_nothing(prepared, database):
    """However much longer it takes than alone; and candidates of the same kernel correct as one does."""
    keep_context(database, prepared.key, V2, (2.0,), 1.0)
    keep_run(database, prepared.key, V2, ["a"], (4e-6,), (1e-6,))
    operators = [op.name for op in prepared.graph.operators]

    def of_others(*keys):
        ran = [[key] for key in keys]
        return kernel_factors(database, prepared.key, V2, [[n] for n in operators[: len(ran)]], ran=ran)[-1]

    assert of_others("a", "d") == pytest.approx(2.0, rel=1e-4)
    keep_run(database, prepared.key, V2, ["b"], (1.5,), (1.0,))
    assert of_others("a", "b", "d") == pytest.approx(2.0 * 1.7 / 2.2, rel=1e-4)
    assert of_others("a", "a", "b", "b", "b", "d") == pytest.approx(of_others("a", "b", "d"))


def test_hope_and_correction_leave_no_kernel_faster_than_alone(prepared, database):
    keep_context(database, prepared.key, V2, (1.1,), 1.0)
    keep_run(database, prepared.key, V2, ["a"], (0.5,), (1.0,))
    keep_context(database, prepared.key, V3, (0.9,), 1.0)
    for device, least in ((V2, 1.0), (V3, 0.9)):  # unless the model as a whole was
        for hopeful in (False, True):
            names = [[prepared.graph.operators[0].name]]
            found = kernel_factors(database, prepared.key, device, names, ran=[["d"]], hopeful=hopeful)
            assert least <= found[0] <= 1.1
        assert found == pytest.approx([least])


@pytest.mark.parametrize(("slowdown", "stages"), [(1.02, 2), (10.0, 1)])
def test_one_device_alone_where_together_they_are_slower(prepared, database, slowdown, stages):
    keep(database, prepared, 1.0, slowdown)
    plan = best_plan(prepared, TWO, database, THROUGHPUT)
    one = best_plan(prepared, cpus(v2=0, v3=1), database, THROUGHPUT)
    assert len(plan.stages) == stages
    assert plan.cluster_key == TWO.content_hash()
    assert plan.period_s == one.period_s if stages == 1 else plan.period_s < one.period_s
    assert plan.lower_bound <= plan.objective_value
    lib = tvmhet.build(prepared.model, cluster=TWO, plan=plan)
    lib.close()


def test_a_plan_of_one_device_is_never_priced_as_if_all_worked():
    """The fake planner's best of both is one device at 1.0 s, which takes 1.2 s by itself."""

    def plan(cluster):
        made = tvmhet.plan(tvmhet.from_torch(*SMALL_MODELS["conv"]()), cluster=cpus(v2=0, v3=1))
        value = 1.0 if cluster == TWO else 1.2 if cluster.counts()[V3.name] else 3.0
        return replace(made, objective_value=value, lower_bound=value, status="optimal")

    best = best_or_alone(TWO, [V2.name, V3.name], plan)
    assert (best.objective_value, best.lower_bound, best.status) == (1.2, 1.0, "feasible")
    assert best_or_alone(TWO, [], plan).objective_value == 1.0


def test_one_device_alone_where_all_together_keep_no_limit():
    def plan(cluster):
        if cluster == TWO or cluster.counts()[V2.name]:
            raise Infeasible("deadline: none keeps it", "give more time")
        return tvmhet.plan(tvmhet.from_torch(*SMALL_MODELS["conv"]()), cluster=cluster)

    best = best_or_alone(TWO, [V2.name, V3.name], plan)
    assert {s.placement.device_type for s in best.stages} == {V3.name}
    assert best.cluster_key == TWO.content_hash()
    for slowed in ([], [V2.name]):
        with pytest.raises(Infeasible, match="none keeps it"):
            best_or_alone(TWO, slowed, plan)


def test_what_is_proved_within_the_solvers_tolerance_stays_optimal(prepared, database, monkeypatch):
    plan = best_plan(prepared, TWO, database, THROUGHPUT)
    proved = replace(plan, status="optimal", lower_bound=plan.objective_value * (1 - 5e-7))
    monkeypatch.setattr("tvmhet.choosing._plan", lambda *_: proved)
    assert best_plan(prepared, TWO, database, THROUGHPUT) == proved


def test_a_pin_is_kept_where_another_device_alone_would_be_better(prepared, database):
    keep(database, prepared, 1.0, 10.0)
    name = prepared.graph.operators[0].name
    plan = best_plan(prepared, TWO, database, replace(THROUGHPUT, pin={name: V2.name}))
    (where,) = {s.placement.device_type for s in plan.stages if name in s.placement.ops}
    assert where == V2.name


def test_latency_does_not_ask_for_company(prepared, database):
    wanted = replace(THROUGHPUT, objective=Objective.LATENCY)
    before = best_plan(prepared, TWO, database, wanted).objective_value
    keep(database, prepared, 1.0, 10.0)
    assert best_plan(prepared, TWO, database, wanted).objective_value == before


@pytest.mark.slow
def test_every_device_of_the_machine_is_measured_at_work_together(prepared, database):
    """Real runs of a small model; the measured factors are then those that plans use."""
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    campaign = Campaign(prepared, candidates, database, TWO, Objective.THROUGHPUT)
    report = ProfileReport()
    alone = {d.name: TWO.with_counts({t: int(t == d.name) for t in TWO.counts()}) for d in TWO.device_types()}
    with Profiler(prepared, candidates, database) as profiler:
        campaign._measure_context(profiler, {d.name: d for d in TWO.device_types()}, alone, report)
    assert not report.failed
    assert report.factors.keys() == report.together.keys() == {V2.name, V3.name}
    assert all(0.05 < factor < 20 for factor in (*report.factors.values(), *report.together.values()))
    assert "while all devices work" in str(report)


def test_rewrites_are_priced_where_the_model_was_run(database):
    """Copies of operators, which the run did not have, are numbered otherwise than the model's own."""
    attention = prepare(tvmhet.from_torch(*SMALL_MODELS["attention"]()))
    names = [op.name for op in attention.graph.operators]
    for device in TWO.device_types():
        keep_context(database, attention.key, device, (1.2,), 1.0)
        keep_operators(database, attention.key, device, [(n,) for n in names], [1.2] * len(names), [1.0] * len(names))
    wanted, one = replace(THROUGHPUT, objective=Objective.LATENCY, kinds=KINDS), cpus(v2=0, v3=1)
    with closing(MeasuredKernels(database.path.with_name("none.db"))) as nothing:
        plain = best_plan(attention, one, nothing, wanted)
    plan = best_plan(attention, one, database, wanted)
    assert sorted(plan.stages[0].placement.ops) == sorted(plain.stages[0].placement.ops)
    assert plan.stages[0].compute_s == pytest.approx(1.2 * plain.stages[0].compute_s)
