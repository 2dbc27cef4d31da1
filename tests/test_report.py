"""The report is one file, needs nothing from outside, and escapes every word that came from a caption or a name."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from coolsd import cli, report, results

HOSTILE = '"><script>alert(1)</script>'


def record(row, calls, latency):
    return {
        "prompt": row, "repeat": 0, "row": row, "batch": row, "latency_s": latency, "accepted_length": 8 / calls,
        "target_calls": calls, "emitted": [2] * calls, "bias_per_token": 0.1, "kl_per_token": None, "kl_infinite": True,
        "nll_per_token": 2.0, "seconds": dict.fromkeys(report.PARTS, latency / 5), "file": f"images/{row}.png",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A run of two methods on two prompts, one of them hostile, as results.json describes it."""
    (tmp_path / "images").mkdir()
    for row in range(2):
        Image.new("RGB", (8, 8), (200, 30 * row, 0)).save(tmp_path / "images" / f"{row}.png")
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "guidance": 1.5}
    plain, captions = [record(row, 8, 2.0) for row in range(2)], [HOSTILE, "b"]
    about = {"rule": {"name": "cool-sd", "schedule": [2.0]}, "drafter": {"depth": 1}, "sampling": sampling}
    found = {
        "schema": 1, "target": "target@0", "draft": "draft@0", "prompts": 2, "captions": captions, "repeats": 1,
        "batch_size": 1, "compiled": False, "seed": 0, "minutes": 1.0,
        "environment": {"versions": {"torch": "2"}, "device": "cpu", "cpu": "<b>cpu", "cores": 2, "threads": 2,
                        "dtype": "float32", "platform": "x", "date": "today", "command": f"coolsd evaluate {HOSTILE}"},
        "rows": [
            results.row("ar", {"rule": None, "drafter": None, "sampling": sampling}, 0, plain, plain, captions),
            results.row(f"m|{HOSTILE}[red]$", about, 1, [record(row, 4, 1.0) for row in range(2)], plain, captions),
        ],
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(found))
    return tmp_path


def test_the_report_is_self_contained_and_escaped(folder, capsys):
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "What length costs" not in page  # one relaxed method is no curve
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;" in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("chart", "images", "positions") for kind in ("png", "svg")
    }
    sheet = np.asarray(Image.open(folder / "figures" / "images.png").convert("RGB")).astype(int)
    for prompt in range(2):  # one column of two methods
        drawn = abs(sheet - (200, 30 * prompt, 0)).max(-1) < 3
        pieces = [np.diff(drawn.any(axis).astype(int), prepend=0, append=0).clip(0).sum() for axis in (0, 1)]
        assert pieces == [1, 2]
    titles = [axis.get_title() for axis in report.images(folder, report.read(folder)).axes]
    assert titles == [report.wrapped(HOSTILE, 16, 4), "b", "", ""]
    assert "2.00x" in page and "2.00x" in capsys.readouterr().out
    for word in ("Accepted length", "Bias per token", "coolsd evaluate", "target@0", "100% infinite"):
        assert word in page


def test_the_markdown_table_has_a_row_per_method(folder):
    report.main([str(folder)])
    lines = (folder / "table.md").read_text("utf-8").splitlines()
    assert lines[0].startswith("| method | accepted length") and lines[2].startswith("| ar | 1.00 ± 0.00 |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]} == {len(results.HEADER) + 1}


def test_pictures_outside_the_folder_are_refused(folder, tmp_path_factory, capsys):
    found = json.loads((folder / "results.json").read_text())
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    Image.new("RGB", (8, 8)).save(outside)
    for name in (str(outside), f"images/../../{outside.parent.name}/secret.png"):
        found["rows"][0]["per_image"]["file"][0] = name
        (folder / "results.json").write_text(json.dumps(found))
        assert cli.main(["report", str(folder)]) == 2
        assert "outside" in capsys.readouterr().err


def test_mistakes_are_one_sentence(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "results.json").write_text('{"schema": 1, "rows"')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    (tmp_path / "results.json").write_text('{"schema": 9}')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "schema 1" in capsys.readouterr().err


def test_lengths_stand_where_their_tokens_are():
    """Calls of 2, 1, 3 tokens and of 1, 1, 4: token 1 came with two and with one, and so on."""
    assert results.length_at_token([[2, 1, 3], [1, 1, 4]]) == [1.5, 1.5, 2.5, 3.5, 3.5, 3.5]


def several(folder, count):
    """Turns the run in the folder into one of so many relaxed methods on a metric: the later the longer, and worse."""
    found = json.loads((folder / "results.json").read_text())
    plain, relaxed = found["rows"][:2]
    found["metrics"] = {"fd_emoji": {"real": "x"}}
    rows = []
    for number in range(count):
        row = json.loads(json.dumps(relaxed)) | {"name": f"m{number}", "fd_emoji": number**2}
        row["rule"] = {"name": "cool-sd", "delta": 1.0 + number, "nu": 0.7, "schedule": [1.0]}
        row["bias_per_token"] = {"mean": 0.1 + number, "std": 1.0, "ci95": [number, 0.2 + number]}
        row["nll_drift"] = {"mean": -0.1 * number, "std": 1.0, "ci95": [-1.0, 1.0]}
        rows.append(row)
    plain |= {"fd_emoji": 0.5, "bias_per_token": {"mean": 0.0, "std": 0.0, "ci95": [0.0, 0.0]}}
    (folder / "results.json").write_text(json.dumps({**found, "rows": [plain, *rows]}))


def test_ranks_of_certificates_and_measures_are_correlated(folder):
    several(folder, 5)
    _, table = results.agreement(json.loads((folder / "results.json").read_text()))
    assert table[0] == ["bias per token", "-1.00 (5)", "1.00 (5)"]
    assert table[1] == ["kl per token", "-", "-"]  # infinite everywhere
    assert table[2] == ["nll drift", "-", "-1.00 (5)"]
    found = json.loads((folder / "results.json").read_text())
    for row, infinite in zip(found["rows"], (0, 0, 0.2, 0, 0.7, 0.5), strict=True):
        row |= {"kl_per_token": {"mean": row["fd_emoji"]}, "kl_infinite_fraction": infinite, "nll_drift": {"mean": 1}}
    _, table = results.agreement(found)
    # 1, 4, 2, 4, 4 against 1 .. 5: infinite for some images is infinite. Constant drift has no rank
    assert table[1] == ["kl per token", "-", "0.67 (5)"]
    several(folder, 3)
    assert results.agreement(json.loads((folder / "results.json").read_text())) == (
        ["rank correlation", "nll drift", "fd emoji"], [],
    )  # fmt: skip


def test_runs_are_merged_by_captions_and_names(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    several(other, 4)
    found = json.loads((other / "results.json").read_text()) | {"captions": ["b", "new"], "batch_size": 4}
    (other / "results.json").write_text(json.dumps(found))
    assert cli.main(["report", str(folder), str(other)]) == 2  # into which folder?
    out = tmp_path_factory.mktemp("merged")
    assert cli.main(["report", str(folder), str(other), "--out", str(out)]) == 0
    names = [line.split(" | ")[0][2:] for line in (out / "table.md").read_text("utf-8").splitlines()[2:9]]
    assert names[0] == f"ar ({folder.name})" and names[2:] == [f"ar ({other.name})", "m0", "m1", "m2", "m3"]
    page = (out / "report.html").read_text("utf-8")
    assert "batch 1," in page and "batch 4," in page and "What length costs" in page and "rank correlation" in page
    body = page[page.index("The same prompts") : page.index("Acceptance by depth")]
    cells = [row.count("<img") for row in body.split("<tr>")[2:]]
    assert cells == [2, 2 + 5, 5]  # only the first run's, both, only the second's
    assert "3 prompts in all" in page
    assert (out / "figures" / "tradeoff.svg").exists() and not (out / "results.json").exists()


def test_differences_are_merged_where_they_are_to_the_same(folder):
    """Runs that call different rules by one name have no differences in common."""
    one = json.loads((folder / "results.json").read_text()) | {"baseline": "ar"}
    differences = {key: {"mean": 0.5, "std": 1.0, "ci95": [0.0, 1.0], "t": 1.0} for key in results.COMPARED}
    one["rows"][1]["against_baseline"] = differences
    other = json.loads(json.dumps(one))
    merged = results.merge([("one", one), ("other", other)])
    assert len(results.comparison(merged)[1]) == 2 and "left out" not in results.setting(merged)
    other["rows"][0]["rule"] = {"name": "uniform", "delta": 3.0}
    merged = results.merge([("one", one), ("other", other)])
    assert not results.comparison(merged)[1] and "left out" in results.setting(merged)
    assert "differences to a baseline" in results.setting(merged)


def test_a_method_of_fewer_images_says_so(folder):
    found = json.loads((folder / "results.json").read_text())
    found["rows"][1]["images"] = 1
    assert [row[0].endswith(" (1 images)") for row in results.cells(found)] == [False, True]


def test_a_folder_that_results_name_themselves_is_not_read(folder, tmp_path_factory):
    """results.json is what strangers wrote: pictures are looked for in the folder that the user named."""
    outside = tmp_path_factory.mktemp("outside")
    Image.new("RGB", (8, 8)).save(outside / "0.png")
    found = json.loads((folder / "results.json").read_text())
    found["rows"][0]["folder"] = str(outside)
    found["rows"][0]["per_image"]["file"][0] = "0.png"
    (folder / "results.json").write_text(json.dumps(found))
    assert cli.main(["report", str(folder)]) == 2


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_shows_every_figure_and_complains_of_nothing(folder, tmp_path):
    several(folder, 5)
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    count = "document.title = [...document.images].map(i => Number(i.complete && i.naturalWidth > 0)).join('')"
    (tmp_path / "page.html").write_text(f"{page}<script>onload = () => {{ {count} }}</script>", "utf-8")
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    browser += ["--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", f"file://{tmp_path}/page.html"]
    shown = subprocess.run(browser, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and "CONSOLE" not in shown.stderr
    (title,) = re.findall("<title>(.*?)</title>", shown.stdout)
    assert title == "1" * (3 + 2 * 6)  # three figures; two prompts by plain and five methods


def test_malformed_results_are_one_sentence(folder, capfd):
    whole = json.loads((folder / "results.json").read_text())

    def changed(**keys):
        return json.dumps({**whole, **keys})

    row = whole["rows"][0]
    named = [{**row, "per_image": {**row["per_image"], "file": [name, name]}} for name in ("3.txt", "\0", "4.png")]
    (folder / "3.txt").write_text("no picture")
    Image.new("1", (1 << 14, (1 << 12) + 1)).save(folder / "4.png")
    broken = [
        '{"schema": 1}', changed(rows=[]), changed(rows=["a"]), changed(captions=None), "[" * 100_000,
        changed(rows=[{**row, "name": 5}]), changed(rows=[{**row, "speedup": float("nan")}]),
        changed(rows=[{**row, "per_image": {**row["per_image"], "file": [3, 3]}}]),
        *(changed(rows=[one]) for one in named),
    ]  # fmt: skip
    for text in broken:
        (folder / "results.json").write_text(text)
        assert cli.main(["report", str(folder)]) == 2, text[:80]
        said = capfd.readouterr().err.strip()
        assert "\n" not in said and any(name in said for name in ("results.json", "3.txt", "4.png"))


def test_a_picture_is_a_png_whatever_its_name_says(folder, capfd):
    """Pillow would hand a file in PostScript to Ghostscript, in a stranger's folder, too."""
    (folder / "images" / "0.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EOF\n")
    assert cli.main(["report", str(folder)]) == 2 and "is no picture" in capfd.readouterr().err


def test_runs_of_one_name_and_of_other_grids_are_merged(folder, tmp_path):
    for parent, calls in (("x", [2] * 4), ("y", [2] * 8)):
        shutil.copytree(folder / "images", tmp_path / parent / "run" / "images")
        found = json.loads((folder / "results.json").read_text())
        found["metrics"] = {"fd_emoji": {"images": len(calls)}, "clip_emoji": {"network": "n"}}
        for row in found["rows"]:
            row |= {"length_at_token": results.length_at_token([calls]), "fd_emoji": 1.0, "clip_emoji": 2.0}
        (tmp_path / parent / "run" / "results.json").write_text(json.dumps(found))
    runs = [str(tmp_path / parent / "run") for parent in "xy"]
    assert cli.main(["report", *runs, "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "table.md").read_text("utf-8")
    assert "| ar (run 1) |" in table and "| ar (run 2) |" in table
    assert "clip emoji |" in table and "fd emoji |" not in table
    assert "left out, as measured in different ways: fd_emoji" in table


def test_heads_samplings_and_trees_have_curves_of_their_own():
    rule = {"name": "lantern++", "k": 3, "bound": 2.0, "resampling": "own", "schedule": [1.0]}
    row = {"rule": rule, "drafter": {"name": "chain", "depth": 5, "nodes": 6, "head": "a@1"}}
    assert report.family(row) == report.family({**row, "rule": {**rule, "k": 30}})
    for other in ({"rule": {**rule, "bound": 3.0}}, {"drafter": {**row["drafter"], "head": "b@2"}},
                  {"drafter": {**row["drafter"], "nodes": 26}}):  # fmt: skip
        assert report.family(row) != report.family({**row, **other})
