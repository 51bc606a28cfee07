"""The HTML page: whole, well formed, the same every time, and deaf to code in names."""

import re
from html.parser import HTMLParser

import pytest

from tests.report.plans import stage, two_stages, whole
from tvmhet.report.html import _POLICY, plan_to_html
from tvmhet.report.timeline import plan_to_svg

VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """Collects tags and attributes; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attrs, self.text = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attrs += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def hostile():
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    kernels = [(evil, [evil, "'\"&"], evil)]
    one = stage(0, kernels, evil, [evil], [(0.001, evil)], [evil], [evil], [evil])
    return two_stages(model=evil, stages=(one,), notes=(evil,), solver=evil, timeline=(), objective=evil)


@pytest.mark.parametrize("make", [two_stages, whole, hostile])
def test_well_formed(make):
    Page(plan_to_html(make()))


def test_everything_is_there():
    page = Page(plan_to_html(two_stages()))
    text = " ".join(page.text)
    for word in ("plan of resnet_toy", "2 x v100-sxm2-16gb", "layer1.conv", "8.38 ms", "a roofline stood in"):
        assert word in text
    assert page.tags.count("tr") == 2 + 2 + 4  # two heads, two stages, four kernels
    assert page.tags.count("rect") == len(two_stages().timeline)


def test_it_loads_nothing():
    html = plan_to_html(two_stages())
    page = Page(html)
    assert not {name for name, _ in page.attrs} & {"src", "href", "action", "srcdoc", "data"}
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", html)
    assert ("content", _POLICY) in page.attrs


def test_names_cannot_bring_code():
    page = Page(plan_to_html(hostile()))
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [name for name, _ in page.attrs if name.startswith("on")]


def test_same_plan_same_page():
    assert plan_to_html(two_stages()) == plan_to_html(two_stages())


def test_a_plan_without_times_has_no_timeline():
    assert plan_to_svg(whole()) == ""
    assert "Timeline" not in plan_to_html(whole())


def test_boxes_lie_inside_the_picture():
    width = float(re.search(r'viewBox="0 0 (\d+)', plan_to_svg(two_stages()))[1])
    for x, w in re.findall(r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', plan_to_svg(two_stages())):
        assert float(x) >= 0 and float(x) + float(w) <= width


def test_page_is_written_whole(tmp_path):
    path = tmp_path / "plan.html"
    two_stages().to_html(path)
    assert path.read_text() == plan_to_html(two_stages())
    assert list(tmp_path.iterdir()) == [path]


def test_files_get_the_usual_permissions(tmp_path):
    two_stages().save(tmp_path / "plan.json")
    two_stages().to_html(tmp_path / "plan.html")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
