"""How measured plans are compared: by the median of their rounds, the plan in every round."""

from benchmarks.plans_measured import Row, _order


def test_one_lucky_round_does_not_make_a_plan_fast():
    assert Row("m", "lucky", 1.0, (1.0, 0.5, 1.1), ()).seconds == 1.0


def test_the_plan_stays_in_every_round_and_what_is_far_off_leaves():
    seconds = {"plan": [3.0, 3.0], "near": [1.1, 1.2], "best": [1.0, 1.3], "far": [1.2, 1.4]}
    assert sorted(_order(2, seconds)) == ["best", "near", "plan"]
    assert sorted(_order(1, seconds)) == sorted(seconds)
