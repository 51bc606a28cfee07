"""Graphviz text: the stages, what passes between them, and names that need quoting."""

import pydot
import pytest

from tests.report.plans import stage, two_stages, whole
from tvmhet.report.dot import plan_to_dot


def odd_names():
    kernels = [("k", ['a"]; b [label="', "c\\"], "tvm")]
    odd = stage(0, kernels, "t4", ["t4:0"], [(0.001, "measured")], ['x"\ny'], ["z\\"])
    return two_stages(model='m"{', stages=(odd,))


def test_stages_and_edges(golden):
    golden("report_plan.dot", two_stages().to_dot())


@pytest.mark.parametrize("make", [two_stages, whole, odd_names])
def test_a_parser_of_the_language_reads_what_is_there(make):
    plan = make()
    (graph,) = pydot.graph_from_dot_data(plan_to_dot(plan))
    nodes = {n.get_name() for n in graph.get_nodes()} - {"node", "edge"}  # these two are defaults
    assert nodes == {"inputs", "outputs", *(f"stage{s.index}" for s in plan.stages)}
    ends = {end for e in graph.get_edges() for end in (e.get_source(), e.get_destination())}
    assert ends == nodes
    assert len(graph.get_edges()) == plan_to_dot(plan).count(" -> ")


def test_sizes_are_shown_where_all_are_known():
    known = plan_to_dot(two_stages(), {"h": 2**20, "skip": 2**21})
    assert r'stage0 -> stage1 [label="h\nskip\n3.0 MiB"]' in known
    assert 'MiB"]' not in plan_to_dot(two_stages(), {"h": 2**20})


def test_many_values_are_counted():
    names = [f"v{i}" for i in range(5)]
    one = stage(0, [("k", ["a"], "tvm")], "t4", ["t4:0"], [(0.001, "measured")], names, ["y"])
    assert r'[label="v0\nv1\nv2\n2 more"]' in plan_to_dot(two_stages(stages=(one,)))
