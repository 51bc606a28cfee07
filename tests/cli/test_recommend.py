"""tvmhet recommend: what it prints and writes, and one message per mistake."""

import json
import sys

import pytest

from tvmhet.cost.runs_file import read_parquet
from tvmhet.recommending.measurements import write_list

MARKET = """
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 3}
  - {type: a100-40gb, price: 3.67 USD/h, max_instances: 2}
"""


TOY = """
import torch

def toy():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return model.eval(), (torch.randn(4, 32),)

def wide():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    return model.eval(), (torch.randn(256, 512),)
"""

#: two types that cost about the same per input
CLOSE = """
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 1}
  - {type: l4, price: 0.69 USD/h, max_instances: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a module of models and a price list."""
    (tmp_path / "toy_models.py").write_text(TOY)
    (tmp_path / "prices.yaml").write_text(MARKET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_models", raising=False)
    return tmp_path


@pytest.fixture
def prices(folder):
    """The name of the price list."""
    return "prices.yaml"


def test_it_prints_what_to_rent_and_writes_the_plans(tvmhet, folder, prices):
    status, out, _ = tvmhet("recommend", "toy_models:toy", "--market", prices, "--samples", "1000000", "--out", "rent")
    assert status == 0
    assert "rent 1 x t4" in out and "one type is best here" in out and "each type alone" in out
    assert {p.name for p in (folder / "rent").iterdir()} >= {"plan-0.json", "cluster-0.yaml", "recommendation.json"}
    status, _, _ = tvmhet("plan", "toy_models:toy", "--cluster", "rent/cluster-0.yaml")
    assert status == 0


def test_json(tvmhet, prices):
    status, out, _ = tvmhet("recommend", "toy_models:toy", "--market", prices, "--json")
    assert status == 0
    assert json.loads(out)["best"]["devices"] == {"t4": 1}


def test_spot_devices_are_marked_and_owned_machines_are_used(tvmhet, folder):
    (folder / "spot.yaml").write_text(
        "offers:\n  - {type: t4, price: 0.53 USD/h, spot_price: 0.16 USD/h, max_instances: 1}\n"
    )
    status, out, _ = tvmhet("recommend", "toy_models:toy", "--market", "spot.yaml", "--spot", "--objective", "time")
    assert status == 0 and "1 x t4/spot (1 x t4)" in out and "2 x t4 (1 spot)" in out and "1 x t4 (spot)" in out
    (folder / "smi.txt").write_text("GPU 0: Tesla T4 (UUID: GPU-1a2b3c4d-0000-0000-0000-000000000002)\n")
    status, out, _ = tvmhet("recommend", "toy_models:toy", "--market", "smi.txt")
    assert status == 0 and "toy: use 1 x owned/t4" in out


def test_what_does_not_fit_is_named(tvmhet, folder):
    nano = "device_types:\n  nano: {like: t4, memory: 8 KiB}\noffers:\n  - {type: nano, price: 0.1 USD/h}\n"
    (folder / "nano.yaml").write_text(nano)
    status, _, err = tvmhet("recommend", "toy_models:toy", "--market", "nano.yaml")
    assert status == 2 and "memory: operator '0' alone needs" in err and "nano with 8.0 KiB" in err


def test_json_has_what_would_change_it(tvmhet, prices):
    asked = ("recommend", "toy_models:toy", "--market", prices, "--throughput", "9000", "--what-if", "--risk", "0.9")
    status, out, _ = tvmhet(*asked, "--json")
    made = json.loads(out)
    assert status == 0 and made["risk"] == 0.9
    assert {b["type"] for b in made["break_evens"]} == {"t4", "a100-sxm-40gb"}
    assert all(b["factor"] is None or b["option"]["devices"] != made["best"]["devices"] for b in made["break_evens"])
    assert [c["what"] for c in made["changes"]][-1] == "network 4 times as fast"
    assert any("timed again in each draw" in n and "risk=0.9" in n for n in made["notes"])


def test_a_dry_run_lists_what_to_measure(tvmhet, prices):
    arguments = ("recommend", "toy_models:toy", "--market", prices, "--throughput", "9000")
    status, out, _ = tvmhet(*arguments, "--profile-budget-usd", "1", "--dry-run")
    assert status == 0 and "measurements for" in out
    assert "knowing every time is expected to make the choice" in out and " 0.00%" not in out.partition("╶")[2]
    training = ("--global-batch", "64", "--iterations", "1000000", "--profile-budget-usd", "1", "--dry-run")
    status, out, _ = tvmhet(*arguments[:4], *training)
    assert status == 0 and "measurement" in out


@pytest.mark.parametrize("name", ["list.jsonl", "list.parquet"])
def test_measurements_that_come_back_change_the_answer(tvmhet, folder, name):
    (folder / "close.yaml").write_text(CLOSE)
    asked = ("recommend", "toy_models:wide", "--market", "close.yaml")
    (chosen,) = json.loads(tvmhet(*asked, "--json")[1])["best"]["devices"]
    status, _, _ = tvmhet(*asked, "--profile-budget-usd", "1", "--dry-run", "--out", name)
    rows = read_parquet(folder / name) if name.endswith("parquet") else _lines(folder / name)
    assert status == 0 and chosen in {r["device"] for r in rows} and all(r["seconds"] is None for r in rows)
    slow = [{**r, "seconds": 1.0} for r in rows if r["device"] == chosen]
    if name.endswith("parquet"):
        write_list(folder / "back.parquet", "\n".join(map(json.dumps, slow)))
    else:
        (folder / "back.jsonl").write_text("\n".join(map(json.dumps, slow)))
    status, out, err = tvmhet(*asked, "--json", "--measurements", name.replace("list", "back"))
    assert (status, err) == (0, "") and chosen not in json.loads(out)["best"]["devices"]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.jsonl", None, "cannot be read"),
        ("empty.jsonl", "", "no line has seconds"),
        ("text.jsonl", "t4,k,0.1", "text.jsonl:1: not JSON"),
        ("other.jsonl", '{"a": 1}', "other.jsonl:1: no device and kernel"),
        ("below.jsonl", '{"device": "t4", "kernel": "k", "seconds": -1}', "below.jsonl:1: seconds is -1"),
        ("words.jsonl", '{"device": "t4", "kernel": "k", "seconds": "fast"}', "seconds is 'fast'"),
        ("kernel.jsonl", '{"device": "t4", "kernel": "k", "seconds": 1}', "the measured kernel 'k' is none of this"),
        ("text.parquet", "t4,k,0.1", "text.parquet: cannot be read as Parquet"),
    ],
)
def test_a_file_of_measurements_that_is_none(tvmhet, folder, prices, name, text, said):
    if text is not None:
        (folder / name).write_text(text)
    status, out, err = tvmhet("recommend", "toy_models:toy", "--market", prices, "--measurements", name)
    assert (status, out) == (2, "") and err.startswith("error: [TVMHET-") and said in err


def test_measurements_of_a_type_that_is_not_sold(tvmhet, folder):
    (folder / "close.yaml").write_text(CLOSE)
    asked = ("recommend", "toy_models:wide", "--market", "close.yaml")
    tvmhet(*asked, "--profile-budget-usd", "1", "--dry-run", "--out", "list.jsonl")
    row = {**_lines(folder / "list.jsonl")[0], "device": "t40", "seconds": 0.1}
    (folder / "back.jsonl").write_text(json.dumps(row))
    status, out, err = tvmhet(*asked, "--measurements", "back.jsonl")
    assert (status, out) == (2, "") and "measured on 't40'" in err and "did you mean 't4'" in err


def test_the_micro_batch_of_a_step(tvmhet, prices):
    asked = ("recommend", "toy_models:toy", "--market", prices, "--global-batch", "64", "--iterations", "1000000")
    status, out, _ = tvmhet(*asked, "--loss", "cross_entropy", "--microbatch", "auto")
    assert status == 0 and "micro-batch of" not in out
    status, out, err = tvmhet(*asked, "--microbatch", "8")
    assert status == 2 and "needs a training step" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--market", "nowhere.yaml"), "TVMHET-E018"),
        (("--market", "awz"), "did you mean 'aws'"),
        (("--market", "prices.yaml", "--types", "l4"), "the market has no device type 'l4'"),
        (("--market", "prices.yaml", "--deadline-h", "2"), "never ends"),
        (("--market", "prices.yaml", "--objective", "fast"), "objective 'fast' is unknown"),
        (("--market", "prices.yaml", "--dry-run"), "come together"),
        (("--market", "prices.yaml", "--microbatch", "4"), "--microbatch 4 without --global-batch"),
        (("--market", "prices.yaml", "--throughput", "1e12"), "alone is out of reach"),
    ],
)
def test_one_message_per_mistake(tvmhet, prices, arguments, said):
    status, out, err = tvmhet("recommend", "toy_models:toy", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: [TVMHET-") and said in err
