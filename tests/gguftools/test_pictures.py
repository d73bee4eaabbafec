"""Pictures and the page: shapes in the right places, escaped text, and what a browser draws of it."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import gguftools
from gguftools import GGUFError, html_report
from gguftools.cli import main
from gguftools.picture import Picture, bars, heat_map, scatter, shade, ticks, treemap
from tests.conftest import DATA

SVG = "{http://www.w3.org/2000/svg}"
VALID = gguftools.demo_text("valid")


def shapes(picture: Picture, kind: str) -> list[ET.Element]:
    return ET.fromstring(picture.svg()).findall(f".//{SVG}{kind}")


def test_areas_of_a_treemap_are_the_sizes():
    sizes = [700, 250, 125, 60, 60, 5]
    drawn = treemap("sizes", [(f"t{i}", s, "#112233", f"t{i}") for i, s in enumerate(sizes)], 600, 200)
    rects = [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in shapes(drawn, "rect")]
    areas = [(w + 1) * (h + 1) for _, _, w, h in rects]  # a pixel between neighbours
    np.testing.assert_allclose(areas, 600 * 200 * np.array(sizes) / sum(sizes), rtol=0.02)
    taken = np.zeros((230, 601), int)
    for x, y, w, h in rects:
        taken[round(y) : round(y + h), round(x) : round(x + w)] += 1
    assert taken.max() == 1, "no two overlap"


def test_heat_map_cells():
    drawn = heat_map("<t>", ["a", "b"], ["x", "y", "z"], [[1, 10, None], [100, 1000, float("nan")]], log=True)
    colours = [r.get("fill") for r in shapes(drawn, "rect")][:6]
    assert colours[2] == colours[5] == shade(None, 0, 1)
    assert [colours[0], colours[4]] == [shade(0, 0, 3), shade(3, 0, 3)]
    assert colours[1] == shade(1, 0, 3)
    assert "&lt;t&gt;" in drawn.svg()
    assert len(shapes(heat_map("empty", [], [], []), "rect")) == 0


def test_scatter_leaves_out_what_a_logarithm_cannot_show():
    drawn = scatter("t", "x", "y", [("a", 1, 0.1), ("b", 2, 0.001), ("zero", 3, 0)], log_y=True)
    (ax, ay), (bx, by) = [(float(c.get("cx")), float(c.get("cy"))) for c in shapes(drawn, "circle")]
    assert ax < bx
    assert ay < by  # larger is higher
    assert len(shapes(scatter("t", "x", "y", []), "circle")) == 0


def test_bars():
    drawn = bars("t", ["a", "b"], [2, 4])
    assert [float(r.get("height")) for r in shapes(drawn, "rect")] == [100, 200]


def test_ticks():
    assert ticks(0.3, 4.2) == [1, 2, 3, 4]
    assert ticks(-3.1, -0.9) == [-3, -2.5, -2, -1.5, -1]


def test_saved_pictures(tmp_path):
    drawn = bars("a title with $ and <", ["a"], [1])
    drawn.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == drawn.svg()
    with pytest.raises(GGUFError, match=r"\.svg or \.png"):
        drawn.save(tmp_path / "a.pdf")


def test_png(tmp_path):
    """A bar of the right colour in the right place."""
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    bars("a title with $ and <", ["a"], [1]).save(tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.shape[:2] == (600, 1520)
    np.testing.assert_allclose(pixels[300, 800, :3], [0, 0x72 / 255, 0xB2 / 255], atol=0.01)
    np.testing.assert_allclose(pixels[20, 1500, :3], 1)


@pytest.fixture(scope="module")
def page(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    gguftools.quantize(tiny["bf16"], folder / "q.gguf", "Q2_K", DATA / "tiny" / "imatrix.gguf")
    output = folder / "report.html"
    arguments = [
        "report",
        folder / "q.gguf",
        "--base",
        tiny["bf16"],
        "-f",
        VALID,
        "-c",
        128,
        "--chunks",
        2,
        "-o",
        output,
    ]
    assert main(list(map(str, arguments))) == 0
    return output


def test_page(page):
    text = page.read_text()
    for section in ("sizes", "types", "errors", "divergence", "metadata"):
        assert f'<section id="{section}">' in text
    assert not re.findall(r"(?:src|href)\s*=|url\(|<script|http://(?!www\.w3\.org/2000/svg)|https://", text), (
        "self-contained"
    )
    assert text.count("<title>") > 56, "every tensor says what it is"
    for part in (
        "blk.0.attn_q.weight: Q2_K",
        "blk.0.ffn_down.weight: 0.",
        "mean KLD",
        "tokenizer.ggml.tokens",
        "2,048: ",
    ):
        assert part in text
    counts = [
        int(n.replace(",", "")) for n in re.findall(r"<title>[\d.e+-]+ to [\d.e+-]+: ([\d,]+) tokens</title>", text)
    ]
    assert sum(counts) == 2 * 63


def test_page_without_base(tiny, tmp_path, capsys):
    assert main(["report", str(tiny["bf16"]), "-o", str(tmp_path / "r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert 'id="types"' in text
    assert 'id="errors"' not in text


def test_texts_from_files_cannot_do_anything(tiny, tmp_path):
    from gguftools.gguf import GGUF, Writer

    with GGUF(tiny["bf16"]) as f, Writer(tmp_path / "evil.gguf") as w:
        for field in f.fields.values():
            w.add_field(field)
        w.add("general.name", "</td><script>alert(1)</script>\x1b[31m")
        w.declare('"><img src=x onerror=alert(2)>', (32,), "F32")
        w.write('"><img src=x onerror=alert(2)>', np.zeros(32, np.float32))
    html_report.write(tmp_path / "evil.gguf", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-f", VALID), "measured against a base"),
        (("--base", "other.gguf"), "it is another model"),
        (("-o", "absent/r.html"), "does not exist"),
    ],
)
def test_bad_requests(tiny, tmp_path, monkeypatch, capsys, arguments, message):
    from gguftools.gguf import Writer

    monkeypatch.chdir(tmp_path)
    with Writer("other.gguf") as w:
        w.add("general.architecture", "llama")
        w.declare("x", (32,), "F32")
        w.write("x", np.zeros(32, np.float32))
    assert main(["report", str(tiny["bf16"]), *map(str, arguments)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_page_in_a_browser(page, tmp_path):
    """What is drawn: every section has its place, and the treemap's colours cover what the types weigh."""
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    url = page.as_uri()
    dom = subprocess.run([*common, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count("<svg") == 4
    assert dom.count("<rect") == page.read_text().count("<rect")
    shot = tmp_path / "shot.png"
    options = [f"--screenshot={shot}", "--window-size=1100,2600", "--hide-scrollbars", "--force-device-scale-factor=1"]
    subprocess.run([*common, *options, url], capture_output=True, timeout=120, check=True)
    pixels = np.rint(image.imread(shot)[..., :3] * 255).astype(int)
    with gguftools.open(page.parent / "q.gguf") as f:
        sizes: dict[str, int] = {}
        for t in f.tensors.values():
            sizes[t.format.name] = sizes.get(t.format.name, 0) + t.nbytes
    for colour, name in re.findall(r'<i style="background:(#\w+)"></i>(\w+)', page.read_text()):
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        share = (pixels == rgb).all(-1).sum() / (1000 * 480)
        assert share == pytest.approx(sizes[name] / sum(sizes.values()), abs=0.04), name
