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
# # Continue a text
#
# Ten minutes. A language model writes token by token, and keeps the keys and values of all tokens before. You place one
# over two unlike devices, continue two texts at once, hand one text's memory from one build to another, and plan for
# GPUs that this machine does not have.
#
# This file is a notebook. Run it as a script (`python tutorials/05_decode.py`), or open it in Jupyter with
#
#     jupytext --to notebook tutorials/05_decode.py
#     jupyter lab tutorials/05_decode.ipynb

# %%
import threading

import numpy as np
import torch

import tvmhet
from tvmhet import zoo
from tvmhet.cluster.cpu import read_cpu

small = {"layers": 4, "dim": 128, "heads": 4, "vocab": 500, "max_len": 64}
net, example = zoo.get("gpt2_decoder", **small)
print([tuple(x.shape) for x in example], [name for name, _ in net.named_buffers()][:2])

# %% [markdown]
# ## What calls hand on to each other
#
# The inputs are a token and its place. The keys and values are buffers, which `forward` writes into
# (`self.keys.index_copy_(2, at, k)`). What a call changes of its module is a *state* of the imported model. Static
# caches of transformers come in the same way: `from_torch(TorchExportableModuleWithStaticCache(model), batch)`.

# %%
model = tvmhet.from_torch(net, example, num_sessions=2)
print(len(model.states), "states, the first is", model.states[0].name, "and together", model.state_bytes, "bytes")
assert len(model.states) == 2 * small["layers"]
assert model.input_names == ("tokens", "at")

# %% [markdown]
# States stay on the devices that read and renew them: no call moves them. A *session* is a sequence of calls with
# states of its own. Calls of one session follow one another, so one session alone cannot keep two devices busy; with
# `num_sessions=2` the calls of two overlap, and memory is counted for two.

# %%
low, high = (f"cpu-{level}" for level in (read_cpu().levels[0], read_cpu().levels[-1]))
cluster = tvmhet.ClusterSpec.of({low: 1, high: 1} if low != high else {low: 2})
plan = tvmhet.plan(model, cluster=cluster)
print(plan)
assert any("2 sessions" in note for note in plan.notes)

# %% [markdown]
# ## Two texts at once
#
# `lib(...)` is a call of the first session, `lib.sessions[i](...)` of any. Each says what torch says.


# %%
def continued(call, first, count, begin=0):
    """Continue a text greedily."""
    said = [first]
    with torch.no_grad():
        for at in range(begin, begin + count):
            said.append(int(call(torch.tensor([[said[-1]]]), torch.tensor([at]))[0, -1].argmax()))
    return said


lib = tvmhet.build(model, cluster=cluster, plan=plan)
found = {}
threads = [
    threading.Thread(target=lambda s=s: found.update({s: continued(lib.sessions[s], 10 + s, 12)})) for s in range(2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

for session in range(2):
    alone, _ = zoo.get("gpt2_decoder", **small)
    print(found[session])
    assert found[session] == continued(alone, 10 + session, 12)

# %% [markdown]
# ## Read it, set it, begin anew
#
# `state()` copies a session's states, by the names that the module has for them; `set_state` replaces those that are
# named. So a text can be stored and taken up later, or elsewhere: here by a build that reads four tokens at once, for
# prompts, and hands over to the one that reads one.

# %%
prompt = torch.tensor([[3, 14, 15, 92]])
reader, four = zoo.get("gpt2_decoder", length=4, **small)
with tvmhet.build(tvmhet.from_torch(reader, four), cluster=cluster) as prefill:
    logits = prefill(prompt, torch.arange(4))
    lib.set_state(prefill.state())
said = continued(lib, int(logits[0, -1].argmax()), 6, begin=4)

by_torch, _ = zoo.get("gpt2_decoder", **small)
with torch.no_grad():
    first = int(by_torch(prompt, torch.arange(4))[0, -1].argmax())
assert said == continued(by_torch, first, 6, begin=4)

kept = lib.state()
lib.reset()
assert not any(value.any() for value in lib.state().values())
lib.set_state(kept)
assert all(np.array_equal(lib.state()[name], value) for name, value in kept.items())
lib.close()

# %% [markdown]
# ## Any input and result
#
# A model that takes its memory as an input and returns the next one, as many do that come from ONNX or Relax, is told
# which result becomes which input.


# %%
class Cell(torch.nn.Module):
    """One step of a recurrent network."""

    def __init__(self):
        super().__init__()
        self.own, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, memory, x):
        now = torch.tanh(self.own(x) + self.other(memory))
        return now, now.sum()


cell = Cell().eval()
stateful = tvmhet.with_state(tvmhet.from_torch(cell, (torch.zeros(8), torch.zeros(8))), {"memory": 0})
with tvmhet.build(stateful, cluster=tvmhet.ClusterSpec.of({low: 1})) as lib, torch.no_grad():
    memory = torch.zeros(8)
    for _ in range(3):
        x = torch.randn(8)
        memory, want = cell(memory, x)
        assert torch.allclose(lib(x), want, atol=1e-5)

# %% [markdown]
# ## For GPUs that are elsewhere
#
# Three layers of GPT-2 at full width, for a V100 and two T4. One session: each token waits for the one before, so the
# plan is the one of least latency. Eight: the devices work on several texts at once. Which of the two was planned, and
# how often results come, stands in the notes.

# %%
gpus = tvmhet.ClusterSpec.of({"v100-pcie-16gb": 1, "t4": 2})
net, example = zoo.get("gpt2_decoder", layers=3)
plans = {n: tvmhet.plan(tvmhet.from_torch(net, example, num_sessions=n), cluster=gpus) for n in (1, 8)}
for n, plan in plans.items():
    print(f"{n} sessions: latency {plan.latency_s * 1e3:.2f} ms, one result every {plan.period_s * 1e3:.2f} ms")
    print(plan.notes[-1])
assert plans[8].period_s < max(plans[1].period_s, plans[1].latency_s)
