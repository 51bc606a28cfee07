"""The training scripts: what is left out is left out, splits do not depend on the device, and bytes repeat."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.columns import columns
from tvmhet.cost.dram import DramShares
from tvmhet.cost.model import OpDesc
from tvmhet.cost.physics import Scalars, constants, estimate
from tvmhet.cost.workload import kernel_of

TYPES = ("p4", "t4", "v100-pcie-32gb")
SCRIPTS = Path(__file__).parent.parent.parent / "cost_models"
TRUE = Scalars(launch_s=3e-5, compute=0.6, sustained=0.6, dram=0.7, cache=1.5, load=40.0)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of cost_models/, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import datasets
    import fitting
    import train

    return SimpleNamespace(datasets=datasets, fitting=fitting, train=train)


def samples(datasets: ModuleType, slowdown: float = 1.0) -> dict[str, object]:
    """Softmax times that the analytic model makes, with a bump that only trees can learn; the V100's are slowed."""
    rng = np.random.default_rng(1)
    shapes = np.exp(rng.uniform(np.log(4), np.log(8192), (1500, 2))).astype(int).tolist()
    (table,) = columns([kernel_of(OpDesc("softmax", tuple(s), "float32", "softmax")) for s in shapes]).values()
    bump = np.where(table.sizes[:, 1] > 500, 1.4, 1.0)
    found = {}
    for name in TYPES:
        seconds = bump * estimate(table, device_type(name), TRUE, constants()).seconds
        found[name] = datasets.Sample(table, seconds * (slowdown if name == TYPES[-1] else 1.0))
    return found


def test_the_left_out_type_leaves_no_trace(scripts: SimpleNamespace) -> None:
    def predicted(slowdown: float) -> tuple[np.ndarray, np.ndarray]:
        data = samples(scripts.datasets, slowdown)
        fits = {n: scripts.fitting.fit_device(s, n) for n, s in data.items()}
        *_, last = scripts.fitting.leave_one_out("softmax", data, fits, "held_out", DramShares())
        assert last.device == TYPES[-1]
        return last.predicted, last.measured

    (normal, measured), (slowed, three_times) = predicted(1.0), predicted(3.0)
    np.testing.assert_array_equal(normal, slowed)
    np.testing.assert_allclose(three_times, 3 * measured)
    assert np.mean(np.abs(normal / measured - 1)) < 0.05


def test_long_streams_show_what_dram_gives(scripts: SimpleNamespace) -> None:
    """The fixed cost of a call and what fits into L2 are no part of the share; too few long rows show nothing."""
    t4, moved = device_type("t4"), np.geomspace(1e5, 1e9, 400)
    seconds = np.where(moved < t4.l2_bytes, moved / 1e12, moved / (0.75 * t4.dram_byte_per_s)) + 2e-5
    few = {("p4", "mine"): (moved[-20:], seconds[-20:])}
    found = scripts.fitting.dram_shares({("t4", "mine"): (moved, seconds), **few})
    assert found.known.keys() == {"t4"} and found.known["t4"] == pytest.approx(0.75, rel=1e-6)
    twice = {("t4", "other"): (moved, seconds * 0.5)}
    both = scripts.fitting.dram_shares({("t4", "mine"): (moved, seconds), **twice})
    assert both.known["t4"] == pytest.approx((0.75 + 1.5) / 2, rel=1e-6)


def test_the_same_shapes_are_held_out_on_every_type_and_in_any_order(scripts: SimpleNamespace) -> None:
    sample = samples(scripts.datasets)["t4"]
    held = scripts.fitting.held_out(sample)
    order = np.random.default_rng(0).permutation(len(held))
    np.testing.assert_array_equal(scripts.fitting.held_out(sample.take(order)), held[order])
    assert 0.2 < held.mean() < 0.3


def test_an_interval_holds_what_it_says(scripts: SimpleNamespace) -> None:
    rng = np.random.default_rng(2)
    ratio, share = np.exp(rng.normal(0.0, 0.2, 9000)), rng.uniform(0, 1, 9000)
    held = scripts.fitting.HeldOut("t4", np.ones(9000), ratio, share, np.arange(9000))
    low, high = scripts.fitting.interval([held]).factors(share)
    assert np.mean((ratio >= low) & (ratio <= high)) == pytest.approx(0.8, abs=0.01)


def test_few_types_ask_for_wider_intervals(scripts: SimpleNamespace) -> None:
    """Types with a bias each, drawn from one distribution: a new one's rows lie inside in four of five cases."""
    rng = np.random.default_rng(3)
    rows, inside = 200, []
    for _ in range(300):
        biases = rng.normal(0.0, 0.2, 6)
        held = [
            scripts.fitting.HeldOut(
                "t4", np.ones(rows), np.exp(b + rng.normal(0, 0.05, rows)), np.ones(rows), np.arange(rows)
            )
            for b in biases
        ]
        low, high = scripts.fitting.unseen_interval(held[:5]).factors(held[5].launch_share)
        inside.append(np.mean((held[5].ratio >= low) & (held[5].ratio <= high)))
    assert 0.72 < np.mean(inside) < 0.88


def test_products_are_held_out_by_whole_weight_shapes(scripts: SimpleNamespace) -> None:
    ops = [kernel_of(OpDesc("linear", (1, m, n, 64 * n), "float32")) for n in range(1, 80) for m in (1, 7, 512)]
    (table,) = columns(ops).values()
    held = scripts.fitting.held_out(scripts.datasets.Sample(table, np.ones(len(ops)))).reshape(79, 3)
    assert (held.all(axis=1) | (~held).all(axis=1)).all() and 0 < held.mean() < 1


@pytest.mark.shared
@pytest.mark.slow
def test_training_repeats_to_the_byte(scripts: SimpleNamespace, shared_data: Path, tmp_path: Path) -> None:
    first = scripts.train.train_group(shared_data, "norm", tmp_path / "a", DramShares())
    second = scripts.train.train_group(shared_data, "norm", tmp_path / "b", DramShares())
    assert first.sha256 == second.sha256 and dataclasses.replace(first, about={}) == dataclasses.replace(
        second, about={}
    )
    assert (tmp_path / "a" / "norm.yaml").read_bytes() == (tmp_path / "b" / "norm.yaml").read_bytes()
    assert first.about["error_percent"]["unseen_type_and_shape"]["t4"]["mean_ape"] < 30


@pytest.mark.shared
def test_the_shipped_table_of_dram_is_that_of_the_data(scripts: SimpleNamespace, shared_data: Path) -> None:
    found, shipped = scripts.fitting.dram_shares(scripts.datasets.streams(shared_data)).known, DramShares.load().known
    assert found.keys() == shipped.keys() and all(found[n] == pytest.approx(shipped[n], rel=1e-3) for n in found)


@pytest.mark.shared
def test_published_tables_are_read(scripts: SimpleNamespace, shared_data: Path) -> None:
    for group in scripts.datasets.groups():
        found = scripts.datasets.load_group(shared_data, group, every=50)
        assert len(found) >= 5, group
        for sample in found.values():
            assert len(sample) > 20 and sample.table.group == group
            assert (sample.seconds > 1e-6).all() and (sample.seconds < 20).all()


def test_a_type_faster_than_its_peak_is_left_out(scripts: SimpleNamespace) -> None:
    """Half the rows at twice the peak: no clock explains that. Convolutions may save arithmetic."""
    ops = [OpDesc("linear", (1, 4096, 4096, k), "bfloat16") for k in range(64, 1024, 64)]
    (linear,) = columns([kernel_of(op) for op in ops]).values()
    least = linear.flop / device_type("h100-sxm-80gb").peak("bfloat16")
    half = np.where(np.arange(len(least)) % 2, 0.5, 2.0)
    assert scripts.datasets.possible("h100-sxm-80gb", scripts.datasets.Sample(linear, 1.1 * least))
    assert not scripts.datasets.possible("h100-sxm-80gb", scripts.datasets.Sample(linear, half * least))


@pytest.mark.parametrize(("file", "group"), [("ops_linear", "linear_vector"), ("ops_bmm", "batched_vector")])
def test_products_are_read_as_the_recorded_thread_blocks_say(scripts, shared_data, file, group):
    """cuBLAS cuts n by the first side of a tile and m by the second, so a grid tells which sizes are the result's."""
    path = shared_data / "neusight" / f"{file}.csv.gz"
    (make,) = scripts.datasets._OPS[group]
    agree = swapped = 0
    for row in itertools.islice(scripts.datasets.read_rows(path), 3000):
        if (tile := re.search(r"sgemm_(\d+)x(\d+)_", row["kernel"])) is None:
            continue
        wide, high = (int(side) for side in tile.groups())
        _, m, n, k = make(row).sizes
        grid = (int(row["grid_x"]), int(row["grid_y"]))
        agree += grid == (-(-n // wide), -(-m // high))
        swapped += grid == (-(-k // wide), -(-m // high))
    assert agree > 2500 and agree > 2 * swapped
