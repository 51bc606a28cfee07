"""How long a kernel should take on a GPU: launch, arithmetic in waves of tiles, traffic through L2 and DRAM.

        compute = waves x max(tile arithmetic, tile loads)         best over tile shapes and splits of k
        memory  = bytes x (miss / DRAM + hit / L2)                 miss grows as the bytes outgrow L2
        busy    = (compute^p + memory^p)^(1/p)
        seconds = max(launch, gap x launch + busy)                 an eager call's host works on beside the kernel

Physics carries the scale. `Scalars` say what a GPU type reaches of its data sheet; trees then correct the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import MATMUL_GROUPS, VECTOR_GROUPS, Columns, Floats
from tvmhet.cost.roofline import peak_flop_per_s
from tvmhet.errors import BadModel


@dataclass(frozen=True, slots=True)
class Scalars:
    """What one GPU type reaches in one group of kernels: the part of a model that differs from GPU to GPU."""

    launch_s: float  # time of a kernel that does nothing, as the data were measured: no kernel takes less
    compute: float  # share of the arithmetic peak that large but short kernels reach
    sustained: float  # the same for long ones: what the power limit leaves
    dram: float  # share of the DRAM bandwidth
    cache: float  # L2 hits, as a multiple of the DRAM bandwidth (before the L2 port's own limit)
    load: float  # bytes per clock that one SM's tile loads reach
    gap: float = 1.0  # share of the launch that passes before the kernel starts; the rest passes beside it
    block: float = 1000.0  # clocks of one SM that a thread block of attention takes beside its work
    library: int = 0  # number of the SM generation whose library kernels it runs; 0: unknown
    tile: int = -1  # the one tile shape that its library uses, by place in `Constants.tiles`; -1: the fastest
    winograd: bool = True  # whether its library saves arithmetic of 3 x 3 convolutions

    def as_log(self) -> Floats:
        """Return the natural logarithms, in field order."""
        return np.log([getattr(self, name) for name in FITTED])

    @staticmethod
    def from_log(values: Floats, library: int = 0, tile: int = -1) -> Scalars:
        """Return the scalars whose logarithms are `values`."""
        fitted: dict[str, Any] = {name: float(value) for name, value in zip(FITTED, np.exp(values), strict=True)}
        return Scalars(**fitted, library=library, tile=tile)

    def with_log(self, values: Floats) -> Scalars:
        """Return these scalars with those that are fitted replaced, given by their logarithms."""
        return replace(Scalars.from_log(values, self.library, self.tile), winograd=self.winograd)


#: The scalars that are fitted, in the order of `Scalars.as_log`.
FITTED = ("launch_s", "compute", "sustained", "dram", "cache", "load", "gap", "block")


@dataclass(frozen=True, slots=True)
class Tile:
    """A shape of thread block that libraries cut products into."""

    rows: float
    cols: float
    rate: float  # of a full tile, over that of the largest one
    row_step: float  # rows and columns of one warp
    col_step: float

    def live(self, work: Work) -> Floats:
        """Return the share of the tiles' warps that hold a part of the result."""
        rows = np.ceil(work.m / self.row_step) * self.row_step / (np.ceil(work.m / self.rows) * self.rows)
        cols = np.ceil(work.n / self.col_step) * self.col_step / (np.ceil(work.n / self.cols) * self.cols)
        return np.asarray(rows * cols, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Constants:
    """Facts of how libraries cut work, shared by all GPUs (`cost_models/trained/physics.yaml`)."""

    tiles: tuple[Tile, ...]
    splits: tuple[int, ...]
    min_split_depth: float
    split_s: float
    depth_step: float
    l2_byte_per_clock_per_sm: float
    attention_query_tile: float
    attention_key_tile: float
    decode_head_tile: float
    decode_key_tile: float
    unaligned_rate: float
    stream_block_bytes: float
    pooled_values_per_sm_clock: float
    channel_values_per_sm_clock: float
    wide_channel_values_per_sm_clock: float
    function_values_per_sm_clock: float
    rms_norm_values_per_sm_clock: float
    winograd_below: float
    throttle_s: float
    operand_sets: float
    l2_sharpness: float
    norm: float


@lru_cache(maxsize=4)
def constants(path: Path | None = None) -> Constants:
    """Read the shared constants. Raises BadModel if the file is malformed."""
    path = path or data_path("trained/physics.yaml")
    try:
        tree = yaml.safe_load(path.read_text())
        tree.pop("schema")
        tiles = tuple(Tile(*(float(v) for v in row)) for row in tree.pop("tiles"))
        splits = tuple(int(s) for s in tree.pop("splits"))
        return Constants(tiles=tiles, splits=splits, **{k: float(v) for k, v in tree.items()})
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"{path.name} cannot be read: {error!r}", "restore the shipped file") from error


@dataclass(frozen=True, slots=True)
class Estimate:
    """The analytic time of each kernel and what it is made of, seconds; `choice` numbers the tile and split taken."""

    seconds: Floats
    launch_s: float
    busy_s: Floats  # of the device itself
    compute_s: Floats
    memory_s: Floats
    blocks: Floats  # thread blocks of the chosen cut
    fill: Floats  # useful share of the chosen tiles
    choice: Floats
    library: int


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel seen as `b` products of (m, k) by (k, n)."""

    b: Floats
    m: Floats
    n: Floats
    k: Floats


def peaks(columns: Columns, device: DeviceType) -> Floats:
    """Return each kernel's arithmetic peak, FLOP/s. Raises BadInput for a dtype that the device cannot compute."""
    pairs, inverse = np.unique(np.char.add(np.char.add(columns.family, "|"), columns.dtype), return_inverse=True)
    rates = [peak_flop_per_s(device, *str(pair).split("|")) for pair in pairs]
    return np.array(rates, dtype=np.float64)[inverse]


def products(columns: Columns) -> tuple[Work, ...]:
    """Return the matrix products that the kernels of a matrix group run one after the other."""
    s = columns.sizes.T
    if columns.group == "moe":
        tokens, hidden, inter, topk, experts = s
        reached = np.maximum(experts * -np.expm1(tokens * np.log1p(-np.minimum(topk / experts, 1 - 1e-9))), 1)
        rows = np.maximum(tokens * topk / reached, 1)
        return Work(reached, rows, 2 * inter, hidden), Work(reached, rows, hidden, inter)
    b, m, n, k = s
    return (Work(b, m, n, k),)


def _hit_byte_per_s(device: DeviceType, scalars: Scalars, consts: Constants) -> float:
    """Bandwidth of L2 hits: what the cache gives, limited by the ports of the SMs."""
    port = consts.l2_byte_per_clock_per_sm * device.num_sms * device.clock_hz
    return 1.0 / (1.0 / (scalars.cache * device.dram_byte_per_s) + 1.0 / port)


def memory_s(bytes_moved: Floats, device: DeviceType, scalars: Scalars, consts: Constants, sets: float = 1.0) -> Floats:
    """Return the time to move `bytes_moved`: from L2 while they fit, from DRAM as they outgrow it.

    Where `sets` of such operands take turns, as a benchmark may have it, they find room in L2 only together.
    """
    miss = 1.0 / (1.0 + np.power(device.l2_bytes / (sets * bytes_moved), consts.l2_sharpness))
    return bytes_moved * (
        miss / (scalars.dram * device.dram_byte_per_s) + (1 - miss) / _hit_byte_per_s(device, scalars, consts)
    )


def tiled_s(
    work: Work,
    width_bytes: Floats,
    peak: Floats,
    device: DeviceType,
    scalars: Scalars,
    consts: Constants,
    skips: bool = False,
    splits: tuple[int, ...] = (),
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (seconds, blocks, fill, choice) of the fastest cut of each product into tiles and splits of k.

    `skips` says whether warps outside the result skip their arithmetic, as float32 kernels' do.
    """
    per_sm = peak * scalars.compute / device.num_sms
    load = device.clock_hz * scalars.load
    hit = _hit_byte_per_s(device, scalars, consts)
    best = np.full(len(work.m), np.inf)
    blocks, fill, choice = np.ones_like(best), np.ones_like(best), np.zeros_like(best)
    for t, tile in enumerate(consts.tiles):
        if scalars.tile not in (-1, t):
            continue
        grid = work.b * np.ceil(work.m / tile.rows) * np.ceil(work.n / tile.cols)
        edge = (np.minimum(tile.rows, work.m) + np.minimum(tile.cols, work.n)) * width_bytes / load
        flop = 2.0 * tile.rows * tile.cols / (per_sm * tile.rate) * (tile.live(work) if skips else 1.0)
        used = work.b * work.m * work.n / (grid * tile.rows * tile.cols)
        for s, split in enumerate(splits or consts.splits):
            depth = np.ceil(work.k / split / consts.depth_step) * consts.depth_step
            seconds = np.ceil(grid * split / device.num_sms) * np.maximum(flop, edge) * depth
            if split > 1:
                partial_bytes = 2.0 * split * work.b * work.m * work.n * 4.0
                seconds = seconds + consts.split_s + partial_bytes / hit
                seconds = np.where(work.k < split * consts.min_split_depth, np.inf, seconds)
            better = seconds < best
            best = np.where(better, seconds, best)
            blocks = np.where(better, grid * split, blocks)
            fill = np.where(better, used, fill)
            choice = np.where(better, 16.0 * t + s, choice)
    return best, blocks, fill, choice


#: Groups whose published times come from a benchmark that goes round several sets of operands.
TIMED_IN_TURNS = frozenset({"matmul_tensor", "matmul_narrow"})

Cut = tuple[Floats, Floats, Floats, Floats]


#: cuDNN seems not to divide the inner dimension of a float32 convolution among blocks: 2048 to 512 channels of 7 x 7
#: pixels take an H100 five times as long as the same product by cuBLAS (`benchmarks/gpu_library.py`).
_WHOLE = (1,)


def _conv(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    """The faster of an implicit product and, for 3 x 3 at stride 1, Winograd's F(4 x 4, 3 x 3).

    Winograd (Lavin and Gray, CVPR 2016) is 36 products over 4 x 4 output tiles, between two transforms that write and
    read 36 values for each 16.
    """
    n, c, h, w, oc, kh, kw, oh, ow, groups = columns.sizes.T
    peak = peaks(columns, device)
    in_group, out_group = np.maximum(c / groups, 1), np.maximum(oc / groups, 1)
    work = Work(groups, n * oh * ow, out_group, in_group * kh * kw)
    direct = tiled_s(work, columns.width_bytes, peak, device, scalars, consts, splits=_WHOLE)
    tiles = n * np.ceil(oh / 4) * np.ceil(ow / 4)
    products = Work(36 * groups, tiles, out_group, in_group)
    winograd = tiled_s(products, columns.width_bytes, peak, device, scalars, consts, splits=_WHOLE)
    moved = 2 * 36 * (tiles * (c + oc) + c * out_group) * columns.width_bytes
    seconds = winograd[0] + memory_s(moved, device, scalars, consts)
    suits = (kh == 3) & (kw == 3) & (oh >= h - 2) & (ow >= w - 2) & scalars.winograd
    use = suits & (seconds < direct[0])
    scale = np.where(columns.backward, 2.0, 1.0)
    return (
        scale * np.where(use, seconds, direct[0]),
        np.where(use, winograd[1], direct[1]),
        np.where(use, winograd[2], direct[2]),
        np.where(use, winograd[3] + 5.0, direct[3]),  # splits are numbered 0 to 4: 5 and more are Winograd's
    )


def unaligned(columns: Columns) -> NDArray[np.bool_]:
    """Whether a product runs on matrix units and rows of an operand are not whole 16 bytes, as these load them."""
    if columns.group not in ("matmul_tensor", "matmul_narrow"):
        return np.zeros(len(columns), dtype=np.bool_)
    rows_bytes = columns.sizes[:, 2:4] * columns.width_bytes[:, None]
    found: NDArray[np.bool_] = (rows_bytes % 16 != 0).any(axis=1)
    return found


def _matrix(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    peak = peaks(columns, device) * np.where(unaligned(columns), consts.unaligned_rate, 1.0)
    skips = columns.group in VECTOR_GROUPS
    parts = [tiled_s(w, columns.width_bytes, peak, device, scalars, consts, skips) for w in products(columns)]
    scale = np.where(columns.backward, 2.0, 1.0)
    return scale * sum(p[0] for p in parts), parts[0][1], parts[0][2], parts[0][3]


def _prefill(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    """One block per tile of queries. A causal mask leaves whole tiles of keys, and the last block the most of them."""
    batch, heads, _, q_len, kv_len, head_dim, window = columns.sizes.T
    step = consts.attention_query_tile
    padded = np.ceil(q_len / step) * step
    blocks = batch * heads * padded / step
    seen = np.where(window > 0, np.minimum(kv_len, window + q_len), kv_len)
    keys = np.ceil(seen / consts.attention_key_tile) * consts.attention_key_tile
    per_pair = 4.0 * head_dim * np.where(columns.backward, 2.0, 1.0)
    pairs = columns.flop / (per_pair * batch * heads)
    reached = np.minimum(pairs * padded / q_len + 0.5 * padded * consts.attention_key_tile, padded * keys)
    per_sm = peaks(columns, device) * scalars.compute / device.num_sms
    total = per_pair * batch * heads * reached / (per_sm * device.num_sms)
    longest = per_pair * step * keys / per_sm
    overhead = np.maximum(blocks / device.num_sms, 1.0) * scalars.block / device.clock_hz
    fill = np.minimum(pairs / reached, 1.0)
    return np.maximum(total, longest) + overhead, blocks, fill, np.zeros_like(fill)


def _decode(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    """One block per key-value head, split along the keys until every SM has one; each loads its keys and values."""
    batch, heads, kv_heads, _, kv_len, head_dim, window = columns.sizes.T
    seen = np.where(window > 0, np.minimum(kv_len, window), kv_len)
    tiles = np.ceil(heads / kv_heads / consts.decode_head_tile)
    fill = heads / kv_heads / (tiles * consts.decode_head_tile)
    items = batch * kv_heads * tiles
    splits = np.clip(np.floor(device.num_sms / items), 1.0, np.ceil(seen / consts.decode_key_tile))
    blocks = items * splits
    loaded = 2.0 * seen / splits * head_dim * columns.width_bytes
    waves = np.maximum(blocks / device.num_sms, 1.0)
    load_s = waves * (scalars.block + loaded / scalars.load) / device.clock_hz
    arithmetic_s = columns.flop / (peaks(columns, device) * scalars.compute) / fill
    return load_s + arithmetic_s, blocks, fill, np.zeros_like(fill)


#: Element-wise operators whose arithmetic counts, as tables name them: a sigmoid is a "tanh", a silu a "gelu".
_FUNCTIONS = ("gelu", "tanh")
#: Values of the largest window of convolutions by channel that were measured alone, 5 x 5; larger ones take longer.
_NARROW_WINDOW = 25


def _stream(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    blocks = np.ceil(columns.bytes_moved / consts.stream_block_bytes)
    values = columns.flop / 2.0  # of windows of convolutions by channel
    wide = values > _NARROW_WINDOW * columns.sizes[:, 1]
    rate = np.where(wide, consts.wide_channel_values_per_sm_clock, consts.channel_values_per_sm_clock)
    clocks = np.select(
        [columns.family == "pooling", columns.family == "conv2d", np.isin(columns.name, _FUNCTIONS)],
        [
            columns.flop / consts.pooled_values_per_sm_clock,
            values / rate,
            columns.sizes[:, 0] / consts.function_values_per_sm_clock,
        ],
        0.0,
    )
    by_values_s = clocks / (device.num_sms * device.clock_hz)
    seconds = np.where(clocks > 0, by_values_s, columns.flop / (peaks(columns, device) * scalars.compute))
    return seconds, blocks, np.ones_like(blocks), np.zeros_like(blocks)


def _rows(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Cut:
    rows = columns.sizes[:, 0]
    clocks = rows * columns.sizes[:, 1] / consts.rms_norm_values_per_sm_clock
    by_values_s = np.where(columns.name == "rms_norm", clocks / (device.num_sms * device.clock_hz), 0.0)
    seconds = np.maximum(columns.flop / (peaks(columns, device) * scalars.compute), by_values_s)
    return seconds, rows, np.ones_like(rows), np.zeros_like(rows)


_CUT: Mapping[str, Callable[[Columns, DeviceType, Scalars, Constants], Cut]] = MappingProxyType(
    {
        **dict.fromkeys((*MATMUL_GROUPS, "moe"), _matrix),
        "conv": _conv,
        "attention_prefill": _prefill,
        "attention_decode": _decode,
        "stream": _stream,
        "softmax": _rows,
        "norm": _rows,
    }
)


def estimate(columns: Columns, device: DeviceType, scalars: Scalars, consts: Constants) -> Estimate:
    """Return the analytic time of each kernel of one group. Raises BadInput for a dtype that the device has not."""
    burst, blocks, fill, choice = _CUT[columns.group](columns, device, scalars, consts)
    slower = max(scalars.compute / scalars.sustained, 1.0)
    compute = burst * (1.0 + (slower - 1.0) * burst / (burst + consts.throttle_s))
    sets = consts.operand_sets if columns.group in TIMED_IN_TURNS else 1.0
    memory = memory_s(columns.bytes_moved, device, scalars, consts, sets)
    busy = _smooth_max(compute, memory, consts.norm)
    seconds = np.maximum(scalars.launch_s, scalars.gap * scalars.launch_s + busy)
    return Estimate(seconds, scalars.launch_s, busy, compute, memory, blocks, fill, choice, scalars.library)


def _smooth_max(a: Floats, b: Floats, norm: float) -> Floats:
    """Return (a^p + b^p)^(1/p) without overflow or underflow."""
    top = np.maximum(a, b)
    ratio: NDArray[np.float64] = np.minimum(a, b) / top
    return top * np.power(1.0 + np.power(ratio, norm), 1.0 / norm)
