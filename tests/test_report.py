"""The report is one file, needs nothing from outside, and escapes every word that came from a caption or a name."""

import json
import re

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
    plain = [record(row, 8, 2.0) for row in range(2)]
    about = {"rule": {"name": "cool-sd", "schedule": [2.0]}, "drafter": {"depth": 1}, "sampling": sampling}
    found = {
        "schema": 1, "target": "target@0", "draft": "draft@0", "prompts": 2, "captions": [HOSTILE, "b"], "repeats": 1,
        "batch_size": 1, "compiled": False, "seed": 0, "minutes": 1.0,
        "environment": {"versions": {"torch": "2"}, "device": "cpu", "cpu": "<b>cpu", "cores": 2, "threads": 2,
                        "dtype": "float32", "platform": "x", "date": "today", "command": f"coolsd evaluate {HOSTILE}"},
        "rows": [
            results.row("ar", {"rule": None, "drafter": None, "sampling": sampling}, 0, plain, plain),
            results.row(f"m|{HOSTILE}[red]$", about, 1, [record(row, 4, 1.0) for row in range(2)], plain),
        ],
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(found))
    return tmp_path


def test_the_report_is_self_contained_and_escaped(folder, capsys):
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;" in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("chart", "positions") for kind in ("png", "svg")
    }
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
