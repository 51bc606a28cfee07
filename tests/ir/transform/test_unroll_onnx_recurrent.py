"""Recurrent ONNX operators written out equal the recurrences that ONNX defines them by, computed here in numpy."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.ir.test_importers import run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx
from tvmhet.ir.transform.unroll_onnx_recurrent import unroll_onnx_recurrent

STEPS, BATCH, INPUTS, HIDDEN = 4, 2, 3, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"Sigmoid": lambda v: 1 / (1 + np.exp(-v)), "Tanh": np.tanh, "Relu": lambda v: np.maximum(v, 0)}


def layer(kind, *, bias=True, states=False, peepholes=False, lengths=None, opset=17, **attributes):
    """A model of one recurrent operator with drawn weights, which are initializers; x is its input."""
    draw = np.random.default_rng(0)
    dirs, gates = 2 if attributes.get("direction") == "bidirectional" else 1, GATES[kind]
    first = [BATCH, STEPS] if attributes.get("layout") else [STEPS, BATCH]
    state = [BATCH, dirs, HIDDEN] if attributes.get("layout") else [dirs, BATCH, HIDDEN]
    weights = {"w": [dirs, gates * HIDDEN, INPUTS], "r": [dirs, gates * HIDDEN, HIDDEN]}
    weights |= {"b": [dirs, 2 * gates * HIDDEN]} if bias else {}
    weights |= {"h": state} | ({"c": state} if kind == "LSTM" else {}) if states else {}
    weights |= {"p": [dirs, 3 * HIDDEN]} if peepholes else {}
    tensors = {n: draw.standard_normal(s).astype("float32") for n, s in weights.items()}
    tensors |= {} if lengths is None else {"lengths": np.array(lengths, "int32")}
    order = ["x", "w", "r", "b", "lengths", "h", *(["c", "p"] if kind == "LSTM" else [])]
    results = ["y", "y_h", "y_c"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(
        kind, [n if n == "x" or n in tensors else "" for n in order], results, hidden_size=HIDDEN, **attributes
    )
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*first, INPUTS])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results],
        [numpy_helper.from_array(t, n) for n, t in tensors.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return proto, draw.standard_normal([*first, INPUTS]).astype("float32"), tensors


def expected(kind, x, t, *, direction="forward", layout=0, clip=np.inf, linear_before_reset=0, activations=None, **_):
    """The recurrence, one direction and one step at a time."""
    defaults = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[kind]
    x = x.swapaxes(0, 1) if layout else x
    dirs = 2 if direction == "bidirectional" else 1
    names = activations or defaults * dirs
    ys, hs, cs = [], [], []
    for d in range(dirs):
        act = [
            lambda v, f=FUNCTIONS[n]: f(np.clip(v, -clip, clip))
            for n in names[d * len(defaults) : (d + 1) * len(defaults)]
        ]
        w, r = (np.split(t[n][d], GATES[kind]) for n in "wr")
        both = t["b"][d] if "b" in t else np.zeros(2 * GATES[kind] * HIDDEN)
        wb, rb = (np.split(part, GATES[kind]) for part in np.split(both, 2))
        pick = (lambda n: t[n][:, d] if layout else t[n][d]) if "h" in t else (lambda n: np.zeros((BATCH, HIDDEN)))  # noqa: B023
        h, c = pick("h"), pick("c") if kind == "LSTM" else None
        pi, po, pf = np.split(t["p"][d], 3) if "p" in t else (0, 0, 0)
        steps = range(STEPS)[::-1] if d or direction == "reverse" else range(STEPS)
        outs = [None] * STEPS
        for s in steps:
            into = [x[s] @ w[g].T + wb[g] for g in range(GATES[kind])]
            if kind == "RNN":
                h = act[0](into[0] + h @ r[0].T + rb[0])
            elif kind == "GRU":
                z, reset = (act[0](into[g] + h @ r[g].T + rb[g]) for g in (0, 1))
                inner = reset * (h @ r[2].T + rb[2]) if linear_before_reset else (reset * h) @ r[2].T + rb[2]
                h = (1 - z) * act[1](into[2] + inner) + z * h
            else:
                i, o, f, g = (into[k] + h @ r[k].T + rb[k] for k in range(4))
                c = act[0](f + pf * c) * c + act[0](i + pi * c) * act[1](g)
                h = act[0](o + po * c) * act[2](c)
            outs[s] = h
        ys.append(np.stack(outs)), hs.append(h), cs.append(c)
    y = np.stack(ys, 1)
    results = [y.transpose(2, 0, 1, 3) if layout else y]
    results += [np.stack(v, 1 if layout else 0) for v in ([hs, cs] if kind == "LSTM" else [hs])]
    return results


TAKEN = {
    "one step after the other": ("LSTM", {}),
    "both directions": ("LSTM", {"direction": "bidirectional", "states": True}),
    "peepholes": ("LSTM", {"peepholes": True, "states": True, "clip": 0.4}),
    "backwards": ("LSTM", {"direction": "reverse", "bias": False, "lengths": [STEPS, STEPS]}),
    "batch first": ("LSTM", {"layout": 1, "states": True, "direction": "bidirectional"}),
    "GRU": ("GRU", {"direction": "bidirectional", "states": True}),
    "GRU, no bias": ("GRU", {"bias": False}),
    "GRU, reset after": ("GRU", {"linear_before_reset": 1, "direction": "reverse"}),
    "RNN": ("RNN", {"direction": "bidirectional", "layout": 1}),
    "RNN, relu": ("RNN", {"activations": ["Relu"], "states": True}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_written_out(name):
    kind, options = TAKEN[name]
    proto, x, tensors = layer(kind, **options)
    before = proto.SerializeToString()
    plain = unroll_onnx_recurrent(proto)
    assert proto.SerializeToString() == before
    assert not {n.op_type for n in plain.graph.node} & GATES.keys()
    for got, want in zip(
        ReferenceEvaluator(plain).run(None, {"x": x}), expected(kind, x, tensors, **options), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["both directions", "GRU", "RNN"])
def test_imported(name):
    kind, options = TAKEN[name]
    proto, x, tensors = layer(kind, **options)
    for got, want in zip(run(from_onnx(proto), x), expected(kind, x, tensors, **options), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"lengths": [STEPS, 2]}, {"input_forget": 1}, {"activations": ["Elu", "Tanh", "Tanh"]}, {"opset": 10}]
)
def test_what_is_not_written_out_is_refused(options):
    proto, _, _ = layer("LSTM", **options)
    assert unroll_onnx_recurrent(proto).graph.node[0].op_type == "LSTM"
    with pytest.raises(UnsupportedOperator, match=r"ONNX operator LSTM \(node '#0' making \['y', 'y_h', 'y_c'\]\)"):
        from_onnx(proto)


def test_other_models_are_returned_as_they_are():
    node = helper.make_node("Relu", ["x"], ["y"])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    proto = onnx.helper.make_model(helper.make_graph([node], "g", info[:1], info[1:]))
    assert unroll_onnx_recurrent(proto) is proto
