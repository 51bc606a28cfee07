"""Measurements of operators on one device type, as a file, and the cost model that is fitted to them.

    {"calibration": "l4", "measured_on": "NVIDIA L4"}
    {"op": "linear", "b": 1, "m": 512, "n": 3072, "k": 768, "dtype": "bfloat16", "seconds": 4.1e-05}

A calibration is nothing but measurements: the model is fitted when the file is read, so a newer model uses them too.
On GPUs the learned model is fitted (`calibrate`); on CPU types each family of operators is scaled as a whole. Three or
more exchanges of one kind among as many devices replace that curve of the network model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import Dispatch, LearnedModel
from tvmhet.cost.calibrate import calibrate
from tvmhet.cost.measured import default_path
from tvmhet.cost.model import CostModel, KernelDesc, Predictions
from tvmhet.cost.network import Network, fit, link_class
from tvmhet.cost.operators import ExchangeDesc, parse
from tvmhet.cost.record import record_of
from tvmhet.errors import BadInput, HetError

_CALLS_TRIED = 50
_MIN_EXCHANGES = 3
_UNITS = {"seconds": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class MeasuredOps:
    """Times in seconds of operators on the device type called `device`; `measured_on` says on what, "" if not known."""

    device: str
    descs: tuple[KernelDesc, ...]
    seconds: tuple[float, ...]
    measured_on: str = ""
    exchanges: tuple[tuple[ExchangeDesc, float], ...] = ()

    def write(self, path: Path) -> None:
        """Write the file; it appears whole."""
        head = {"calibration": self.device, "measured_on": self.measured_on}
        rows = [{**record_of(d), "seconds": s} for d, s in zip(self.descs, self.seconds, strict=True)]
        rows += [
            {"op": d.operation, "gpus": d.num_devices, "bytes": d.size_bytes, "seconds": s} for d, s in self.exchanges
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)), encoding="utf-8")
        part.replace(path)


def read_measured(path: Path, device: DeviceType) -> MeasuredOps:
    """Read operators with their times; a file without a head is taken to be of `device`.

    Raises BadInput with the line for what is no operator with a time, or for another device type's file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"measurements {str(path)!r} cannot be read: {error}", "give a file of JSON lines") from error
    kernels: list[tuple[KernelDesc, float]] = []
    exchanges: list[tuple[ExchangeDesc, float]] = []
    measured_on = ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if isinstance(record, dict) and "calibration" in record:
                _check_device(record["calibration"], device)
                measured_on = str(record.get("measured_on", ""))
                continue
            desc, time_s = _measurement(record)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}:{number}: no JSON object: {error}", "write one operator a line") from error
        except HetError as error:
            raise BadInput(f"{path}:{number}: {error.problem}", error.remedy) from error
        if isinstance(desc, KernelDesc):
            kernels.append((desc, time_s))
        else:
            exchanges.append((desc, time_s))
    if not kernels and not exchanges:
        raise BadInput(f"{path}: no measurement", 'add "seconds" to lines of `tvmhet calibrate --list`')
    descs, seconds = tuple(d for d, _ in kernels), tuple(s for _, s in kernels)
    return MeasuredOps(device.name, descs, seconds, measured_on, tuple(exchanges))


def _check_device(name: Any, device: DeviceType) -> None:
    if name != device.name:
        raise BadInput(f"the calibration is of {name!r}, not of {device.name!r}", "calibrate this device type")


def _measurement(record: Any) -> tuple[KernelDesc | ExchangeDesc, float]:
    if not isinstance(record, dict):
        raise BadInput(f"a measurement is {record!r}", 'write {"op": ..., "seconds": ...}')
    given = [unit for unit in _UNITS if unit in record]
    if len(given) != 1:
        raise BadInput(f"the measurement has {' and '.join(given) or 'no time'}", 'give "seconds", "ms" or "us"')
    value = record[given[0]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(f"{given[0]} is {value!r}", "give a finite number above 0")
    desc = parse({key: v for key, v in record.items() if key not in _UNITS})
    if isinstance(desc, ExchangeDesc) and desc.nodes > 1:
        raise BadInput(f"{desc.operation} over {desc.nodes} nodes cannot calibrate", "give exchanges within one node")
    if isinstance(desc, KernelDesc) and desc.maker != "library":
        raise BadInput(f"{record.get('op')} cannot calibrate", "give operators of the vendor's library")
    return desc, float(value) * _UNITS[given[0]]


def stored_path(device: DeviceType) -> Path:
    """Return where `tvmhet calibrate` keeps a device type's measurements: beside the database of measured kernels."""
    return default_path().parent / "calibration" / f"{device.name}.jsonl"


def model_for(device: DeviceType, dispatch: Dispatch = "published", calibration: Path | None = None) -> CostModel:
    """Return the model of a device type, fitted to `calibration`, else to what is stored for it, else as shipped."""
    model = LearnedModel.load(device, dispatch)
    found = _measured_ops(device, calibration)
    return model if found is None else fitted(model, found)


def network_for(device: DeviceType, calibration: Path | None = None) -> Network:
    """Return the network model, with the device type's own curves of `calibration`, else of what is stored for it."""
    network = Network.load()
    found = _measured_ops(device, calibration)
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for desc, seconds in () if found is None else found.exchanges:
        runs.setdefault((desc.operation, desc.num_devices), []).append((desc.size_bytes, seconds))
    curves = {
        (device.name, *kind): fit(*kind, device.peer_byte_per_s, *np.array(sorted(pairs)).T)
        for kind, pairs in runs.items()
        if len(pairs) >= _MIN_EXCHANGES
    }
    links = {**network.link_of, device.name: link_class(device)}
    return replace(network, curves={**network.curves, **curves}, link_of=links) if curves else network


def _measured_ops(device: DeviceType, calibration: Path | None) -> MeasuredOps | None:
    path = calibration or stored_path(device)
    return read_measured(path, device) if calibration is not None or path.is_file() else None


def fitted(model: LearnedModel, measured: MeasuredOps) -> CostModel:
    """Return `model` fitted to the kernels measured on its own device; as it is, if there are none."""
    if not measured.descs:
        return model
    if model.device.is_cpu:
        return FamilyScaled.fit(model, measured.descs, measured.seconds)
    return calibrate(model, measured.descs, measured.seconds)


@dataclass(frozen=True, slots=True)
class FamilyScaled:
    """A model whose times are multiplied by family, and to which a call is added. Source: calibrated.

    `call_s` is what every kernel takes beyond its scaled prediction: the library's dispatch. `scales` holds (low,
    middle, high) by family: the tenth, the half and the nine tenths of measured over predicted, the call apart.
    """

    model: CostModel
    call_s: float
    scales: Mapping[str, tuple[float, float, float]]

    @staticmethod
    def fit(model: CostModel, descs: Sequence[KernelDesc], seconds: Sequence[float]) -> FamilyScaled:
        """Return the model scaled in every family that has a measurement; the call is what explains the times best."""
        measured, predicted = np.array(seconds), model.predict(descs).seconds
        families = np.array([d.root.family for d in descs])
        rows = {str(family): np.flatnonzero(families == family) for family in np.unique(families)}

        def error(call_s: float) -> float:
            logs = np.log((measured - call_s) / predicted)
            fits = np.concatenate([np.log(call_s + predicted[r] * np.exp(np.median(logs[r]))) for r in rows.values()])
            return float(np.mean(np.abs(fits - np.log(np.concatenate([measured[r] for r in rows.values()])))))

        call_s = float(min(np.linspace(0.0, 0.98 * measured.min(), _CALLS_TRIED), key=error))
        ratio = (measured - call_s) / predicted
        ends = {family: np.quantile(ratio[r], [0.1, 0.5, 0.9]).tolist() for family, r in rows.items()}
        return FamilyScaled(model, call_s, {family: (low, mid, high) for family, (low, mid, high) in ends.items()})

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel, in order. Raises BadInput for a dtype that the device cannot compute."""
        plain = self.model.predict(descs)
        known = [self.scales.get(d.root.family) for d in descs]
        low, middle, high = (np.array([1.0 if s is None else s[i] for s in known]) for i in range(3))
        scaled = np.array([s is not None for s in known], dtype=np.bool_)
        return replace(
            plain,
            seconds=np.where(scaled, self.call_s, 0.0) + plain.seconds * middle,
            low=np.where(scaled, self.call_s + plain.seconds * low, plain.low),
            high=np.where(scaled, self.call_s + plain.seconds * high, plain.high),
            source=tuple("calibrated" if s else source for s, source in zip(scaled, plain.source, strict=True)),
        )


def error_of(model: CostModel, descs: Sequence[KernelDesc], seconds: Iterable[float]) -> float:
    """Return the mean of |predicted / measured - 1| over the kernels."""
    measured = np.array(list(seconds))
    return float(np.mean(np.abs(model.predict(descs).seconds / measured - 1.0)))
