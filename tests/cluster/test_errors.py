"""What people read when a cluster file is wrong: each text names the place, the thing, the limit and the remedy."""

import pytest

from tvmhet.cluster import ClusterSpec
from tvmhet.errors import BadClusterFile, BadQuantity, EmptyCluster, HetError, UnknownDeviceType

# name -> (file, error type, line that it must name; 0: none)
CASES = {
    "unknown key": ("nodes:\n  - devcies: {v100: 2}\n", BadClusterFile, 2),
    "unknown key at the top": ("node:\n  - devices: {v100: 2}\n", BadClusterFile, 1),
    "unknown key in a list of pairs": (
        "nodes: [{name: a, devices: {v100: 2}}, {name: b, devices: {t4: 1}}]\n"
        "network:\n  bandwidth: 1 GB/s\n  latency: 5 us\n  pairs:\n    - nodes: [a, b]\n      bandwith: 2 GB/s\n",
        BadClusterFile, 7,
    ),
    "unknown device type": ("nodes:\n  - devices:\n      t4: 1\n      v10: 2\n", UnknownDeviceType, 4),
    "unknown type in a market": ("market:\n  - {type: h10, price: 2 USD/h, max_count: 1}\n", UnknownDeviceType, 2),
    "unknown type to be like": ("device_types:\n  x:\n    like: a10000\n", UnknownDeviceType, 2),
    "bare number": ("nodes:\n  - devices: {v100: 2}\n    link:\n      bandwidth: 900\n", BadQuantity, 4),
    "bare memory": ("nodes:\n  - devices:\n      v100: {count: 2, memory: 16}\n", BadQuantity, 3),
    "bare price": ("market:\n  - type: v100\n    price: 2.49\n    max_count: 8\n", BadQuantity, 3),
    "unit of another dimension": (
        "device_types:\n  x:\n    like: t4\n    rates:\n      float16: 65 GB/s\n", BadQuantity, 5,
    ),
    "unknown unit": ("nodes:\n  - devices:\n      v100: {count: 2, memory: 16 gib}\n", BadQuantity, 3),
    "negative quantity": ("nodes:\n  - devices:\n      v100: {count: 2, memory: -16 GiB}\n", BadQuantity, 3),
    "zero bandwidth": ("nodes: [{devices: {t4: 1}}]\nnetwork:\n  bandwidth: 0 GB/s\n  latency: 5 us\n", BadQuantity, 3),
    "negative count": ("nodes:\n  - devices:\n      v100: -1\n", BadClusterFile, 3),
    "devices without end": ("nodes:\n  - devices:\n      v100: 1_000_000_000_000\n", BadClusterFile, 2),
    "machines without end": ("nodes:\n  - {count: 200000, devices: {v100: 1}}\n", BadClusterFile, 2),
    "fractional count": ("nodes:\n  - devices:\n      v100: 1.5\n", BadClusterFile, 3),
    "count in words": ("nodes:\n  - devices:\n      v100: two\n", BadClusterFile, 3),
    "zero machines": ("nodes:\n  - count: 0\n    devices: {t4: 1}\n", BadClusterFile, 2),
    "no devices": ("nodes:\n  - name: a\n", BadClusterFile, 2),
    "a name for nodes": ("nodes: v100\n", BadClusterFile, 1),
    "a list for the file": ("- v100\n- t4\n", BadClusterFile, 1),
    "a bad name": ("nodes:\n  - name: my box/1\n    devices: {t4: 1}\n", BadClusterFile, 2),
    "the same key twice": ("nodes:\n  - devices:\n      t4: 1\n      t4: 2\n", BadClusterFile, 4),
    "one type by two names": ("nodes:\n  - devices:\n      v100: 1\n      v100-sxm2-16gb: 2\n", BadClusterFile, 4),
    "two nodes of one name": (
        "nodes: [{name: a, devices: {t4: 1}}, {name: a, devices: {t4: 1}}]\n",
        BadClusterFile, 1,
    ),
    "no network": ("nodes:\n  - devices: {v100: 1}\n  - devices: {t4: 1}\n", BadClusterFile, 1),
    "a pair of unknown nodes": (
        "nodes: [{name: left, devices: {t4: 2}}, {name: right, devices: {t4: 1}}]\nnetwork:\n  bandwidth: 1 GB/s\n"
        "  latency: 5 us\n  pairs: [{nodes: [left, rigth], bandwidth: 2 GB/s, latency: 5 us}]\n",
        BadClusterFile, 5,
    ),
    "unknown link class": ("nodes:\n  - devices: {t4: 1}\n    link: nvlnk\n", BadClusterFile, 3),
    "nvlink without nvlink": ("nodes:\n  - devices: {t4: 1}\n    link: nvlink\n", BadClusterFile, 3),
    "nvlink to the host": ("nodes:\n  - devices: {v100: 1}\n    host_link: nvlink\n", BadClusterFile, 3),
    "half a link": ("nodes:\n  - devices: {t4: 1}\n    link: {bandwidth: 5 GB/s}\n", BadClusterFile, 3),
    "a device type without figures": ("device_types:\n  x:\n    memory: 3 GiB\n", BadClusterFile, 2),
    "a device type of another kind": (
        "device_types:\n  x:\n    target: {kind: rocm}\n    memory: 3 GiB\n    bandwidth: 1 GB/s\n"
        "    rates: {float32: 1 TFLOP/s}\n",
        BadClusterFile, 2,
    ),
    "cores for a GPU": ("nodes:\n  - devices:\n      t4: {count: 1, cores: 2}\n", BadClusterFile, 3),
    "an empty file": ("# nothing yet\n", EmptyCluster, 0),
    "a cluster without devices": ("nodes:\n  - devices: {t4: 0}\n", EmptyCluster, 1),
    "an empty mapping": ("{}\n", EmptyCluster, 1),
    "broken YAML": ("nodes:\n  - devices: {t4: 1\n    link: pcie3\n", BadClusterFile, 3),
    "a number that is none": ("nodes:\n  - name: !!int x\n", BadClusterFile, 2),
    "a date": ("nodes:\n  - devices:\n      t4: 2001-99-99\n", BadClusterFile, 3),
    "a key that is a list": ("nodes:\n  - devices: {[t4]: 1}\n", BadClusterFile, 2),
    "an alias that holds itself": ("nodes: &n\n  - *n\n", BadClusterFile, 0),
    "a tab": ("nodes:\n\t- devices: {t4: 1}\n", BadClusterFile, 2),
    "a YAML tag": ("nodes: !!python/object/apply:os.getcwd []\n", BadClusterFile, 1),
    "a merge key": ("x: &x {t4: 1}\nnodes:\n  - devices: {<<: *x}\n", BadClusterFile, 3),
    "two documents": ("nodes: [{devices: {t4: 1}}]\n---\nnodes: []\n", BadClusterFile, 2),
}  # fmt: skip


def error_of(text: str) -> HetError:
    with pytest.raises(HetError) as caught:
        ClusterSpec.from_yaml(text)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_an_error_has_its_type_its_line_and_a_remedy(name):
    text, kind, line = CASES[name]
    error = error_of(text)
    assert type(error) is kind
    assert error.remedy
    assert str(error).startswith(f"[{kind.code}] <text>:" + (f"{line}: " if line else " "))
    assert "\0" not in str(error)


def test_the_texts_of_errors(golden):
    parts = [f"## {name}\n{text.rstrip()}\n-->\n{error_of(text)}\n" for name, (text, _, _) in CASES.items()]
    golden("cluster_errors.txt", "\n".join(parts))


def test_an_alias_bomb_is_refused():
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(BadClusterFile, match="more than 100000 values"):
        ClusterSpec.from_yaml("a0: &a0 [x]\n" + levels)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("nodes:\n  - devcies: {}\n")
    with pytest.raises(BadClusterFile, match=r"fleet\.yaml:2: unknown key 'devcies' in nodes\[0\]"):
        ClusterSpec.from_file(path)
    with pytest.raises(BadClusterFile, match="cannot be read"):
        ClusterSpec.from_yaml(tmp_path / "none.yaml")


def test_values_without_a_text_have_no_line():
    with pytest.raises(BadQuantity, match=r"<values>: nodes\[0\]\.devices\.t4\.memory is 16, which has no unit"):
        ClusterSpec.from_dict({"nodes": [{"devices": {"t4": {"count": 1, "memory": 16}}}]})
