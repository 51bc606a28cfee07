"""The stage cache: found by content, checked before it is believed, whole or absent on disk."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm

from tests.emit.modules import chain
from tvmhet.emit import cache as cache_module
from tvmhet.emit.build import compile_to
from tvmhet.emit.cache import StageCache, default_cache_dir, target_digest
from tvmhet.emit.lower import lowering_version
from tvmhet.errors import BadInput

LLVM = {"kind": "llvm"}
STAGE = chain("exp")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "stage.so"
    compile_to(STAGE, LLVM, path)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path, compiled):
    """A cache that holds STAGE for LLVM."""
    cache = StageCache(tmp_path / "cache")
    cache.add(STAGE, LLVM, False, written(tmp_path / "new.so", compiled))
    return cache


def written(path, data):
    path.write_bytes(data)
    return path


def entry(cache):
    return cache.place(STAGE, LLVM)


def test_an_equal_module_hits_and_the_library_loads(cache, compiled):
    found = cache.find(chain("exp"), dict(LLVM))
    assert found is not None and found.read_bytes() == compiled
    assert tvm.runtime.load_module(str(found)) is not None
    card = json.loads((entry(cache) / "card.json").read_text())
    assert card["target"] == LLVM and card["tvm"] == tvm.__version__


@pytest.mark.parametrize(
    ("stage", "target", "plain"),
    [
        (chain("tanh"), LLVM, False),
        (chain("exp", side=9), LLVM, False),
        (STAGE, {"kind": "llvm", "mcpu": "x86-64-v3"}, False),
        (STAGE, LLVM, True),
    ],
    ids=["operator", "shape", "target", "lowering"],
)
def test_anything_else_misses(cache, stage, target, plain):
    assert cache.find(stage, target, plain) is None


def test_another_tvm_or_lowering_is_another_digest(monkeypatch):
    here = target_digest(LLVM, False)
    assert target_digest(LLVM, True) != here
    monkeypatch.setattr(cache_module, "lowering_version", lambda kind: lowering_version(kind) + 1)
    assert target_digest(LLVM, False) != here
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "TVM_VERSION", "0.0.0")
    assert target_digest(LLVM, False) != here


def test_a_hash_collision_is_a_miss_and_is_replaced(cache, compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "structural_hash", lambda _: 42)
    collided = StageCache(tmp_path / "collided")
    collided.add(STAGE, LLVM, False, written(tmp_path / "a.so", compiled))
    other = chain("tanh")
    assert collided.place(other, LLVM) == collided.place(STAGE, LLVM)
    assert collided.find(other, LLVM) is None
    collided.add(other, LLVM, False, written(tmp_path / "b.so", compiled))
    assert collided.find(other, LLVM) is not None
    assert collided.find(STAGE, LLVM) is None


def truncate(place):
    (place / "stage.so").write_bytes((place / "stage.so").read_bytes()[:-1])


def swap_byte(place):
    data = bytearray((place / "stage.so").read_bytes())
    data[len(data) // 2] ^= 1
    (place / "stage.so").write_bytes(data)


def replace_text(name, text):
    return lambda place: (place / name).write_text(text)


DAMAGES = {
    "library cut short": truncate,
    "library tampered with": swap_byte,
    "library gone": lambda place: (place / "stage.so").unlink(),
    "card gone": lambda place: (place / "card.json").unlink(),
    "card empty": replace_text("card.json", ""),
    "card a list": replace_text("card.json", "[]"),
    "card without hash": replace_text("card.json", "{}"),
    "module gone": lambda place: (place / "module.json").unlink(),
    "module empty": replace_text("module.json", ""),
    "module no IR": replace_text("module.json", '{"a": 1}'),
    "module binary": lambda place: (place / "module.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_a_new_one_takes_its_place(cache, compiled, tmp_path, damage):
    DAMAGES[damage](entry(cache))
    assert cache.find(STAGE, LLVM) is None
    cache.add(STAGE, LLVM, False, written(tmp_path / "again.so", compiled))
    assert cache.find(STAGE, LLVM) is not None


def test_nothing_is_left_when_the_library_cannot_be_moved(tmp_path):
    cache = StageCache(tmp_path / "cache")
    with pytest.raises(BadInput):
        cache.add(STAGE, LLVM, False, tmp_path / "missing.so")
    assert list((cache.root / "stages").iterdir()) == []


SCRIPT = """
import sys
from pathlib import Path
from tests.emit.modules import chain
from tvmhet.emit.cache import StageCache
root, library, number = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
cache, stage = StageCache(root), chain("exp")
for i in range(25):
    mine = root / f"mine-{number}-{i}.so"
    mine.write_bytes(library.read_bytes())
    cache.add(stage, {"kind": "llvm"}, False, mine)
    found = cache.find(stage, {"kind": "llvm"})
    assert found is None or found.read_bytes() == library.read_bytes()
"""


def test_processes_that_add_one_entry_at_the_same_time(cache, compiled, tmp_path):
    library = written(tmp_path / "library.so", compiled)
    checkout = Path(__file__).parent.parent.parent
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(cache.root), str(library), str(n)], cwd=checkout, stderr=subprocess.PIPE
        )
        for n in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert cache.find(STAGE, LLVM) is not None
    assert [p.name for p in (cache.root / "stages").iterdir()] == [entry(cache).name]


def test_a_cache_that_cannot_be_written_is_named(compiled, tmp_path):
    (tmp_path / "file").write_text("no folder")
    cache, library = StageCache(tmp_path / "file"), written(tmp_path / "library.so", compiled)
    with pytest.raises(BadInput, match=r"file' cannot be written: .*\n  remedy: .*TVMHET_CACHE_DIR"):
        cache.add(STAGE, LLVM, False, library)
    assert library.read_bytes() == compiled


def test_a_full_disk_leaves_no_half_entry(compiled, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module.shutil, "move", full)
    cache = StageCache(tmp_path / "cache")
    with pytest.raises(BadInput, match="cannot be written: No space left on device"):
        cache.add(STAGE, LLVM, False, written(tmp_path / "library.so", compiled))
    assert list((tmp_path / "cache" / "stages").iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("TVMHET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tvmhet"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "tvmhet"
