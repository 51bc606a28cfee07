"""What a step would take without waiting for cores, replayed from its measured passes."""

from itertools import combinations_with_replacement
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.training import even_cuts, step_s
from tvmhet.runtime.training_engine import PassTime
from tvmhet.runtime.training_program import Action


def waits_for(action):
    """Two stages, a and b."""
    if not action.backward:
        return (Action(False, 0, action.microbatch),) * (action.stage == 1)
    first = (Action(False, action.stage, action.microbatch),)
    return (*first, Action(True, 1, action.microbatch)) if action.stage == 0 else first


PROGRAM = SimpleNamespace(devices=("a", "b"), waits_for=waits_for)
F0, B0, F1, B1 = (Action(back, k, 0) for k in (0, 1) for back in (False, True))


def test_waits_inside_passes_and_before_them_are_left_out():
    """Passes of 1, 2, 3 and 4 s, updates of 1 s; b begins 0.3 s after a's first pass, and 0.2 s more without a core."""
    calm = [
        PassTime("a", F0, 10.0, 11.0, 0.0, 0.0),
        PassTime("b", F1, 11.3, 13.3, 0.0, 0.0),
        PassTime("b", B1, 13.3, 16.3, 0.0, 0.0),
        PassTime("b", None, 16.3, 17.3, 0.0, 0.0),
        PassTime("a", B0, 16.3, 20.3, 0.0, 0.0),
        PassTime("a", None, 20.3, 21.3, 0.0, 0.0),
    ]
    assert step_s(PROGRAM, calm) == pytest.approx(11.3)
    hindered = [
        PassTime("a", F0, 10.0, 11.0, 0.0, 0.0),
        PassTime("b", F1, 11.5, 18.5, 5.0, 0.2),
        PassTime("b", B1, 18.5, 21.5, 0.0, 0.0),
        PassTime("b", None, 21.5, 25.5, 3.0, 0.0),  # hides behind a's backward pass
        PassTime("a", B0, 22.5, 26.5, 0.0, 1.0),
        PassTime("a", None, 26.5, 27.5, 0.0, 0.0),
    ]
    assert step_s(PROGRAM, hindered) == pytest.approx(11.3)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_make_the_longest_stage_shortest(seed):
    seconds = np.random.default_rng(seed).uniform(0.1, 1.0, (7, 3))

    def longest(ends):
        return max(seconds[a:b, k].sum() for k, (a, b) in enumerate(zip([0, *ends], ends, strict=False)))

    ends = even_cuts(seconds)
    assert ends[-1] == 7 and ends == sorted(ends)
    best = min(longest([*cuts, 7]) for cuts in combinations_with_replacement(range(8), 2))
    assert longest(ends) == pytest.approx(best)
