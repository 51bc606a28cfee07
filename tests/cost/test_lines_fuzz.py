"""Whatever stands in a line, it is an operator with finite counts or one of our errors; and it is priced or refused."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.model import DTYPE_BYTES, KernelDesc
from tvmhet.cost.operators import COMMON, SCHEMA, parse
from tvmhet.cost.predict import Assumed
from tvmhet.cost.schema import EXAMPLES
from tvmhet.errors import HetError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5000),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["same", "add", "sum", "tvm", "fp16", "backward", "prefill"]),
    st.lists(st.integers(-1, 64), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
FIELDS = sorted({f for fields in SCHEMA.values() for f in fields} | {*COMMON, "pass", "phase", "kernel_size"})
OPS = st.one_of(st.sampled_from([*SCHEMA, "bmm", "attention", "gelu", "conv", "transpose", "mean"]), VALUES)


@st.composite
def changed_examples(draw):
    """A good line with one to three fields changed, added or left out."""
    op = draw(st.sampled_from(sorted(EXAMPLES)))
    record = {"op": op, **EXAMPLES[op]}
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from([*record, *FIELDS]))
        if field != "op" and draw(st.booleans()) and field in record:
            del record[field]
        else:
            record[field] = draw(OPS if field == "op" else VALUES)
    return record


@settings(max_examples=400, deadline=None)
@given(st.one_of(changed_examples(), st.dictionaries(st.sampled_from(["op", *FIELDS]), VALUES), VALUES))
def test_a_line_is_an_operator_or_an_error(record):
    try:
        desc = parse(record)
    except HetError as error:
        assert error.problem and error.remedy
        return
    if isinstance(desc, KernelDesc):
        assert all(math.isfinite(v) and v >= 0 for v in (desc.flop, desc.read_bytes, desc.write_bytes))


MODELS = [(device_type(d), LearnedModel.load(device_type(d))) for d in ("h100-sxm-80gb", "t4", "cpu-x86-64-v3")]
SIZES = st.one_of(st.integers(1, 64), st.integers(1, 10**6), st.sampled_from([1, 2**40]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(op for op in SCHEMA if "gpus" not in SCHEMA[op])), st.data())
def test_every_operator_is_priced_or_refused(op, data):
    """Sizes from 1 to the largest that a line may have: times are finite and inside their intervals, or refused."""
    record = {"op": op, **EXAMPLES[op], "dtype": data.draw(st.sampled_from(sorted(DTYPE_BYTES)))}
    for field, value in EXAMPLES[op].items():
        if isinstance(value, int) and not isinstance(value, bool) and field not in ("stride", "padding", "groups"):
            record[field] = data.draw(SIZES)
        elif field == "shape":
            record[field] = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    for device, model in MODELS:
        try:
            found = Assumed(device, model).predict([parse(record)])
        except HetError as error:
            assert error.problem and error.remedy
            continue
        assert 0 < found.low[0] <= found.seconds[0] <= found.high[0] < math.inf
