"""The arguments of a call as flat values."""

from tvmhet.nested import flat


def test_what_holds_numbers_is_one_value():
    assert flat(["a", [("b",), ["c", ()]], (4, 16), [[1.0]], [True]]) == ("a", "b", "c", (4, 16), [1.0], [True])
