"""What to measure: the belief is the textbook's, the budget holds, what cannot change the choice is not paid for."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet.cost.table import SOURCES, TimeTable
from tvmhet.errors import BadInput
from tvmhet.recommending.belief import LEARNED, ROOFLINE, Belief
from tvmhet.recommending.measurements import Measured, read_measurements, with_measured
from tvmhet.recommending.measuring import Prices, choose_measurements, value_of
from tvmhet.recommending.uncertainty import KernelBelief

TYPES = ("a", "b", "c")


def belief(kernels=3, sigma=0.3, seconds=1e-3):
    rows = [KernelBelief(seconds, sigma, t, "linear", f"k{k}", "learned") for t in TYPES for k in range(kernels)]
    return Belief.of(rows)


def prices(start=0.1, per_h=(1.0, 1.0, 1.0)):
    return Prices(dict.fromkeys(TYPES, start), {t: p / 3600 for t, p in zip(TYPES, per_h, strict=True)})


def values_of(made, price):
    """Cost of running all kernels on each type."""

    def values(errors):
        rows = []
        for t in TYPES:
            total = sum(made.seconds[p] * np.exp(errors[p]) for p in made.pairs if p[0] == t)
            rows.append(price[t] * total)
        return np.stack(rows)

    return values


def test_conditioning_is_the_textbook_formula():
    made = belief(kernels=2)
    i, pair = 0, made.pairs[0]
    after = made.after(pair, made.seconds[pair] * 1.5)
    gain = made.cov[:, i] / (made.cov[i, i] + 1e-4)
    np.testing.assert_allclose(after.mean, gain * math.log(1.5))
    np.testing.assert_allclose(after.cov, made.cov - np.outer(gain, made.cov[i]))
    assert after.cov[i, i] < 0.01 * made.cov[i, i]
    assert pair in after.measured


@pytest.mark.parametrize(("source", "parts"), [("roofline", ROOFLINE), ("learned", LEARNED)])
def test_a_result_tells_about_the_kernel_on_other_types_and_about_its_type(source, parts):
    """Of types a, b and c the first two are of one generation."""
    rows = [KernelBelief(1e-3, 0.3, t, "linear", f"k{k}", source) for t in TYPES for k in range(2)]
    made = Belief.of(rows, {"a": "8.0", "b": "8.0", "c": "9.0"})
    after = made.after(("a", "k0"), 2e-3)
    mean = {p: m / math.log(2) for p, m in zip(after.pairs, after.mean, strict=True)}
    assert math.fsum(dataclasses.astuple(parts)) == pytest.approx(1.0)
    own_type = parts.everything + parts.generation + parts.device_type + parts.family
    twin = parts.everything + parts.generation + parts.kernel + parts.twin
    expected = {
        ("a", "k0"): 1.0, ("b", "k0"): twin, ("c", "k0"): parts.everything + parts.kernel,
        ("a", "k1"): own_type, ("b", "k1"): parts.everything + parts.generation, ("c", "k1"): parts.everything,
    }  # fmt: skip
    assert mean == pytest.approx(expected, rel=0.01)
    assert max(own_type, twin) < 1
    alone = Belief.of(rows).after(("a", "k0"), 2e-3)  # no generations known: each type its own
    assert alone.mean[made.pairs.index(("b", "k0"))] == pytest.approx(after.mean[made.pairs.index(("c", "k0"))])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(TYPES), st.integers(0, 3), st.sampled_from(SOURCES)), min_size=1))
def test_whatever_is_known_of_kernels_makes_a_covariance(rows):
    known = [KernelBelief(1e-3, 0.3, t, f"family {k % 2}", f"k{k}", source) for t, k, source in rows]
    made = Belief.of(known, {"a": "8.0", "b": "8.0"})
    np.testing.assert_allclose(made.cov, made.cov.T)
    np.testing.assert_allclose(np.diag(made.cov), 0.09)
    assert np.linalg.eigvalsh(made.cov).min() > -1e-12


def test_what_was_measured_before_shares_no_error():
    rows = [KernelBelief(1e-3, 0.3, "a", "linear", f"k{k}", "measured" if k == 0 else "learned") for k in range(2)]
    after = Belief.of(rows).after(("a", "k0"), 2e-3)
    assert after.mean[0] > 0 == after.mean[1]


def test_draws_have_the_beliefs_moments():
    made = belief(kernels=1).after(("a", "k0"), 1.3e-3)
    drawn = made.draw(np.random.default_rng(0), 50000)
    sample = np.stack([drawn[p] for p in made.pairs])
    np.testing.assert_allclose(sample.mean(axis=1), made.mean, atol=0.005)
    np.testing.assert_allclose(np.cov(sample), made.cov, atol=0.003)


def test_nothing_is_measured_where_nothing_can_change():
    made = belief(sigma=0.05)
    campaign = choose_measurements(made, prices(), 10.0, values_of(made, {"a": 1.0, "b": 3.0, "c": 3.0}))
    assert campaign.choices == () and "would not change" in campaign.reason


def test_the_hopeless_type_is_not_measured():
    made = belief()
    campaign = choose_measurements(made, prices(), 10.0, values_of(made, {"a": 1.0, "b": 1.02, "c": 9.0}))
    assert campaign.choices and {c.device_type for c in campaign.choices} <= {"a", "b"}


def test_of_two_alike_the_cheap_one_is_measured_first():
    made = belief()
    campaign = choose_measurements(made, prices(0.0, (10.0, 1.0, 1.0)), 1.0, values_of(made, dict.fromkeys(TYPES, 1.0)))
    assert campaign.choices[0].device_type != "a"


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 0.3), st.integers(0, 99))
def test_the_budget_is_never_exceeded(budget, seed):
    made = belief()
    rng = np.random.default_rng(seed)
    true = {p: 1e-3 * float(rng.lognormal(0, 0.3)) for p in made.pairs}
    campaign = choose_measurements(
        made, prices(), budget, values_of(made, dict.fromkeys(TYPES, 1.0)), result=true.__getitem__, seed=seed
    )
    assert campaign.usd <= budget * (1 + 1e-12)
    started = {}
    for c in campaign.choices:  # by the time it took; a type's first measurement pays for its machine
        assert c.seconds == true[c.device_type, c.key]
        assert c.usd == pytest.approx(prices().usd(c.device_type, c.seconds, c.device_type in started))
        started[c.device_type] = True
    assert len({(c.device_type, c.key) for c in campaign.choices}) == len(campaign.choices)


@pytest.mark.parametrize("seed", range(10))
def test_with_enough_money_the_best_is_found(seed):
    made = belief()
    rng = np.random.default_rng(seed)
    true = {p: 1e-3 * float(rng.lognormal(0, 0.3)) for p in made.pairs}
    values = values_of(made, dict.fromkeys(TYPES, 1.0))
    campaign = choose_measurements(made, prices(), 100.0, values, result=true.__getitem__, seed=seed)
    mean = dict(zip(made.pairs, campaign.belief.mean, strict=True))
    guess = values({p: np.array([mean[p]]) for p in made.pairs})[:, 0]
    exact = values({p: np.array([math.log(true[p] / made.seconds[p])]) for p in made.pairs})[:, 0]
    assert exact[guess.argmin()] <= 1.03 * exact.min()


@given(st.integers(0, 1000))
def test_knowing_more_is_never_worth_less_than_nothing(seed):
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(1, 2, (3, 64))
    assert 0 <= value_of(rng.normal(size=64), drawn) <= drawn.mean(axis=1).min() - drawn.min(axis=0).mean() + 1e-12


def test_results_come_back_from_a_file(tmp_path):
    path = tmp_path / "back.jsonl"
    path.write_text(
        '{"device": "t4", "kernel": "x", "seconds": 0.002}\n\n{"device": "t4", "kernel": "y", "seconds": null}\n'
    )
    assert read_measurements(path) == (Measured("t4", "x", 0.002),)
    table = with_measured(TimeTable.empty(3, ["t4"]), ["x", "y", "x"], read_measurements(path))
    assert [table.entry(k, "t4").source for k in range(3)] == ["measured", "none", "measured"]
    assert table.entry(2, "t4").seconds == 0.002


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seconds", "back.jsonl:1: not JSON"),
        ('{"device": "t4", "kernel": "x", "seconds": null}', "no line has seconds"),
        ('{"device": "t4"}', "back.jsonl:1: no device and kernel"),
        ('{"device": "t4", "kernel": "x", "seconds": -1}', "back.jsonl:1: seconds is -1"),
        ('{"device": "t4", "kernel": "x", "seconds": true}', "back.jsonl:1: seconds is True"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "back.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadInput, match=said):
        read_measurements(path)


def test_a_kernel_of_another_model_is_refused():
    with pytest.raises(BadInput, match="'z' is none of this model's 1 candidates"):
        with_measured(TimeTable.empty(1, ["t4"]), ["x"], [Measured("t4", "z", 1.0)])
