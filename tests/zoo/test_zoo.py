"""Every model of the zoo, small: import, compile for the CPU, and give torch's own answer."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tvmhet import zoo
from tvmhet.errors import BadInput
from tvmhet.ir.importers import from_torch

SMALL = {
    "bert_base": {"layers": 2, "dim": 64, "heads": 2, "vocab": 100, "length": 16, "max_len": 32},
    "convnext_t": {"blocks": (1, 1, 1, 1), "widths": (8, 16, 24, 32), "image": 32, "num_classes": 10},
    "dlrm": {"tables": 3, "rows": 50, "batch": 4, "dim": 16, "bottom": (32,), "top": (32,)},
    "gpt2_decoder": {"layers": 2, "dim": 64, "heads": 2, "vocab": 100, "length": 3, "max_len": 16},
    "gpt2_small": {"layers": 2, "dim": 64, "heads": 2, "vocab": 100, "length": 16, "max_len": 32},
    "inception_v3": {"shrink": 8, "image": 75, "num_classes": 10},
    "lstm": {"batch": 2, "source_length": 4, "target_length": 3, "vocab": 50, "dim": 32, "layers": 3},
    "mobilenet_v3": {"width": 0.25, "image": 32, "num_classes": 10},
    "moe": {"batch": 2, "length": 8, "layers": 2, "dim": 32, "heads": 2, "hidden": 48, "experts": 4},
    "resnet50": {"blocks": (1, 1, 1, 1), "base_width": 8, "image": 32, "num_classes": 10},
    "t5_small": {
        "layers": 2, "dim": 32, "heads": 2, "head_dim": 16, "hidden": 64, "vocab": 100,
        "source_length": 12, "target_length": 8,
    },
    "vit_b16": {"layers": 2, "dim": 64, "heads": 2, "image": 32, "num_classes": 10},
}  # fmt: skip

#: Parameters at the published size, in millions, from the papers or torchvision's model table; by hand for the rest.
MILLIONS = {"resnet50": 25.6, "inception_v3": 23.8, "vit_b16": 86.6, "mobilenet_v3": 5.48, "convnext_t": 28.6}


def run(model, inputs):
    target = tvm.target.Target("llvm")
    executable = tvm.compile(model.mod, target=target, relax_pipeline=relax.get_default_pipeline(target))
    vm = relax.VirtualMachine(executable, tvm.cpu())
    first = [s.initial for s in model.states]
    result = vm["main"](*[tvm.runtime.tensor(x.numpy()) for x in inputs], *first, *model.params.values())
    return (result[0] if model.states else result).numpy()


def test_every_model_of_the_zoo_is_tested():
    assert set(SMALL) == set(zoo.MODELS)


#: Take longest to compile; the others cover their operators.
SLOW = {"inception_v3", "mobilenet_v3"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(SMALL)])
def test_small_model_gives_torchs_answer(name):
    module, inputs = zoo.get(name, **SMALL[name])
    with torch.no_grad():
        expected = module(*inputs).numpy()
    model = from_torch(module, inputs)
    assert model.whole_reason is None
    got = run(model, inputs)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_published_size(name):
    module, _ = zoo.get(name)
    count = sum(p.numel() for p in module.parameters()) / 1e6
    assert count == pytest.approx(MILLIONS[name], rel=0.01)


def test_the_same_seed_gives_the_same_weights():
    (one, x), (two, _) = zoo.get("resnet50", **SMALL["resnet50"]), zoo.get("resnet50", **SMALL["resnet50"])
    other, _ = zoo.get("resnet50", seed=1, **SMALL["resnet50"])
    assert torch.equal(one(*x), two(*x))
    assert not torch.equal(one(*x), other(*x))


def test_a_decoder_says_what_the_whole_text_says():
    sizes = {k: v for k, v in SMALL["gpt2_small"].items() if k != "length"}
    (whole, (text,)), (decoder, _) = zoo.get("gpt2_small", length=16, **sizes), zoo.get("gpt2_decoder", **sizes)
    decoder.load_state_dict(whole.state_dict())
    with torch.no_grad():
        want = whole(text)
        got = [decoder(text[:, :5], torch.arange(5))]  # the prompt, then token by token
        got += [decoder(text[:, i : i + 1], torch.tensor([i])) for i in range(5, 16)]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)


def test_unknown_name_lists_the_models():
    with pytest.raises(BadInput, match=r"no model 'resnet51'[\s\S]*resnet50"):
        zoo.get("resnet51")
