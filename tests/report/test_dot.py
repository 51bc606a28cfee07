"""Graphviz text: the stages, what passes between them, and names that need quoting."""

import re
import shutil
import subprocess

import pytest

from tests.report.plans import stage, two_stages, whole
from tvmhet.report.dot import plan_to_dot

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_ATTRS = rf"\[(?:\w+=(?:{_STRING}|\w+)(?:, )?)+\]"
_STATEMENTS = [rf"digraph {_STRING} {{", r"\w+=\w+;", rf"label={_STRING};", rf"\w+ {_ATTRS};", rf"\w+ -> \w+ {_ATTRS};"]


def assert_grammar(text):
    """Check each line against the part of Graphviz's grammar that a plan uses."""
    *statements, end = text.splitlines()
    assert end == "}"
    for line in statements:
        assert any(re.fullmatch(s, line.strip()) for s in _STATEMENTS), line


def odd_names():
    kernels = [("k", ['a"]; b [label="', "c\\"], "tvm")]
    odd = stage(0, kernels, "t4", ["t4:0"], [(0.001, "measured")], ['x"\ny'], ["z\\"])
    return two_stages(model='m"{', stages=(odd,))


def test_stages_and_edges(golden):
    golden("report_plan.dot", two_stages().to_dot())


@pytest.mark.parametrize("make", [two_stages, whole, odd_names])
def test_grammar(make):
    assert_grammar(plan_to_dot(make()))


@pytest.mark.parametrize("make", [two_stages, whole, odd_names])
def test_graphviz_takes_it(make):
    if shutil.which("dot") is None:
        pytest.skip("Graphviz's dot is not on this machine")
    run = subprocess.run(["dot", "-Tplain"], input=plan_to_dot(make()), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert run.stdout.count("\nnode ") == len(make().stages) + 2


def test_sizes_are_shown_where_all_are_known():
    known = plan_to_dot(two_stages(), {"h": 2**20, "skip": 2**21})
    assert r'stage0 -> stage1 [label="h\nskip\n3.0 MiB"]' in known
    assert 'MiB"]' not in plan_to_dot(two_stages(), {"h": 2**20})


def test_many_values_are_counted():
    names = [f"v{i}" for i in range(5)]
    one = stage(0, [("k", ["a"], "tvm")], "t4", ["t4:0"], [(0.001, "measured")], names, ["y"])
    assert r'[label="v0\nv1\nv2\n2 more"]' in plan_to_dot(two_stages(stages=(one,)))
