"""The benchmark of what errors share, on errors whose sharing is known."""

import numpy as np
import pytest

from benchmarks.inferring import corrected, shared

NAMES = ["h100-sxm-80gb", "h200-sxm-141gb", "l4"]


def errors(kernel, twin, own, rng):
    """Log errors of 500 kernels on three types, the first two of one compute capability."""
    shape = (3, 500)
    twins = rng.normal(0, twin, shape)
    twins[1] = twins[0]
    return rng.normal(0, kernel, shape[1]) + twins + rng.normal(0, own, shape)


def test_correlations_are_those_that_the_errors_were_made_with():
    twins, others, types = shared(NAMES, errors(0.3, 0.2, 0.1, np.random.default_rng(0)))
    assert twins == pytest.approx([0.13 / 0.14], abs=0.03)
    assert others == pytest.approx([0.09 / 0.14] * 2, abs=0.08)
    assert types < 0.01


def test_what_is_shared_is_corrected_and_what_is_not_stays_about_as_it_was():
    rng = np.random.default_rng(1)
    bias = errors(0.0, 0.0, 0.1, rng) + np.array([0.4, 0.4, -0.3])[:, None]
    same, same_after, _, _ = corrected(NAMES, bias, "learned")
    assert same_after < 0.8 * same
    _, _, other, other_after = corrected(NAMES, errors(0.4, 0.1, 0.05, rng), "roofline")
    assert other_after < 0.95 * other
    figures = corrected(NAMES, errors(0.0, 0.0, 0.2, rng), "learned")
    assert figures[1] < 1.1 * figures[0] and figures[3] < 1.05 * figures[2]
