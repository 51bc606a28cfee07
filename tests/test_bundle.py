"""Bundles: what is exported is loaded, damage is found before anything is loaded, nothing is ever half-written."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import assert_same, cpus, run_stages
from tests.small_models import SMALL_MODELS
from tvmhet import bundle as bundle_module
from tvmhet.bundle import read_bundle
from tvmhet.errors import BadBundle, BadInput, HetError, PlanMismatch
from tvmhet.module import HetModule

TWO = cpus(v2=1, v3=1)


@pytest.fixture(autouse=True, scope="module")
def own_caches(tmp_path_factory):
    """A cache of stages and a database of measurements that no other run wrote."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TVMHET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def built():
    """A model of two stages: its module, its inputs, torch's answer."""
    module, inputs = SMALL_MODELS["conv"]()
    lib = tvmhet.build(tvmhet.from_torch(module, inputs), cluster=TWO, pin={"c1": "cpu-v2", "fc": "cpu-v3"})
    assert len(lib.plan.stages) == 2
    with torch.no_grad():
        return lib, inputs, module(*inputs)


@pytest.fixture(scope="module")
def pristine(built, tmp_path_factory):
    """A bundle that no test changes."""
    return built[0].export(tmp_path_factory.mktemp("bundles") / "bundle")


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of the bundle that a test may damage."""
    return shutil.copytree(pristine, tmp_path / "bundle")


def test_a_round_trip_keeps_plan_program_and_answer(built, pristine):
    lib, inputs, expected = built
    assert sorted(p.name for p in pristine.iterdir()) == [
        "manifest.json", "params.safetensors", "stage0.so", "stage1.so",
    ]  # fmt: skip
    again = tvmhet.load(pristine)
    assert again.plan == lib.plan
    assert again.program.inputs == lib.program.inputs and again.program.outputs == lib.program.outputs
    assert again.program.structure == "single"
    assert_same(run_stages(again.program, *inputs), expected)


def test_a_bundle_needs_nothing_of_the_machine_that_made_it(built, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "empty"))
    _, inputs, expected = built
    moved = folder.rename(tmp_path / "elsewhere")
    assert_same(run_stages(tvmhet.load(moved).program, *inputs), expected)
    assert not (tmp_path / "empty").exists()
    assert str(folder) not in (moved / "manifest.json").read_text()


class Typed(nn.Module):
    """Parameters of every kind: bfloat16, a scalar, an integer, a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4).bfloat16())
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)
        self.keep = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)

    def forward(self, x):
        h = torch.relu(x.bfloat16() @ self.w).float() * self.scale
        return torch.where(self.keep, h, 0.0) + self.order


def test_parameters_of_every_dtype_and_rank_come_back(tmp_path):
    torch.manual_seed(0)
    module, x = Typed().eval(), torch.randn(3, 4)
    lib = tvmhet.build(tvmhet.from_torch(module, (x,)), cluster=cpus(v3=1))
    again = tvmhet.load(lib.export(tmp_path / "bundle"))
    assert {v.dtype.name for v in again.program.params.values()} >= {"bfloat16", "float32", "bool"}
    for name, value in lib.program.params.items():
        assert again.program.params[name].shape == value.shape
        assert again.program.params[name].tobytes() == np.ascontiguousarray(value).tobytes()
    with torch.no_grad():
        assert_same(run_stages(again.program, x), module(x), "bfloat16")


@pytest.mark.parametrize("inline", [True, False])
def test_a_loaded_bundle_holds_its_parameters_once(tmp_path, inline):
    """Kernels, in this process or in workers, read the very memory that the bundle was read into."""
    x = torch.randn(2, 4)
    built = tvmhet.build(tvmhet.from_torch(nn.Linear(4, 3).eval(), (x,)), cluster=cpus(v2=1))
    loaded = HetModule(*read_bundle(built.export(tmp_path / "bundle")), inline=inline)
    with loaded:
        assert np.any(np.asarray(loaded(x.numpy())) != 0)
        for value in loaded.program.params.values():
            value[...] = 0
        assert np.all(np.asarray(loaded(x.numpy())) == 0)


class Double(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def test_a_whole_model_round_trips(tmp_path):
    batch = torch.export.Dim("batch", min=1, max=64)
    model = tvmhet.from_torch(Double(), (torch.randn(4, 3),), dynamic_shapes=({0: batch},))
    path = tvmhet.build(model, cluster=TWO).export(tmp_path / "bundle")
    with tvmhet.load(path) as lib:
        assert lib.plan.whole_reason
        x = torch.randn(5, 3)
        torch.testing.assert_close(lib(x), torch.relu(x) * 2)


# ---- damage


def edit(**changes):
    def apply(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def flip(name):
    def apply(folder):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return apply


def redirect(folder):
    path = folder / "manifest.json"
    tree = json.loads(path.read_text())
    tree["stages"][0]["library"] = "../elsewhere.so"
    path.write_text(json.dumps(tree))


def drop(key):
    def apply(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))

    return apply


DAMAGES = {
    "a library tampered with": (flip("stage0.so"), BadBundle, "'stage0.so' of bundle .* was changed"),
    "parameters tampered with": (
        flip("params.safetensors"),
        BadBundle,
        "'params.safetensors' of bundle .* was changed",
    ),
    "a file missing": (lambda f: (f / "stage1.so").unlink(), BadBundle, "has no file 'stage1.so'"),
    "another schema": (edit(schema=99), BadBundle, "has schema 99, this tvmhet reads 1"),
    "another TVM": (edit(tvm="0.1.2"), PlanMismatch, r"was built by TVM 0\.1\.2, this is TVM 0\.27"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), BadBundle, "cannot be read"),
    "an empty manifest": (lambda f: (f / "manifest.json").write_text(""), BadBundle, "is damaged"),
    "a manifest of another kind": (lambda f: (f / "manifest.json").write_text("[1]"), BadBundle, "is damaged"),
    "binary manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), BadBundle, "is damaged"),
    "no plan": (drop("plan"), BadBundle, "is damaged"),
    "no hashes": (drop("sha256"), BadBundle, "is damaged"),
    "a library elsewhere": (redirect, BadBundle, r"names '\.\./elsewhere\.so', which its hashes do not cover"),
    "hashes of nothing": (edit(sha256={}), BadBundle, "which its hashes do not cover"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_anything_is_loaded(folder, damage):
    apply, kind, words = DAMAGES[damage]
    apply(folder)
    with pytest.raises(kind, match=words) as error:
        tvmhet.load(folder)
    assert isinstance(error.value, HetError) and error.value.remedy
    assert str(folder) in str(error.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(BadBundle, match="cannot be read"):
        tvmhet.load(tmp_path / "nothing")


# ---- writing


def test_a_folder_with_something_in_it_is_refused_and_kept(built, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(BadInput, match="is not empty"):
        built[0].export(tmp_path / "mine")
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(BadInput, match="is not empty"):
        built[0].export(tmp_path / "file")
    assert (tmp_path / "mine" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "keep me"


def test_an_empty_folder_and_missing_parents_are_taken(built, tmp_path):
    (tmp_path / "empty").mkdir()
    built[0].export(tmp_path / "empty")
    built[0].export(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "empty" / "manifest.json").exists() and (tmp_path / "a" / "b" / "c" / "manifest.json").exists()


def test_nothing_is_left_of_an_export_that_fails(built, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_module, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        built[0].export(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []
