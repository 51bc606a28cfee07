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
# # What to rent
#
# Fifteen minutes. You have a model, a price list and a wish: so many inputs per second, or so many samples of training
# until tomorrow. You find out which GPUs to rent, how many, what runs where, how sure that is, and what to measure
# before you pay. No GPU is needed.
#
# This file is a notebook. Run it as a script (`python tutorials/04_what_to_rent.py`), or open it in Jupyter with
#
#     jupytext --to notebook tutorials/04_what_to_rent.py
#     jupyter lab tutorials/04_what_to_rent.ipynb

# %%
import json
import tempfile
from pathlib import Path

import tvmhet
from tvmhet import zoo
from tvmhet.cluster import Market
from tvmhet.recommending import Goal, Job, read_measurements, study_of, what_to_measure

net, example = zoo.get("resnet50", image=96, blocks=(2, 2, 2, 2))
model = tvmhet.from_torch(net, example)

# %% [markdown]
# ## A price list
#
# Whole instances are rented. `price` is of the whole instance, `max_instances` is how many you may have. `running` says
# what a job pays beyond its work: starting the machines, and a checkpoint now and then. Prices need their unit, and one
# currency. `Market.from_file` reads the same from a file, also CSV, a SkyPilot catalogue, and what `nvidia-smi` prints;
# `Market.shipped("aws")` is one provider of the dated list that comes with tvmhet.

# %%
market = Market.from_text("""
date: 2025-11-01
source: made up for this tutorial
network: {bandwidth: 25 Gbit/s, latency: 30 us}
running: {startup: 120 s, checkpoint: 10 s, checkpoint_every: 1 h}
offers:
  - {name: small,  type: t4,        devices: 1, price: 0.53 USD/h, max_instances: 8}
  - {name: medium, type: a10g,      devices: 1, price: 1.01 USD/h, max_instances: 4}
  - {name: large,  type: a100-40gb, devices: 4, price: 14.70 USD/h, max_instances: 1}
""")
print([(o.name, o.num_devices, o.device.name, o.usd_per_h) for o in market.offers])

# %% [markdown]
# ## A service
#
# The least price for a number of inputs per second. An input is one call of the model at the batch it was
# imported with.

# %%
rate = 5500.0
service = tvmhet.recommend(model, market=market, throughput_per_s=rate)
print(service)
assert service.best.rate_per_s >= rate

# %% [markdown]
# How to read it, from the top:
#
# - **does**: what the rented machines do and cost together; **runs**: the pipelines on them, and what limits each.
# - **one type**: what the best single type would cost for the same. Often one type is best, and it says so.
# - **sure**: times of GPUs that are not here are predictions with intervals. In each of 1000 draws from those every
#   option is timed again; this is the share of draws in which the answer holds. **else** is what would win otherwise,
#   and **regret** is what you lose on average by not knowing.
# - the table is the whole trade of speed against price, each line beside the cheapest single type that is as fast.
#
# Never worse than the best single type, because that is among the options:

# %%
assert service.homogeneous is None or service.best.usd_per_h <= service.homogeneous.usd_per_h
for point in service.front[:8]:
    alone = point.homogeneous
    print(f"{point.option.rate_per_s:8.0f} /s {point.option.usd_per_h:6.2f} USD/h  {point.option.short:40}", end="")
    print("none as fast" if alone is None else f"{alone.usd_per_h:6.2f} USD/h with {alone.short}")

# %% [markdown]
# ## What would change it
#
# At which price of a type does the answer change? What if a type is sold out, or the network is faster? And `risk=0.9`
# chooses what is best in nine of ten draws, not as predicted: it pays for room.

# %%
changed = tvmhet.recommend(model, market=market, throughput_per_s=rate, what_if=True)
for even in changed.break_evens:
    answer = "no price changes it" if even.option is None else f"another answer at {even.factor:.2f} times its price"
    print(f"{even.device_type}: {answer}")
for change in changed.changes:
    print(f"{change.what}: {change.option.fleet if change.option else change.refused}")
careful = tvmhet.recommend(model, market=market, throughput_per_s=rate, risk=0.9)
print(f"careful: {careful.best.short}, {careful.best.usd_per_h:.2f} USD/h")
assert careful.confidence.keeps_limits >= service.confidence.keeps_limits

# %% [markdown]
# ## What to measure before renting
#
# Half a dollar of GPU time can be worth more than it costs. The list names the (kernel, type) pairs by expected gain
# per dollar; a type that is not started yet costs its start as well. On the command line:
#
#     tvmhet recommend MODEL --market prices.yaml --throughput 5500 --profile-budget-usd 0.5 --dry-run --out list.jsonl

# %%
study = study_of(model, market=market)
wanted = Job(Goal.PRICE, throughput_per_s=rate)
campaign = what_to_measure(study, wanted, budget_usd=0.5)
print(f"{len(campaign.choices)} measurements, {campaign.usd:.3f} USD; then: {campaign.reason}")
for choice in campaign.choices[:5]:
    print(f"  {choice.device_type:15} {study.kernel_called(choice.key)[0]:25} {choice.usd:.4f} USD")
assert campaign.usd <= 0.5

# %% [markdown]
# The list is JSON lines without seconds. Whoever has the GPUs fills them in, and the file comes back
# (`--measurements list.jsonl`). Here we only pretend: every kernel takes a tenth longer than believed.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "list.jsonl")
    rows = [json.loads(line) for line in study.measuring_list(campaign).splitlines()]
    for row in rows:
        entry = study.table.entry(study.candidates.keys.index(row["kernel"]), row["device"])
        row["seconds"] = 1.1 * entry.seconds
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = read_measurements(file)
informed = tvmhet.recommend(model, market=market, throughput_per_s=rate, measurements=measured)
print(f"measured: {informed.best.short}, right with {informed.confidence.probability:.0%}")

# %% [markdown]
# ## A training job
#
# With `global_batch` the model is trained: so many samples, so many of them in an iteration, and a deadline. Every
# fleet of the market is compared with the model on every device, the faster ones taking more of the batch; those
# that matter get a plan of their own, with stages, recomputation and unlike shares.
#
# First the cheapest way without any hurry, then with a deadline that no single type on this market can keep.

# %%
samples = 20_000_000
relaxed = tvmhet.recommend(model, market=market, samples=samples, global_batch=256)
hurried = tvmhet.recommend(model, market=market, samples=samples, global_batch=256, objective="time")
print(f"cheapest: {relaxed.best.short}, {relaxed.best.hours:.1f} h, {relaxed.best.usd:.2f} USD")
print(f"fastest:  {hurried.best.short}, {hurried.best.hours:.1f} h, {hurried.best.usd:.2f} USD")
print(f"fastest single type: {hurried.homogeneous.short}, {hurried.homogeneous.hours:.1f} h")
assert hurried.best.hours <= hurried.homogeneous.hours

# %%
deadline_h = hurried.best.hours * 1.15
job = tvmhet.recommend(model, market=market, samples=samples, global_batch=256, deadline_h=deadline_h)
print(job)
assert job.best.hours <= deadline_h

# %% [markdown]
# **at best** is a proof: work that no plan can avoid, on every fleet that was compared. So you know how much a better
# search could still find.
#
# The plan of the iteration is in `pipelines`, with the cluster it is for; `job.save("rent/")` writes both, for
# `tvmhet build --plan`.

# %%
(pipeline,) = job.pipelines
print(pipeline.plan)
assert pipeline.plan.training.global_batch == 256

# %% [markdown]
# ## Wishes that cannot be kept
#
# are refused, with the nearest that can, and where two contradict each other, it says which two.

# %%
try:
    tvmhet.recommend(model, market=market, samples=samples, global_batch=256, deadline_h=deadline_h, budget_usd=0.5)
except tvmhet.errors.Infeasible as refused:
    print(refused)
else:
    raise AssertionError("half a dollar does not pay for this job")
