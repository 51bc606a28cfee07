"""Markets from every format that people have, with their places in errors; whole instances, running costs, what-ifs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cluster import InstanceOffer, Link, Market, Running, device_type
from tvmhet.errors import BadMarket, BadQuantity, HetError, UnknownDeviceType

YAML = """
date: 2026-11-01
source: a price list
network: {bandwidth: 100 Gbit/s, latency: 10 us}
running: {startup: 90 s, checkpoint: 20 s, checkpoint_every: 0.5 h, interruptions_per_h: 0.1}
device_types: {l4-half: {like: l4, memory: 12 GiB}}
offers:
  - {name: small, type: l4, price: 0.80 USD/h, spot_price: 0.30 USD/h, provider: here, region: west}
  - {name: big, type: a100-80gb, devices: 8, price: 30 USD/h, max_instances: 2, link: nvlink, host_power: 1 kW}
  - {type: l4-half, price: 0.5 USD/h}
"""
SKYPILOT = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Price,SpotPrice,Region,Zone
g6.xlarge,4,16,L4,1.0,"{'Gpus': [{'Name': 'L4', 'MemoryInfo': {'SizeInMiB': 22888}}]}",0.90,0.40,us-east-1,a
g6.xlarge,4,16,L4,1.0,,0.80,,us-west-2,a
p4d.24xlarge,96,1152,A100,8.0,,32.77,,us-east-1,b
p4de.24xlarge,96,1152,A100-80GB,8.0,,40.97,,us-east-1,b
trn1.2xlarge,8,32,Trainium,1.0,,1.34,,us-east-1,b
m5.large,2,8,,,,0.096,,us-east-1,b
half,4,16,L4,0.5,,0.45,,us-east-1,a
"""
LISTED = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\nGPU 2: Tesla T4 (UUID: GPU-3)\n"
TABLE = """\
Sun Nov 22 01:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  Tesla T4                       Off |   00000000:00:04.0 Off |                    0 |
| N/A   40C    P8              9W /  70W  |       0MiB / 15360MiB  |      0%      Default |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA A10G                    Off |   00000000:00:05.0 Off |                    0 |
|  0%   23C    P8              9W / 300W  |       0MiB / 23028MiB  |      0%      Default |
+-----------------------------------------+------------------------+----------------------+
|   2  Tesla V100-SXM2...  On   | 00000000:1A:00.0 Off |                    0 |
| N/A   34C    P0    42W / 300W |      0MiB / 32768MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|    0   N/A  N/A      1234      G   /usr/lib/xorg/Xorg                              4MiB |
+-----------------------------------------------------------------------------------------+
"""
QUERIED = "name, memory.total [MiB]\nTesla V100-SXM2-32GB, 32768 MiB\nNVIDIA H100 80GB HBM3, 81559 MiB\n"
OWN = "name,type,devices,price,spot_price,max_instances\nbox,t4,4,2.00,0.60,3\n,l4,1,0.8,,\n"


def test_a_yaml_file_holds_offers_network_and_running_costs():
    market = Market.from_text(YAML)
    assert [(o.key, o.device.name, o.num_devices, o.usd_per_h, o.max_instances) for o in market.offers] == [
        ("here/small/west", "l4", 1, 0.8, 8),
        ("here/small/west/spot", "l4", 1, 0.3, 8),
        ("big", "a100-sxm-80gb", 8, 30.0, 2),
        ("l4-half", "l4-half", 1, 0.5, 8),
    ]
    assert market.offers[2].power_w == 8 * device_type("a100").power_w + 1000
    assert market.offers[3].device.memory_bytes == 12 * 2**30
    assert market.network.byte_per_s == 12.5e9
    assert market.running == Running(90.0, 20.0, 1800.0, 0.1)
    assert (market.date, market.source) == ("2026-11-01", "a price list")


def test_a_skypilot_catalogue_gives_the_cheapest_zone_and_names_what_it_leaves_out():
    market = Market.from_text(SKYPILOT, max_instances=3)
    assert [(o.key, o.device.name, o.num_devices, o.usd_per_h, o.spot) for o in market.offers] == [
        ("g6.xlarge/us-west-2", "l4", 1, 0.8, False),
        ("g6.xlarge/us-east-1/spot", "l4", 1, 0.4, True),
        ("p4d.24xlarge/us-east-1", "a100-sxm-40gb", 8, 32.77, False),
        ("p4de.24xlarge/us-east-1", "a100-sxm-80gb", 8, 40.97, False),
    ]
    assert all(o.max_instances == 3 for o in market.offers)
    assert market.notes == ("left out, no figures known: Trainium",)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (LISTED, {"a100-sxm-80gb": 1, "t4": 2}),
        (QUERIED, {"v100-sxm2-32gb": 1, "h100-sxm-80gb": 1}),
        ("NVIDIA A10G, 23028 MiB\n".join(["name, memory.total [MiB]\n", ""]), {"a10g": 1}),
        ("index, name, memory.total [MiB], driver_version\n0, Tesla T4, 15360 MiB, 550.54.15\n", {"t4": 1}),
        (TABLE, {"t4": 1, "a10g": 1, "v100-sxm2-32gb": 1}),
    ],
)
def test_nvidia_smi_lists_what_is_owned(text, devices):
    market = Market.from_text(text)
    assert {o.device.name: o.num_devices for o in market.offers} == devices
    assert all(o.usd_per_h == 0 and o.max_instances == 1 for o in market.offers)


def test_our_own_csv():
    offers = Market.from_text(OWN).offers
    assert [(o.key, o.num_devices, o.usd_per_h, o.max_instances, o.spot) for o in offers] == [
        ("box", 4, 2.0, 3, False), ("box/spot", 4, 0.6, 3, True), ("l4", 1, 0.8, 8, False),
    ]  # fmt: skip


def test_the_market_of_a_cluster_file():
    market = Market.from_text("market:\n  - {type: h100, price: 2.49 USD/h, max_count: 8, provider: x}\n")
    assert [(o.key, o.max_instances) for o in market.offers] == [("x/h100-sxm-80gb", 8)]


def test_the_shipped_prices_are_dated_sourced_and_plausible():
    market = Market.shipped()
    assert market.date and market.source
    assert {"aws", "gcp", "azure"} <= {o.provider for o in market.offers}
    for offer in market.offers:
        assert 0.005 < offer.usd_per_h / offer.num_devices < 12, offer.key
    spot = {o.key.removesuffix("/spot"): o.usd_per_h for o in market.offers if o.spot}
    assert all(spot.get(o.key, 0) <= o.usd_per_h for o in market.offers if not o.spot)


def test_parts_of_a_market():
    market = Market.shipped("gcp")
    assert {o.device.name for o in market.where(types=["T4", "a100-40gb"]).offers} == {"t4", "a100-sxm-40gb"}
    assert not any(o.spot for o in market.where(spot=False).offers)
    assert "t4" not in {d.name for d in market.without("t4").device_types()}
    dearer = market.with_price("t4", 2.0)
    assert [o.usd_per_h for o in dearer.offers if o.device.name == "t4"] == [
        2 * o.usd_per_h for o in market.offers if o.device.name == "t4"
    ]
    assert market.with_network(Link(1e-6, 1e9)).network.byte_per_s == 1e9


ERRORS = {
    "a negative price": ("offers:\n  - {type: t4, price: -0.5 USD/h}\n", BadQuantity),
    "a price without a unit": ("offers:\n  - {type: t4, price: 0.5}\n", BadQuantity),
    "another currency": ("offers:\n  - {type: t4, price: 0.5 EUR/h}\n", BadMarket),
    "an unknown type": ("offers:\n  - {type: t5, price: 0.5 USD/h}\n", UnknownDeviceType),
    "no price": ("offers:\n  - {type: t4}\n", BadMarket),
    "no offer": ("offers: []\n", BadMarket),
    "nothing left": ("offers:\n  - {type: t4, price: 1 USD/h, max_instances: 0}\n", BadMarket),
    "two of one name": ("offers:\n  - {type: t4, price: 1 USD/h}\n  - {type: t4, price: 2 USD/h}\n", BadMarket),
    "an empty file": ("", BadMarket),
    "CSV: mixed currencies": ("type,price,currency\nt4,1,USD\nl4,2,EUR\n", BadMarket),
    "CSV: a negative price": ("type,price\nl4,1\nt4,-1\n", BadMarket),
    "CSV: a price in words": ("type,price\nt4,cheap\n", BadMarket),
    "CSV: a column that nobody knows": ("type,prise\nt4,1\n", BadMarket),
    "CSV: no type": ("name,price\nt4,1\n", BadMarket),
    "CSV: an unknown type": ("type,price\nt44,1\n", UnknownDeviceType),
    "CSV: half a device": ("type,devices,price\nt4,1.5,1\n", BadMarket),
    "SkyPilot: nothing known": (SKYPILOT.splitlines()[0] + "\nx,1,1,Trainium,1,,1,,,\n", BadMarket),
    "SkyPilot: a negative price": (SKYPILOT.splitlines()[0] + "\nx,1,1,L4,1,,-1,,,\n", BadMarket),
    "nvidia-smi: an unknown GPU": ("GPU 0: NVIDIA Nothing (UUID: GPU-1)\n", UnknownDeviceType),
    "nvidia-smi: another line": (LISTED + "No devices were found\n", BadMarket),
    "nvidia-smi: a GPU in parts": (LISTED + "  MIG 1g.10gb     Device  0: (UUID: MIG-2f5e)\n", BadMarket),
    "nvidia-smi: a table without GPUs": ("\n".join(TABLE.splitlines()[:7]), BadMarket),
    "nvidia-smi: no names": ("index, memory.total [MiB]\n0, 15360 MiB\n", BadMarket),
    "CSV: a price in euros": ("type,price\nt4,0.5 EUR/h\n", BadMarket),
    "CSV: a price in euros, written shorter": ("type,price\nt4,€0.5\n", BadMarket),
    "CSV: a price in pounds": ("type,price\nt4,0.50 GBP\n", BadMarket),
    "nvidia-smi: another memory": ("name, memory.total [MiB]\nTesla T4, 999 MiB\n", UnknownDeviceType),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_price_list_is_one_error_with_a_remedy(name):
    text, kind = ERRORS[name]
    with pytest.raises(HetError) as caught:
        Market.from_text(text)
    assert type(caught.value) is kind
    assert caught.value.remedy and "\0" not in str(caught.value)


@pytest.mark.parametrize("text", ["offers:\n  - {typ: t4}\n", "market:\n  - {typ: t4}\n"])
def test_errors_of_a_file_name_it(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(HetError, match=r"^\[.*\] mine\.yaml:2: "):
        Market.from_file(file)


def test_the_texts_of_errors(golden):
    parts = []
    for name, (text, _) in ERRORS.items():
        with pytest.raises(HetError) as caught:
            Market.from_text(text)
        parts.append(f"## {name}\n{text.rstrip()}\n-->\n{caught.value}\n")
    golden("market_errors.txt", "\n".join(parts))


def test_questions_that_a_market_cannot_answer():
    market = Market.shipped("aws")
    with pytest.raises(BadMarket, match=r"none of .* offers matches"):
        market.where(regions=["mars"])
    with pytest.raises(UnknownDeviceType, match="the market has no device type 'l4'"):
        market.without("l4")
    with pytest.raises(BadMarket, match=r"no provider 'awz'.*\n.*'aws'"):
        Market.shipped("awz")
    with pytest.raises(BadMarket, match="cannot be read"):
        Market.from_file("nowhere.yaml")


@pytest.mark.parametrize("change", [{"usd_per_h": -1.0}, {"usd_per_h": math.nan}, {"num_devices": 0},
                                    {"max_instances": -1}, {"host_power_w": -1.0}])  # fmt: skip
def test_an_offer_is_valid_or_not_made(change):
    with pytest.raises(BadMarket):
        InstanceOffer(**{"name": "x", "device": device_type("t4"), "num_devices": 1, "usd_per_h": 1.0, **change})


def test_hours_count_the_start_checkpoints_and_interruptions():
    assert Running().hours(7200, 0) == 2.0
    assert Running(startup_s=360).hours(7200, 0) == pytest.approx(2.1)
    assert Running(checkpoint_s=36, checkpoint_every_s=3600).hours(3600, 0) == pytest.approx(1.01)
    often = Running(startup_s=360, checkpoint_every_s=3600, interruptions_per_h=0.1)
    # each hour loses 0.1 x (0.1 h start + 0.5 h of work): 6 % of the progress
    assert often.hours(36000, 1) == pytest.approx(0.1 + 10 / 0.94)
    assert often.hours(36000, 17) == math.inf


@given(st.floats(1, 1e6), st.integers(0, 5), st.floats(0, 600), st.floats(0, 60))
def test_work_is_never_free(work_s, spot, startup_s, checkpoint_s):
    running = Running(startup_s, checkpoint_s, 1800.0, 0.02)
    assert running.hours(work_s, spot) >= (work_s + startup_s) / 3600 * (1 - 1e-12)
    assert running.hours(work_s, spot + 1) >= running.hours(work_s, spot)
