"""cost/learned_cpu: what measured kernels of some models say of kernels of others."""

import math

import numpy as np
import pytest

from tvmhet.cost.cpu_inputs import INPUTS, rows, usual_s
from tvmhet.cost.cpu_pool import drawn
from tvmhet.cost.learned_cpu import MIN_KERNELS, LearnedFirst, MeasuredKernel, learn
from tvmhet.cost.model import OpDesc, from_text, to_text
from tvmhet.cost.predict import Assumed
from tvmhet.cost.record import record_of
from tvmhet.cost.roofline import Efficiency, Roofline
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput

POOL = drawn(700)
SIZES = (0.0, 20e6, 80e6)  # bytes of the models that the kernels were measured inside


def truth_s(desc, inside_bytes):
    """A made-up core: a call, a third of the peak, less where a side leaves a vector partly empty; colder inside a
    model of 20 MB, colder still inside one of 80.
    """
    sizes = desc.root.sizes
    waste = math.ceil(sizes[-1] / 16) * 16 / sizes[-1]
    busy = desc.flop / 30e9 * waste + (desc.read_bytes + desc.write_bytes) / 9e9
    return 4e-6 + busy * (1.0 + inside_bytes / 80e6)


def measured(descs):
    return [MeasuredKernel(d, truth_s(d, inside), inside) for d in descs for inside in SIZES]


@pytest.fixture(scope="module")
def model(cpu):
    return learn(cpu, measured(POOL[:500]))


def test_kernels_that_were_never_measured(model):
    unseen = POOL[500:]
    assert not set(unseen) & set(POOL[:500])
    seconds = [model.predict_s(unseen, inside_bytes=inside) for inside in SIZES]
    for inside, found in zip(SIZES, seconds, strict=True):
        error = found / [truth_s(d, inside) for d in unseen] - 1
        assert np.median(np.abs(error)) < 0.1
    assert np.median(seconds[1] / seconds[0]) == pytest.approx(1.2, abs=0.1)
    assert np.median(seconds[2] / seconds[0]) == pytest.approx(1.8, abs=0.2)


def test_weights_of_a_larger_model_come_from_farther_away(cpu):
    """Of a vector times a matrix all but the call grows; of an element-wise kernel nothing does."""
    product = kernel_of(OpDesc("linear", (1, 1, 512, 512), "float32"), "tvm")
    other = kernel_of(OpDesc("elementwise", (2048, 1024), "float32", "add"), "tvm")
    usual = np.array([usual_s(cpu, [product, other], np.full(2, b)) for b in (0.0, 4e6, 32e6, 64 << 20, 1e9)])
    assert (np.diff(usual[:, 0]) >= 0).all() and usual[-1, 0] > 1.5 * usual[1, 0] and usual[-1, 0] == usual[-2, 0]
    assert (usual[:, 1] == usual[0, 1]).all()


def test_the_library_walks_through_windows_value_by_value(cpu):
    """Beyond a mean of whole images of the same sizes; a generated kernel takes what it takes."""

    def beyond_s(side, maker):
        sizes = (8, 512, 24, 24, side, side, 24, 24)
        names = "avg_pool2d", "adaptive_avg_pool2d"
        walk, mean = usual_s(
            cpu, [kernel_of(OpDesc("pooling", sizes, "float32", n), maker) for n in names], np.zeros(2)
        )
        return walk - mean

    num_values = 8 * 512 * 24 * 24 * 9
    assert 0.5e-9 < beyond_s(3, "library") / num_values < 5e-9
    assert beyond_s(6, "library") == pytest.approx(4 * beyond_s(3, "library"))
    assert beyond_s(6, "tvm") == 0.0


def test_the_interval_holds_most_of_what_was_left_out(model):
    unseen = [d for d in POOL[500:] if model.knows(d)]
    ends = [model.interval(d) for d in unseen]
    seconds = model.predict_s(unseen, inside_bytes=SIZES[2])
    held = [lo <= truth_s(d, SIZES[2]) / s <= hi for d, s, (lo, hi) in zip(unseen, seconds, ends, strict=True)]
    assert all(lo <= 1 <= hi for lo, hi in ends)
    assert 0.65 < np.mean(held) < 0.95


def test_the_same_measurements_give_the_same_model(model, cpu):
    again = learn(cpu, measured(POOL[:500]))
    assert (again.predict_s(POOL) == model.predict_s(POOL)).all() and again.spread == model.spread


def test_alone_or_in_a_batch(model):
    assert model.predict_s(POOL[:5]).tolist() == [float(model.predict_s([d])[0]) for d in POOL[:5]]
    assert model.predict_s([]).shape == (0,)


def test_kinds_that_were_not_measured_are_not_known(model):
    generated = [d for d in POOL if d.root.family == "conv2d"]
    assert model.knows(generated[0])
    text = to_text(generated[0]).replace('"library"', '"tvm"')
    assert not model.knows(from_text(text))


def test_too_few_to_learn_from(cpu):
    with pytest.raises(BadInput, match=rf"{MIN_KERNELS - 1} measured kernels of 'cpu-test'"):
        learn(cpu, [MeasuredKernel(d, 1e-3, 0.0) for d in POOL[: MIN_KERNELS - 1]])


def test_rows_are_finite_where_a_kernel_has_the_figure(cpu):
    alone = np.zeros(len(POOL))
    table = rows(cpu, POOL, alone)
    assert table.shape == (len(POOL), len(INPUTS)) and not np.isinf(table).any()
    assert np.isfinite(table[:, : INPUTS.index("log_m")]).all()
    assert (usual_s(cpu, POOL, alone) > 0).all()


@pytest.mark.parametrize(
    ("column", "changed"),
    [("panels", ('"panels": false', '"panels": true')), ("dilation", ('"name": ""', '"name": "dilated 3"'))],
)  # fmt: skip
def test_what_tells_kernels_of_equal_sizes_apart(cpu, column, changed):
    desc = next(d for d in POOL if d.root.family == "conv2d" and not d.root.name)
    other = from_text(to_text(desc).replace(*changed))
    table = rows(cpu, [desc, other], np.zeros(2))
    differ = ~np.isclose(table[0], table[1], equal_nan=True)
    assert [INPUTS[i] for i in np.flatnonzero(differ)] == [column]


def test_text_and_back():
    assert all(from_text(to_text(d)) == d for d in POOL)
    with pytest.raises(BadInput, match="describes no kernel"):
        from_text('{"ops": 3}')


def test_drawn_kernels_can_be_timed_and_do_not_depend_on_their_number():
    assert len(set(POOL)) == len(POOL) and drawn(50) == POOL[:50]
    assert all(record_of(d)["op"] for d in POOL)


def test_kinds_that_were_measured_are_learned_and_others_left_to_the_other_model(cpu, model):
    other = Assumed(cpu, Roofline(cpu, Efficiency.load()))
    descs = [POOL[600], kernel_of(OpDesc("embedding", (64, 1000, 256), "float32"), "tvm")]
    found, plain = LearnedFirst(model, other, inside_bytes=0.0).predict(descs), other.predict(descs)
    assert found.source == ("learned", "assumed")
    assert found.seconds[0] == model.predict_s(descs[:1], inside_bytes=0)[0]
    assert found.seconds[1] == plain.seconds[1]
    assert LearnedFirst(model, other, inside_bytes=80e6).predict(descs).seconds[0] > found.seconds[0]


def test_range_is_that_of_the_measured_kernels_of_the_kind(model):
    assert model.in_range(POOL[10])
    assert not model.in_range(kernel_of(OpDesc("linear", (1, 1 << 20, 1 << 14, 1 << 14), "float32")))
    assert not model.in_range(kernel_of(OpDesc("embedding", (64, 1000, 256), "float32")))
