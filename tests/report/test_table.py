"""Tables as people read them: golden texts, and what must hold for any plan."""

import dataclasses

import pytest

from tests.report.plans import measured, stage, two_stages, whole
from tvmhet.errors import PlanMismatch
from tvmhet.report.table import benchmark_to_text, kernels_to_text, plan_to_text, plan_view
from tvmhet.report.text import to_text


def test_plan(golden):
    golden("report_plan.txt", plan_to_text(two_stages()))


def test_str_of_a_plan_is_its_table():
    assert str(two_stages()) == plan_to_text(two_stages())


def test_whole_plan_says_unknown_and_why(golden):
    golden("report_plan_whole.txt", plan_to_text(whole()))


def test_kernels(golden):
    golden("report_kernels.txt", kernels_to_text(two_stages(), 0))


def test_kernels_of_no_such_stage():
    with pytest.raises(IndexError):
        kernels_to_text(two_stages(), 2)


def test_benchmark(golden):
    golden("report_benchmark.txt", benchmark_to_text(two_stages(), measured(("node0/t4:0",))))


def test_benchmark_of_a_whole_plan_compares_with_nothing():
    one = dataclasses.replace(measured(), stages=measured().stages[:1], stages_streamed=measured().stages_streamed[:1])
    text = benchmark_to_text(whole(), one)
    assert "unknown" in text and "25.2 ms" in text
    assert "inf" not in text and "nan" not in text


def test_benchmark_of_another_plan_is_refused():
    with pytest.raises(PlanMismatch, match=r"stages \[0\].*stages \[0, 1\]"):
        benchmark_to_text(whole(), measured())


def test_optimal_plan_claims_no_gap():
    period_s = two_stages().period_s
    text = plan_to_text(two_stages(status="optimal", lower_bound=period_s))
    assert "optimal" in text and "gap" not in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_fit_the_width_and_carry_no_codes(width):
    for text in (
        plan_to_text(two_stages(), width),
        kernels_to_text(two_stages(), 0, width),
        benchmark_to_text(two_stages(), measured(("a" * 40, "b" * 40)), width),
    ):
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())


def test_colour_only_where_asked_for():
    assert "\x1b[" in to_text(plan_view(two_stages()), 100, colour=True)


def test_names_are_not_markup():
    odd = stage(0, [("k", ["[bold]a[/]", ":smile:"], "tvm")], "t4", ["t4:0"], [(0.001, "measured")], ["x"], ["y"])
    text = plan_to_text(two_stages(stages=(odd,), timeline=()))
    assert "[bold]a[/] … :smile:" in text


def test_the_slowest_stage_is_fully_busy():
    lines = plan_to_text(two_stages()).splitlines()
    assert "100 %" in next(line for line in lines if "2 x v100" in line and line.lstrip().startswith("0"))


def test_a_benchmark_of_estimates_says_so():
    assert "18 % of the predicted time is an estimate" in benchmark_to_text(two_stages(), measured())
    known = tuple(
        dataclasses.replace(s, predictions=tuple(dataclasses.replace(p, source="measured") for p in s.predictions))
        for s in two_stages().stages
    )
    assert "an estimate" not in benchmark_to_text(two_stages(stages=known), measured())


def test_a_run_of_a_plan_for_several_machines_says_that_it_was_on_one():
    first, second = two_stages().stages
    assert "machines" not in benchmark_to_text(two_stages(), measured())
    elsewhere = dataclasses.replace(second.placement, devices=("node1/t4:0",))
    stages = (first, dataclasses.replace(second, placement=elsewhere))
    text = " ".join(benchmark_to_text(two_stages(stages=stages), measured()).split())
    assert "the plan is for 2 machines (node0, node1); all of it ran on this one" in text


def test_a_notebook_gets_the_text_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert plan_to_text(two_stages()).startswith("plan of resnet_toy")
