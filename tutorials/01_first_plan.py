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
# # Your first plan
#
# Ten minutes. You take a small image classifier, let tvmhet decide which part of it runs on which of two unlike
# processors, run it that way, and compare what was predicted with what happened. A Linux machine with two x86-64 cores
# that have AVX2 (almost any since 2013) will do; no GPU is needed.
#
# This file is a notebook. Run it as a script (`python tutorials/01_first_plan.py`), or open it in Jupyter with
#
#     jupytext --to notebook tutorials/01_first_plan.py
#     jupyter lab tutorials/01_first_plan.ipynb

# %%
import os
import tempfile
from pathlib import Path

import torch

import tvmhet
from tvmhet import zoo

# %% [markdown]
# ## A model
#
# The zoo holds plain torch definitions with random weights. This one is a ResNet with eight blocks, about the size of
# ResNet-18, on small images. Your own torch module, ONNX file or exported program comes in the same way: see
# `from_onnx` and `from_exported`.

# %%
net, example = zoo.get("resnet50", image=96, blocks=(2, 2, 2, 2))
model = tvmhet.from_torch(net, example)

# %% [markdown]
# `from_torch` traced the module with `torch.export` and turned it into TVM's graph language, Relax. The weights are not
# baked in: they are parameters, so that each device can later be given just its own.

# %%
num_bytes = model.param_bytes
print(f"inputs {model.input_names}, {len(model.params)} parameters, {num_bytes / 2**20:.0f} MiB")
assert model.whole_reason is None, "this model can be cut into stages"

# %% [markdown]
# ## A cluster
#
# A *device type* is a GPU model, or a CPU core held to an instruction set. Your machine can play two device types at
# once: one core that may use only SSE (x86-64-v2), and one that may use AVX2 (x86-64-v3). That sounds like a toy, but
# the two are truly unlike, as you will measure: AVX2 speeds some operators up much more than others.

# %%
cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1, "cpu-x86-64-v3": 1})
for group in cluster.groups():
    print(f"{group.num_devices} x {group.name}")

# %% [markdown]
# ## A first plan, from estimates
#
# `plan` decides three things together: which operators become one *kernel*, which kernels become one *stage*, and
# which devices run each stage. The default objective is throughput: inputs stream through the stages like cars through
# a factory, and the slowest stage sets the pace.

# %%
first = tvmhet.plan(model, cluster=cluster)
print(first)

# %% [markdown]
# Read the table from the left. *compute* is the time of one input in the stage's kernels; *transfer* is what it takes
# to bring the tensors in and out; *load* is the time between two inputs that the stage can keep up with. The stage
# with the largest load is 100 % busy, and its load is the time between two results.
#
# Two lines above the table deserve trust or doubt. **lower bound**: no plan at all can be faster than this, if the
# times are right. **times from**: where the times come from. So far they are estimates, since nothing was run yet.

# %%
assert first.lower_bound <= first.objective_value
assert first.period_s == max(stage.load_s for stage in first.stages)
sources = {p.source for stage in first.stages for p in stage.predictions}
print("times come from:", ", ".join(sorted(sources)))

# %% [markdown]
# ## Measure what matters
#
# `profile` runs kernels on this machine, each in a process held to the right core and instruction set. It does not try
# all of them: it measures the kernels that the best plans use, plans again, and goes on until the best plan rests on
# measurements, or the budget is spent. Results are kept in a database, so the next model that has the same kernel gets
# its time for nothing.

# %%
print(tvmhet.profile(model, cluster=cluster, budget_s=45))

# %% [markdown]
# Plan again. A measured time always outranks an estimate.

# %%
plan = tvmhet.plan(model, cluster=cluster)
print(plan)


def measured_share(p):
    """Return the share of the predicted time that was measured."""
    guesses = [g for stage in p.stages for g in stage.predictions]
    return sum(g.time_s for g in guesses if g.source == "measured") / sum(g.time_s for g in guesses)


assert measured_share(plan) > 0

# %% [markdown]
# Is the pipeline worth it? Plan for each device alone. No plan for both can be slower than the better of these, since
# using one device only is a plan for both as well. All are compared by the times of their kernels here; a plan that
# `profile` ran as a pipeline says besides what it took.

# %%
alone = {g.name: tvmhet.plan(model, cluster=tvmhet.ClusterSpec.of({g.name: 1})) for g in cluster.groups()}
for name, other in alone.items():
    print(f"{name} alone: {1 / other.period_s:.1f} inputs/s")
print(f"both: {1 / plan.period_s:.1f} inputs/s")
assert plan.period_s <= min(p.period_s for p in alone.values())
assert alone["cpu-x86-64-v3"].period_s < alone["cpu-x86-64-v2"].period_s

# %% [markdown]
# Ask about one operator, or see what the measurements changed:

# %%
print(plan.explain("max_pool2d"))
print()
print(plan.compare(first))

# %% [markdown]
# ## Run it
#
# `build` compiles one library per stage, for that stage's own processor. The first call starts one worker process per
# device. The answer is the model's answer.

# %%
lib = tvmhet.build(model, cluster=cluster, plan=plan)
result = lib(*example)
with torch.no_grad():
    expected = net(*example)
difference = (result - expected).abs().max().item()
print(f"largest difference from torch: {difference:.2g}, for outputs up to {expected.abs().max().item():.2g}")
assert difference <= 1e-4 * expected.abs().max().item()

# %% [markdown]
# `map` streams many inputs through, several at a time, and gives the results in order.

# %%
images = [torch.randn(1, 3, 96, 96) for _ in range(4)]
results = list(lib.map(images))
assert torch.equal(results[2], lib(images[2]))

# %% [markdown]
# ## Predicted and measured
#
# The ratio is measured over predicted. Look at the load average first: the plan supposes that the cores are free, and
# if others use them the measured times are longer by as much. The report names what else to doubt, such as devices
# that have to share a core, or times that are estimates.

# %%
print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} logical cores")
stats = lib.benchmark(*example, num_inputs=20)
print(lib.report(stats))
assert len(stats.latency_s) == 20 and stats.throughput_per_s > 0

# %% [markdown]
# A pipeline pays because stages work at the same time, on different inputs. The timeline of the run shows it:

# %%
if len(plan.stages) > 1:
    ahead = [run for run in stats.timeline if run.stage == 0]
    behind = [run for run in stats.timeline if run.stage == 1]
    together = sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in ahead for b in behind)
    print(f"stages 0 and 1 were at work together for {together * 1e3:.0f} ms")
    assert together > 0
lib.close()

# %% [markdown]
# ## Look at it
#
# Everything can be kept as a file: the plan itself (JSON, safe to open), a page with a timeline and every kernel, and a
# trace of the simulated and the measured run for https://ui.perfetto.dev.

# %%
from tvmhet.report import run_to_trace, save_trace  # noqa: E402

folder = Path(tempfile.mkdtemp())
plan.save(folder / "plan.json")
plan.to_html(folder / "plan.html")
save_trace(run_to_trace(stats, plan), folder / "trace.json")
print("written:", ", ".join(sorted(path.name for path in folder.iterdir())))
assert tvmhet.Plan.load(folder / "plan.json") == plan

# %% [markdown]
# ## Where next
#
# `02_your_cluster.py` describes clusters of your own: GPUs that you do not have at hand, links, pins and limits. The
# command line does all of the above too: `tvmhet plan tvmhet.zoo:resnet50 --cluster cluster.yaml --html plan.html`.
