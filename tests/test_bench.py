"""`coolsd bench` on a toy target: every part has a number and is finite; how fast is not a matter for tests."""

import json
import math

from coolsd import cli


def test_every_part_of_decoding_is_measured(saved_toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("coolsd.bench.CODES", (8, 16))
    arguments = ["--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--device", "cpu"]
    assert cli.main(["bench", *arguments, "--repeats", "2", "--out", str(tmp_path / "bench.json")]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    for name, values in found["milliseconds"].items():
        assert len(values["all"]) == 2 and 0 <= values["min"] <= values["median"] < math.inf, name
    assert found["ratios"]["coolsd / transformers"] > 0
    costs = found["microseconds_per_verify"]
    assert len(costs) == 2 * 3 * 2 and all(0 < value < math.inf for value in costs.values())
    assert "eagle-25, 26 nodes, 16 codes, batch 8" in costs
    said = capsys.readouterr().out
    assert "draft step" in said and "coolsd / transformers" in said and "microseconds" in said


def test_no_repeats_are_refused(capsys):
    assert cli.main(["bench", "--repeats", "0"]) == 2
    assert "repeats is 0, but must be >= 1" in capsys.readouterr().err
