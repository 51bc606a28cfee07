"""What TVM's ONNX front end would compute wrongly without a word is refused, and only that."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_onnx


def resize(scales, images=1, **attributes):
    """Of one image, or of as many as there are: of a known number, what TVM lacks is written out."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
    dims = (("x", [images, 1, 4, 4]), ("y", list("abcd")))
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in dims]
    arrays = [numpy_helper.from_array(np.array(scales, "float32"), "scales")]
    graph = helper.make_graph([node], "g", info[:1], info[1:], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def one_node(operator, result=TensorProto.FLOAT, opset=20, **attributes):
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 4, 4]),
        helper.make_tensor_value_info("y", result, list("abcd")),
    ]
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def dropout(training):
    """Dropout with training_mode an initializer, or an input where it is None."""
    node = helper.make_node("Dropout", ["x", "", "training"], ["y"])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    mode = [] if training is None else [numpy_helper.from_array(np.array(training), "training")]
    inputs = [info[0], *([helper.make_tensor_value_info("training", TensorProto.BOOL, [])] if training is None else [])]
    graph = helper.make_graph([node], "g", inputs, info[1:], mode)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def expand(shape):
    """Expand to sizes that are known, or to an input where they are None."""
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 1])]
    known = [] if shape is None else [numpy_helper.from_array(np.array(shape), "s")]
    infos += [helper.make_tensor_value_info("s", TensorProto.INT64, [3])] if shape is None else []
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 6])
    graph = helper.make_graph([helper.make_node("Expand", ["x", "s"], ["y"])], "g", infos, [y], known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


REFUSED = {
    "expansion to an input": (expand(None), "sizes of the data where its shape, the input 's', has 1"),
    "dropout that drops": (dropout(True), "training_mode=true"),
    "dropout that may drop": (dropout(None), "training_mode, an input of the model"),
    "ratio": (resize([1, 1, 0.6, 0.6], "n", mode="linear"), r"scales=\[1.0, 1.0, 0.6, 0.6\]"),
    "ratio of nearest ones": (resize([1, 1, 0.6, 0.6], "n"), r"scales=\[1.0, 1.0, 0.6, 0.6\]: it uses the rounded"),
    "more channels": (resize([1, 2, 2, 2], "n"), r"scales=\[1.0, 2.0, 2.0, 2.0\] of images and channels"),
    "axes": (resize([2, 2], "n", axes=[2, 3]), ".*axes"),
    "symmetric": (
        resize([1, 1, 2, 2], "n", coordinate_transformation_mode="half_pixel_symmetric"),
        ".*half_pixel_symmetric",
    ),
    "antialias": (resize([1, 1, 0.5, 0.5], "n", mode="linear", antialias=1), "antialias"),
    "one-sided infinity": (one_node("IsInf", TensorProto.BOOL, 13, detect_negative=0), "detect_positive/negative=0"),
}
TAKEN = {
    "expansion": expand([2, 1, 6]),
    "dropout that drops nothing": dropout(False),
    "halves": resize([1, 1, 0.5, 0.5], mode="linear"),
    "doubles": resize([1, 1, 2, 2], mode="linear"),
    "nearest": resize([1, 1, 0.6, 0.6], mode="nearest"),
    "infinity": one_node("IsInf", TensorProto.BOOL),
    "one-sided infinity of a later set": one_node("IsInf", TensorProto.BOOL, detect_negative=0),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name):
    proto, words = REFUSED[name]
    with pytest.raises(UnsupportedOperator, match=rf"would be converted wrongly: TVM ignores {words}"):
        from_onnx(proto)


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_taken(name):
    assert from_onnx(TAKEN[name]).whole_reason is None
