"""Flat values and nested ones."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.nested import flat, nested, num_values

NESTINGS = st.recursive(st.none(), lambda part: st.lists(part, max_size=3).map(tuple), max_leaves=12).filter(
    lambda n: n is not None
)


@given(NESTINGS)
def test_flat_undoes_nested(nesting):
    values = tuple(np.float32(i) for i in range(num_values(nesting)))
    tree = nested(iter(values), nesting)
    assert flat([tree]) == values
    assert [type(part) is tuple for part in tree] == [part is not None for part in nesting]


def test_what_holds_numbers_is_one_value():
    assert flat(["a", [("b",), ["c", ()]], (4, 16), [[1.0]], [True]]) == ("a", "b", "c", (4, 16), [1.0], [True])
