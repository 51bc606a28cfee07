# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your cluster
#
# Fifteen minutes. You describe a cluster in a small YAML file, plan for GPUs that this machine does not have, compile
# for them all the same, and ask the questions one asks before buying or repairing something: what if this card fails,
# what if this operator must stay there, what if memory is short?
#
# This file is a notebook. Run it as a script (`python tutorials/02_your_cluster.py`), or open it in Jupyter with
#
#     jupytext --to notebook tutorials/02_your_cluster.py
#     jupyter lab tutorials/02_your_cluster.ipynb

# %%
import tempfile
from pathlib import Path

import tvmhet
from tvmhet import zoo

net, example = zoo.get("resnet50", image=96, blocks=(2, 2, 2, 2))
model = tvmhet.from_torch(net, example)

# %% [markdown]
# ## A cluster file
#
# One machine with three generations of GPU. `link` joins two devices of the machine; `host_link` joins a device to the
# machine's memory, where inputs come from and results go to. The file below lies in `tutorials/clusters/` as
# `mixed_node.yaml`; `ClusterSpec.from_file` reads it from there.

# %%
mixed = tvmhet.ClusterSpec.from_yaml("""
nodes:
  - name: box
    devices: {v100-pcie-16gb: 2, t4: 4, a100-pcie-40gb: 1}
    link: pcie3
    host_link: pcie3
""")
print(mixed.counts())
assert sum(mixed.counts().values()) == 7

# %% [markdown]
# The names come from a table of device types, each figure with its source: `tvmhet devices` lists them, and
# `tvmhet devices v100` shows one. Figures can also be given inline, with units. Units are not optional: a bare number
# is an error that names the line and says what to write.

# %%
try:
    tvmhet.ClusterSpec.from_yaml("""
nodes:
  - name: box
    devices: {t4: {count: 4, memory: 12}}
""")
except tvmhet.HetError as error:
    print(error)
    assert error.code == "TVMHET-E002" and ":4:" in str(error)

# %% [markdown]
# So is a name that nobody knows; the nearest ones are offered.

# %%
try:
    tvmhet.ClusterSpec.from_yaml("nodes: [{name: box, devices: {v10: 2}}]")
except tvmhet.HetError as error:
    print(error)
    assert error.code == "TVMHET-E001" and "v100" in error.remedy

# %% [markdown]
# A cluster of several machines says how they are joined. Bandwidth and latency are of one direction.

# %%
two_machines = tvmhet.ClusterSpec.from_yaml("""
nodes:
  - {name: new, devices: {a100-pcie-40gb: 1}}
  - {name: old, count: 2, devices: {t4: 2}}
network: {bandwidth: 25 Gbit/s, latency: 20 us}
""")
a100, t4 = two_machines.groups()
link = two_machines.link(a100, t4)
print(f"A100 to T4: {link.byte_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.0f} us")
assert link.byte_per_s <= 25e9 / 8

# %% [markdown]
# Machines in two places share the line between them: whatever passes from one region to the other, from whichever
# device, has its bandwidth together. Plans say how much of it they take.

# %%
two_regions = tvmhet.ClusterSpec.from_yaml("""
nodes:
  - {name: here, devices: {a100-pcie-40gb: 1}, region: east}
  - {name: there, count: 2, devices: {t4: 2}, region: west}
network:
  bandwidth: 25 Gbit/s
  latency: 20 us
  regions: [{between: [east, west], bandwidth: 2 Gbit/s, latency: 8 ms}]
""")
there, back = two_regions.topology().wires
print(f"{there.name}: {there.byte_per_s / 1e6:.0f} MB/s for all")
assert there.byte_per_s == 0.25e9

# %% [markdown]
# ## Plan for GPUs you do not have
#
# Nothing has to be at hand to plan: times of device types that are elsewhere are estimates, and the table says so.

# %%
plan = tvmhet.plan(model, cluster=mixed)
print(plan)
assert "measured" not in {p.source for stage in plan.stages for p in stage.predictions}
for stage in plan.stages:
    assert len(stage.placement.devices) <= mixed.counts()[stage.placement.device_type]

# %% [markdown]
# A stage on several devices is *replicated*: inputs take its devices in turn. That is how four slow cards keep up with
# one fast card.
#
# ## Compile for GPUs you do not have
#
# `build` compiles each stage for its own GPU generation. On a machine without an NVIDIA GPU the result holds CUDA
# source, which the machine that loads the bundle turns into machine code.

# %%
folder = Path(tempfile.mkdtemp())
with tvmhet.build(model, cluster=mixed, plan=plan) as lib:
    bundle = lib.export(folder / "bundle")
print(", ".join(sorted(path.name for path in bundle.iterdir())))
assert len(list(bundle.glob("stage*.so"))) == len(plan.stages)

# %% [markdown]
# ## What if?
#
# `without` is the same cluster with devices taken away. How much does each kind of card bring?

# %%
for card, count in mixed.counts().items():
    smaller = tvmhet.plan(model, cluster=mixed.without({card: count}))
    lost = 1 - smaller.throughput_per_s / plan.throughput_per_s
    print(f"without {count} x {card}: {smaller.throughput_per_s:.0f} inputs/s, {lost:.0%} fewer")
    assert card not in {stage.placement.device_type for stage in smaller.stages}

# %% [markdown]
# The other way round: a type may stand in a file with the count 0. The plan leaves it alone, and `with_counts` tries
# other numbers.

# %%
none_yet = mixed.with_counts({"a100-pcie-40gb": 0})
assert none_yet.counts()["a100-pcie-40gb"] == 0
assert "a100-pcie-40gb" not in {s.placement.device_type for s in tvmhet.plan(model, cluster=none_yet).stages}

two_more = tvmhet.plan(model, cluster=mixed.with_counts({"a100-pcie-40gb": 3}))
print(f"with 3 x A100: {two_more.throughput_per_s:.0f} inputs/s instead of {plan.throughput_per_s:.0f}")

# %% [markdown]
# ## Pins
#
# Perhaps the first layers must stay where the camera is. A pin names operators, by name or pattern, and a device type.
# Everything else is planned around it.

# %%
pinned = tvmhet.plan(model, cluster=mixed, pin={"stem_*": "t4", "fc*": "a100-pcie-40gb"})
print(pinned.explain("stem_0"))
assert pinned.stage_of("stem_0").placement.device_type == "t4"
assert pinned.stage_of("fc").placement.device_type == "a100-pcie-40gb"
print(pinned.compare(plan))

# %% [markdown]
# ## Tight memory
#
# Limits are kept: the table's memory column is the peak on one device, weights included. Give each T4 only 24 MiB, and
# the model is cut so that every part fits.

# %%
tight = tvmhet.ClusterSpec.from_yaml("nodes: [{name: box, devices: {t4: {count: 4, memory: 24 MiB}}}]")
small = tvmhet.plan(model, cluster=tight)
print(small)
assert max(stage.memory_bytes for stage in small.stages) <= 24 * 2**20 < model.param_bytes

# %% [markdown]
# Give them 12 MiB, and nothing fits. The error says so, and what the smallest mend is.

# %%
tighter = tvmhet.ClusterSpec.from_yaml("nodes: [{name: box, devices: {t4: {count: 4, memory: 12 MiB}}}]")
try:
    tvmhet.plan(model, cluster=tighter)
    raise AssertionError("this cannot fit")
except tvmhet.HetError as error:
    print(error)
    assert error.code == "TVMHET-E004" and error.remedy

# %% [markdown]
# ## One input, quickly
#
# Throughput is not always the aim. `objective="latency"` minimises the time of one input alone, and then a pipeline of
# many devices rarely helps: every hand-over costs.

# %%
quick = tvmhet.plan(model, cluster=mixed, objective="latency")
print(f"latency {quick.latency_s * 1e3:.3g} ms in {len(quick.stages)} stage(s), "
      f"against {plan.latency_s * 1e3:.3g} ms in {len(plan.stages)} for throughput")  # fmt: skip
assert quick.latency_s <= plan.latency_s
