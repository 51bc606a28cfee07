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
# # Training over unlike devices
#
# Ten minutes. You import a whole training step of a torch module, let tvmhet cut it over two unlike processors, run
# some steps, stop and go on from a checkpoint, and compare every loss with torch's. Then memory gets short. A Linux
# machine with two x86-64 cores that have AVX2 will do; no GPU is needed.
#
# This file is a notebook. Run it as a script (`python tutorials/03_train.py`), or open it in Jupyter with
#
#     jupytext --to notebook tutorials/03_train.py
#     jupyter lab tutorials/03_train.ipynb

# %%
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import tvmhet
from tvmhet.training_checkpoint import torch_state_dict

torch.manual_seed(0)
WIDTH, CLASSES = 512, 10
layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
reference = copy.deepcopy(net)  # trained by torch, for comparison

# %% [markdown]
# ## A training step
#
# The step is one function of the batch: forward pass, loss, backward pass. The example inputs are one *micro-batch*:
# a step runs several of them, adds their gradients, and then updates the parameters once. The import compares each
# operator's shape and dtype with torch's; nothing is computed yet.

# %%
MICRO, GLOBAL = 256, 1024
step = tvmhet.from_torch(
    net, torch.zeros(MICRO, WIDTH), loss="cross_entropy", optimizer="adamw", lr=1e-3, mode="training"
)
print(len(step.trained), "parameters have a gradient, such as", [step.torch_names[n] for n in step.trained[:3]])
assert len(step.trained) == len(list(net.parameters()))

# %% [markdown]
# Errors name the place. An operator without a gradient, for instance:

# %%
try:
    tvmhet.from_torch(net, torch.zeros(MICRO, WIDTH), loss=lambda y: y.argmax(-1).float().mean(), mode="training")
except tvmhet.HetError as error:
    print(error)
    assert "argmax" in str(error)

# %% [markdown]
# ## A plan
#
# Two device types on this machine: one core held to SSE4.2 (`v2`), one that may use AVX2 (`v3`). The plan says which
# forward operators form a stage, on which device; each backward operator follows its forward operator. It also says
# in which order the micro-batches run (the schedule), and what each stage keeps in memory or computes again.

# %%
cluster = tvmhet.ClusterSpec.from_yaml("""
nodes:
  - name: here
    devices: {cpu-x86-64-v2: 1, cpu-x86-64-v3: 1}
    link: shm
""")
plan = tvmhet.plan(step, cluster=cluster, mode="training", global_batch=GLOBAL, makers=("tvm",))
print(plan)

# %% [markdown]
# Read the table from the left: a stage, its devices, the time of one micro-batch forward and backward, what goes to the
# neighbours, the exchange of gradients between replicas (none here), the update, the memory, and how many micro-batches
# are in flight at most. The *bubble* is the part of the iteration in which a stage waits for its first or its last
# micro-batch. The lower bound says how far from the best the plan can be, by the same times.

# %%
assert plan.training.num_microbatches == GLOBAL // MICRO
print([s.placement.devices for s in plan.stages])
assert plan.lower_bound <= plan.objective_value

# %% [markdown]
# ## Steps
#
# `build` compiles each stage's forward, backward and update for its device; workers start at the first step. The data
# here is a fixed random labelling: the loss falls as the network learns it by heart.


# %%
def batch(number):
    """Return the inputs and classes of one step."""
    generator = torch.Generator().manual_seed(number % 4)
    return torch.randn(GLOBAL, WIDTH, generator=generator), torch.randint(0, CLASSES, (GLOBAL,), generator=generator)


folder = Path(tempfile.mkdtemp())
trainer = tvmhet.build(step, cluster=cluster, plan=plan, global_batch=GLOBAL, makers=("tvm",))
with trainer:
    losses = trainer.fit((batch(i) for i in range(6)), steps=6)
    trainer.save(folder / "run.safetensors")
    later = trainer.fit((batch(i) for i in range(6, 10)), steps=4)
print("losses:", [f"{loss:.4f}" for loss in losses + later])
assert later[-1] < losses[0]

# %% [markdown]
# ## A checkpoint
#
# A checkpoint appears whole or not at all. A run that goes on from it makes the same numbers, bit for bit, as the one
# that was not stopped; and torch reads its parameters.

# %%
with tvmhet.build(step, cluster=cluster, plan=plan, global_batch=GLOBAL, makers=("tvm",)) as resumed:
    state = resumed.restore(folder / "run.safetensors")
    again = resumed.fit((batch(i) for i in range(state.step, 10)), steps=4)
print("went on from step", state.step)
assert again == later
net.load_state_dict(torch_state_dict(folder / "run.safetensors"))

# %% [markdown]
# ## Torch says the same
#
# The same ten steps by torch in one process: the same micro-batches, and the mean of their losses.

# %%
optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
expected = []
for i in range(10):
    inputs, classes = batch(i)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(reference(inputs), classes)
    loss.backward()
    optimizer.step()
    expected.append(loss.item())
worst = max(abs(a - b) / b for a, b in zip(losses + later, expected, strict=True))
print(f"largest relative difference of a loss: {worst:.1e}")
assert worst < 1e-3

# %% [markdown]
# ## Groups of parameters, and a rate that changes
#
# An optimiser of torch.optim may be given as it is; its groups keep their options. Here matrices decay and biases do
# not, and the rate follows torch's scheduler, which `fit` steps along.

# %%
decayed = [p for p in net.parameters() if p.ndim > 1]
biases = [p for p in net.parameters() if p.ndim == 1]
grouped = torch.optim.AdamW([{"params": decayed}, {"params": biases, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(grouped, T_max=4)
step2 = tvmhet.from_torch(net, torch.zeros(MICRO, WIDTH), loss="cross_entropy", optimizer=grouped, mode="training")
with tvmhet.build(step2, cluster=cluster, global_batch=GLOBAL, makers=("tvm",)) as second:
    more = second.fit((batch(i) for i in range(4)), lr=scheduler)
    print("losses:", [f"{loss:.4f}" for loss in more], "rates of the two groups now:", second.lr)
assert second.lr[0] < 1e-3

# %% [markdown]
# ## Short of memory
#
# A device's memory is a limit that its worker process keeps: what does not fit on paper does not run. Where a plan
# would need too much, another schedule may keep fewer micro-batches at once, or a stage keeps only inputs and computes
# the rest again, for time. Where nothing fits, that is an error.

# %%
most = max(s.memory_bytes for s in plan.stages)
for share in (0.9, 0.8, 0.7, 0.5):
    tight = tvmhet.ClusterSpec.from_yaml(f"""
nodes:
  - name: here
    devices:
      cpu-x86-64-v2: {{count: 1, memory: {int(share * most)} B}}
      cpu-x86-64-v3: {{count: 1, memory: {int(share * most)} B}}
    link: shm
""")
    try:
        found = tvmhet.plan(step, cluster=tight, mode="training", global_batch=GLOBAL, makers=("tvm",))
    except tvmhet.HetError as error:
        print(f"{share:.0%} of {most / 2**20:.1f} MiB: {error}")
        break
    kept = ["computes again" if s.recompute else "keeps" for s in found.training.stages]
    print(f"{share:.0%} of {most / 2**20:.1f} MiB: {found.training.schedule}, stages {kept}")
    assert max(s.memory_bytes for s in found.stages) <= share * most

# %% [markdown]
# ## What next
#
# - `tvmhet plan my.models:net --cluster FILE --mode training --loss cross_entropy --global-batch N` prints such a plan
#   from the command line; `tvmhet build` with the same options and `--out step/` writes what
#   `tvmhet.load_trainer("step/")` reads.
# - For GPUs a step is planned, compiled and exported in the same way, on a machine without one too. So far it has run
#   on emulated GPUs only; `make check-gpu` trains a step on yours.
# - `build(..., max_norm=1.0)` clips the norm of all gradients together; `seed=` fixes what dropout drops.
