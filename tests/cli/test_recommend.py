"""tvmhet recommend: what it prints and writes, and one message per mistake."""

import json
import sys

import pytest

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
