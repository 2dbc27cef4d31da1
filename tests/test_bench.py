"""`coolsd bench` on a toy target: every part has a number and is finite; how fast is not a matter for tests."""

import json
import math

import pytest

from coolsd import cli


def test_every_part_of_decoding_is_measured(saved_toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("coolsd.bench.CODES", (8, 16))
    monkeypatch.setattr("coolsd.bench.TABLE", (16, 5))
    arguments = ["--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--device", "cpu"]
    assert cli.main(["bench", *arguments, "--repeats", "2", "--out", str(tmp_path / "bench.json")]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    for name, values in found["milliseconds"].items():
        assert len(values["all"]) == 2 and 0 <= values["min"] <= values["median"] < math.inf, name
    assert found["ratios"]["coolsd / transformers"] > 0
    costs = found["microseconds_per_verify"]
    assert len(costs) == 2 * 3 * 2 and all(0 < value < math.inf for value in costs.values())
    assert "eagle-25, 26 nodes, 16 codes, batch 8" in costs
    assert found["neighbour_table"]["codes"] == 16 and found["neighbour_table"]["seconds"] > 0
    said = capsys.readouterr().out
    assert (
        "draft step" in said and "at most in use" in said and "coolsd / transformers" in said and "microseconds" in said
    )


def test_a_shape_is_measured_without_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("coolsd.bench.CODES", (8,))
    monkeypatch.setattr("coolsd.bench.TABLE", (16, 5))
    recipe = tmp_path / "bench.yaml"
    recipe.write_text("""
shape:
  transformer: {hidden_size: 32, layers: 2, heads: 2, intermediate_size: 48}
  codebook_size: 11
  grid: [3, 3]
  prompt_slots: 4
  caption_dim: 6
repeats: 1
device: cpu
dtype: bfloat16
""")
    more = ["--tokens", "4", "--training", "8"]
    assert cli.main(["bench", "--config", str(recipe), *more, "--out", str(tmp_path / "bench.json")]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["environment"]["dtype"] == "bfloat16" and found["target"] == "unsaved"
    assert {"target call, 1 token", "target call, 6 tokens", "target call, 26 tokens"} <= set(found["milliseconds"])
    layer = 32 * 32 * 4 + 3 * 32 * 48 + 2 * 32  # attention, feed-forward, norms
    target = 2 * layer + 32 + 2 * 11 * 32 + 6 * 32 + 32 * 32 + 4 * 6
    head = layer - 32 + 32 * 64 + 32 + 32
    cache = 2 * 3 * 13 * 2 * 32
    assert found["bytes"]["weights_and_cache"] == 2 * (target + head + cache) + 13 * 8 * 2 * 4  # rope in float32
    assert found["bytes"]["peak"] > 1e8
    assert found["tokens"] == 4 and found["bytes"]["before"] > 1e8
    assert found["milliseconds"]["optimizer step"]["median"] > 0 and found["bytes"]["training"] > 12 * head


def test_the_shape_of_a_chameleon_is_measured_too(tmp_path, monkeypatch):
    monkeypatch.setattr("coolsd.bench.CODES", (8,))
    monkeypatch.setattr("coolsd.bench.TABLE", (16, 5))
    recipe = tmp_path / "bench.yaml"
    recipe.write_text("""
shape:
  transformer: {hidden_size: 32, layers: 2, heads: 2, intermediate_size: 48, qk_norm: true}
  layout: lumina
  image_size: [64, 32]
  codes: 7
  vocabulary: 720
  prompt_slots: 8
sampling: {guidance: 3.0, top_k: 5}
transformers: false
repeats: 1
device: cpu
dtype: bfloat16
""")
    assert cli.main(["bench", "--config", str(recipe), "--tokens", "6", "--out", str(tmp_path / "bench.json")]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    parts = {"prefill", "target call, 1 token", "target call, 6 tokens", "target call, 26 tokens"}
    assert parts <= set(found["milliseconds"]) and found["ratios"] == {} and found["bytes"]["peak"] > 1e8
    layer = 32 * 32 * 4 + 3 * 32 * 48 + 2 * 32
    weights = 2 * (layer + 4 * 2 * 16) + 32 + (720 + 8) * 32  # qk-norms: weight and bias of 2 heads each, twice
    head = layer - 32 + 32 * 64 + 32 + 32 + 8 * 32  # with the rows of the embedding that it reads
    cache = 2 * 3 * (8 + 10) * 2 * 32
    tables = 18 * 8 * 2 * 4 + 8 * 8 + 10 * 8  # rope, ids and layout
    assert found["bytes"]["weights_and_cache"] == 2 * (weights + head + cache) + tables


@pytest.mark.parametrize("tokens", ["1", "257"])
def test_a_part_of_an_image_is_a_part(tokens, capsys):
    assert cli.main(["bench", "--tokens", tokens]) == 2
    assert f"tokens is {tokens}, but must be from 2 to 256" in capsys.readouterr().err


def test_no_repeats_are_refused(capsys):
    assert cli.main(["bench", "--repeats", "0"]) == 2
    assert "repeats is 0, but must be >= 1" in capsys.readouterr().err
