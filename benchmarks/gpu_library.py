"""Which of torch's ways is fastest on this machine's first GPU: a convolution with bias and relu, a product with bias?

    python -m benchmarks.gpu_library [--models inception_v3,convnext_t] [--batch 1,8]

The convolutions are those of models, or a few of ResNet-50 and Inception-v3 and the products of BERT-base. Float32
without TF32; microseconds of a run without its launch, operands warm in the cache. `library_steps.py` and
`library_products.py` choose by these figures. conv: F.conv2d; then: the same, a bias and a relu; joined:
cudnn_convolution_relu; as product: torch.matmul of a convolution of 1 x 1; in channels-last order too. copied: joined,
its result copied, as a library kernel does; in place: cuDNN into the result's memory, then bias and relu. mm, addmm: on
matrices in row order; T: the second transposed, as nn.Linear has it; act: torch._addmm_activation; split: the inner
dimension in parts, added up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from tvmhet import zoo
from tvmhet.runtime.cuda_times import run_times

Window = tuple[int, int]
Convolution = tuple[int, int, int, Window, int, Window]
_ONE, _THREE = (1, 1), (3, 3)
#: Input and output channels, pixels of a side, window, stride (padding is half a window): some of ResNet-50's, and
#: two of Inception-v3.
CONVOLUTIONS: tuple[tuple[int, int, int, Window, int], ...] = (
    (3, 64, 224, (7, 7), 2), (64, 64, 56, _ONE, 1), (64, 64, 56, _THREE, 1), (256, 64, 56, _ONE, 1),
    (64, 256, 56, _ONE, 1), (128, 128, 28, _THREE, 1), (512, 128, 28, _ONE, 1), (256, 256, 14, _THREE, 1),
    (1024, 256, 14, _ONE, 1), (256, 1024, 14, _ONE, 1), (512, 512, 7, _THREE, 1), (2048, 512, 7, _ONE, 1),
    (512, 2048, 7, _ONE, 1), (192, 192, 17, (1, 7), 1), (64, 96, 35, (5, 5), 1),
)  # fmt: skip
#: Rows, columns, inner dimension: those of BERT-base at 1 and 8 sequences, and the last of ResNet-50.
PRODUCTS = (
    (128, 768, 768), (128, 3072, 768), (128, 768, 3072), (1024, 768, 768), (1024, 3072, 768), (1024, 768, 3072),
    (1, 1000, 2048), (8, 1000, 2048),
)  # fmt: skip
_SPLITS = (2, 4, 8)


def microseconds(run: Callable[[], Any]) -> str:
    """The median of nine runs, or what torch said."""
    try:
        times_s, note = run_times(run, 0, True, 9, 1.0)
    except RuntimeError as error:
        return str(error).splitlines()[0][:60]
    return f"{median(times_s) * 1e6:.1f}" + (" launched" if note else "")


def convolutions_of(model: str) -> tuple[Convolution, ...]:
    """The distinct convolutions of a model of square images, those by groups left out."""
    module, example = zoo.get(model)
    found: dict[Convolution, None] = {}

    def note(conv: torch.nn.Module, given: tuple[torch.Tensor, ...], _out: torch.Tensor) -> None:
        if conv.groups == 1:
            _, c, side, _ = given[0].shape
            found[c, conv.out_channels, side, conv.kernel_size, conv.stride[0], conv.padding] = None  # type: ignore

    for part in module.modules():
        if isinstance(part, torch.nn.Conv2d):
            part.register_forward_hook(note)
    module.eval()(*example)
    return tuple(found)


def convolution(
    batch: int, c: int, o: int, side: int, window: Window, stride: int, padding: Window | None = None
) -> Iterator[str]:
    """One convolution in every way."""
    x, w, bias = (torch.rand(*s, device="cuda") for s in ((batch, c, side, side), (o, c, *window), (o,)))
    pad = [n // 2 for n in window] if padding is None else list(padding)
    yield from _in_order("", x, w, bias, stride, pad)
    stepped, out = [stride] * 2, F.conv2d(x, w, None, stride, pad)

    def in_place() -> torch.Tensor:
        torch.ops.aten.cudnn_convolution.out(x, w, pad, stepped, [1, 1], 1, False, False, False, out=out)
        return out.add_(bias[:, None, None]).relu_()

    yield "copied " + microseconds(lambda: out.copy_(torch.cudnn_convolution_relu(x, w, bias, stepped, pad, [1, 1], 1)))
    yield "in place " + microseconds(in_place)
    last = [t.to(memory_format=torch.channels_last) for t in (x, w)]
    yield from _in_order(" channels last", *last, bias, stride, pad)
    if window == (1, 1) and stride == 1 and pad == [0, 0]:
        pixels, flat = x.flatten(2), w.flatten(1)
        yield "as product " + microseconds(lambda: torch.matmul(flat, pixels))


def _in_order(
    order: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, stride: int, pad: list[int]
) -> Iterator[str]:
    yield f"conv{order} " + microseconds(lambda: F.conv2d(x, w, None, stride, pad))
    yield f"then{order} " + microseconds(lambda: F.conv2d(x, w, bias, stride, pad).relu_())
    yield f"joined{order} " + microseconds(
        lambda: torch.cudnn_convolution_relu(x, w, bias, [stride] * 2, pad, [1, 1], 1)
    )


def product(m: int, n: int, k: int) -> Iterator[str]:
    """One product in every way."""
    x, w, wt, bias = (torch.rand(*s, device="cuda") for s in ((m, k), (k, n), (n, k), (n,)))
    out = torch.empty(m, n, device="cuda")
    yield "mm " + microseconds(lambda: torch.mm(x, w, out=out))
    yield "mmT " + microseconds(lambda: torch.mm(x, wt.t(), out=out))
    yield "addmm " + microseconds(lambda: torch.addmm(bias, x, w, out=out))
    yield "addmmT " + microseconds(lambda: torch.addmm(bias, x, wt.t(), out=out))
    yield "act " + microseconds(lambda: torch._addmm_activation(bias, x, wt.t(), use_gelu=False))
    for parts in _SPLITS:
        xs, ws = x.reshape(m, parts, k // parts).transpose(0, 1), w.reshape(parts, k // parts, n)
        yield f"split {parts} " + microseconds(lambda xs=xs, ws=ws: torch.bmm(xs, ws).sum(0))  # type: ignore[misc]


def main() -> None:
    """Print a line for each convolution at batch 1 and 8, and for each product."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="whose convolutions; by default a few, and products")
    parser.add_argument("--batch", default="1,8", help="batch sizes of convolutions")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    print(f"{torch.cuda.get_device_name(0)}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    named = [shape for model in filter(None, args.models.split(",")) for shape in convolutions_of(model)]
    for batch in map(int, args.batch.split(",")):
        for shape in named or CONVOLUTIONS:
            print(batch, shape, " | ".join(convolution(batch, *shape)), flush=True)  # type: ignore[misc]
    for sizes in () if named else PRODUCTS:
        print(sizes, " | ".join(product(*sizes)), flush=True)


if __name__ == "__main__":
    main()
