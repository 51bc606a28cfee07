"""Train every learned model from published measurements and write it with its card.

    python cost_models/train.py --data DIR [--out cost_models/trained] [--group NAME ...]

Deterministic: the same data and versions give the same bytes. One thread; under 30 minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import fitting
import numpy as np
import queued
import xgboost
import yaml

from tvmhet.cluster.catalog import device_type
from tvmhet.cost import across, network, shipped_cpu
from tvmhet.cost.card import Card
from tvmhet.cost.dram import DramShares


def about(data: Path, group: str, samples: Mapping[str, datasets.Sample]) -> dict[str, Any]:
    """Return what a card says of its origin."""
    files = datasets.FILES[group]
    return {
        "trained_on": {
            "sources": sorted({datasets.SOURCES[f.split("/")[0]] for f in files}),
            "files": {f: hashlib.sha256((data / f).read_bytes()).hexdigest() for f in files},
            "rows": {name: len(s) for name, s in sorted(samples.items())},
        },
        "seed": fitting.SEED,
        "versions": {"xgboost": xgboost.__version__, "numpy": np.__version__},
    }


def train_group(data: Path, group: str, out: Path, dram: DramShares) -> Card:
    """Train one group, write `<group>.ubj` and its card to `out`, and return the card."""
    samples = datasets.load_group(data, group)
    fits = {name: fitting.fit_device(sample, name) for name, sample in samples.items()}
    unseen = fitting.leave_one_out(group, samples, fits, "held_out", dram)
    booster = fitting.train_trees(samples, fits)
    model = fitting.model_of(group, booster, fits, samples)
    seen = [
        fitting.predict_rows(name, model, s, np.flatnonzero(fitting.held_out(s)), dram)
        for name, s in sorted(samples.items())
    ]
    raw = bytes(booster.save_raw("ubj"))
    card = replace(
        model.card,
        sha256=hashlib.sha256(raw).hexdigest(),
        measured=fitting.interval(seen),
        unseen=fitting.unseen_interval(unseen),
        about=about(data, group, samples)
        | {"percent_of_rows_in_interval_of_the_other_types": fitting.coverage(unseen)}
        | {
            "error_percent": {
                "unseen_type_and_shape": fitting.errors(unseen),
                "measured_type_unseen_shape": fitting.errors(seen),
            }
        },
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / card.file).write_bytes(raw)
    (out / f"{group}.yaml").write_text(card.to_yaml())
    return card


def train_network(data: Path, out: Path) -> None:
    """Fit every exchange curve and write `network.yaml`."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    links: dict[str, str] = {}
    for (name, operation, count), (sizes, seconds) in datasets.exchanges(data).items():
        device = device_type(name)
        curve = network.fit(operation, count, device.peer_byte_per_s, sizes, seconds)
        values = [float(f"{v:.4g}") for v in (curve.latency_s, curve.share, curve.sharpness, curve.error)]
        curves.setdefault(name, {}).setdefault(operation, {})[count] = values
        links[name] = network.link_class(device)
    runs, share = datasets.exchanges_across(data)
    a100 = "a100-sxm-80gb"
    inside = {n: network.Curve(*values) for n, values in curves[a100]["all_reduce"].items()}
    beyond = across.fit_across(runs, inside, device_type(a100), share)
    print(f"across nodes: {beyond}")
    files = ("aiconfigurator/nccl.csv", "aiconfigurator/h100_sxm.yaml", "vidur/network.csv.gz")
    tree = {
        "schema": 1,
        "fields": ["latency_s", "share of the link's bandwidth", "sharpness", "mean |log error| of the fit"],
        "sources": ["aiconfigurator", "vidur"],
        "files": {f: hashlib.sha256((data / f).read_bytes()).hexdigest() for f in files},
        "links": links,
        "across_fields": ["hop_s", "share of a node's network rate", "mean |log error| of the fit"],
        "across": [float(f"{v:.4g}") for v in (beyond.hop_s, beyond.share, beyond.error)],
        "curves": curves,
    }
    (out / "network.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None))
    worst = max(v[3] for ops in curves.values() for counts in ops.values() for v in counts.values())
    print(f"network: {sum(len(c) for o in curves.values() for c in o.values())} curves, worst mean error {worst:.2f}")


def train_roofline(data: Path, out: Path) -> None:
    """Fit the shares of peak that the plain roofline uses, one pair per family, and write `roofline.yaml`."""
    gpu: dict[str, dict[str, float]] = {}
    for group in datasets.groups():
        samples = datasets.load_group(data, group, every=7)
        for family in sorted({str(f) for s in samples.values() for f in np.unique(s.table.family)}):
            gpu.setdefault(family, fitting.roofline_share(samples, family))
    middle = {k: float(np.median([row[k] for row in gpu.values()])) for k in ("compute", "memory", "low", "high")}
    cpu = {"compute": 0.7, "memory": 0.7, "low": 0.5, "high": 2.5}
    rounded = {n: {k: float(f"{v:.3g}") for k, v in row.items()} for n, row in {**gpu, "default": middle}.items()}
    tree = {
        "schema": 1,
        "sources": [*datasets.SOURCES.values(), "llvm: estimate for library kernels, replaced by measured ones"],
        "shares": {"cuda": rounded, "llvm": {"default": cpu}},
    }
    (out / "roofline.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None))
    print(f"roofline: {len(gpu)} families")


def train_dram(data: Path, out: Path) -> DramShares:
    """Fit what each type's DRAM gives to streams, write `dram.yaml`, and return it."""
    rounded = {n: float(f"{s:.4g}") for n, s in fitting.dram_shares(datasets.streams(data)).known.items()}
    shares = DramShares(rounded)
    others = {n: round(shares.without({n}).of(device_type(n)), 3) for n in rounded}
    tree = {
        "schema": 1,
        "sources": sorted({datasets.SOURCES[f.split("/")[0]] for f in datasets.STREAM_FILES}),
        "files": {f: hashlib.sha256((data / f).read_bytes()).hexdigest() for f in datasets.STREAM_FILES},
        "shares": rounded,
        "inferred_without_itself": others,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "dram.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, width=120))
    print("dram: " + ", ".join(f"{n} {s:.3f} ({others[n]:.3f})" for n, s in rounded.items()))
    return shares


def main() -> None:
    """Train the groups named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published measurements")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "trained")
    parser.add_argument("--group", action="append", choices=datasets.groups(), help="train only this group")
    options = parser.parse_args()
    if not options.group:
        options.out.mkdir(parents=True, exist_ok=True)
        for measured in sorted((Path(__file__).parent / "measured").glob("cpu_*.jsonl.gz")):
            found = shipped_cpu.train(measured, options.out)
            print(f"{measured.name}: {found.num_kernels} kernels, {len(found.spread)} kinds")
        train_network(options.data, options.out)
        train_roofline(options.data, options.out)
    dram = train_dram(options.data, options.out)
    for group in options.group or datasets.groups():
        begin = time.monotonic()
        card = train_group(options.data, group, options.out, dram)
        print(f"{group}: {time.monotonic() - begin:.0f} s, {(options.out / card.file).stat().st_size / 1e6:.2f} MB")
        report(card)
    for group in options.group or queued.GROUPS:
        if group in queued.GROUPS:
            report(queued.train(group, options.out, dram))


def report(card: Card) -> None:
    """Print the errors of a trained group."""
    for kind, table in card.about["error_percent"].items():
        print(f"  {card.file} {kind}: " + ", ".join(f"{d} {e['mean_ape']}/{e['median_ape']}" for d, e in table.items()))


if __name__ == "__main__":
    main()
