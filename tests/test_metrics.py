"""Metrics of images against known answers, on networks made here; no weights are downloaded."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from coolsd import cli, metrics
from coolsd.metrics import FID, ClipScore, Metric, squares, weights_hash


class Colour(nn.Module):
    """The mean colour, three features: what they are of pictures of one colour is known."""

    num_features = 3

    def forward(self, images):
        return images.float().mean((2, 3))


def pictures(folder, colours, size=(8, 8)):
    folder.mkdir()
    for index, colour in enumerate(colours):
        Image.new("RGB", size, tuple(int(c) for c in colour)).save(folder / f"{index:04d}.png")
    return sorted(folder.glob("*.png"))


@pytest.fixture
def sets(tmp_path):
    rng = np.random.default_rng(0)
    mix = np.array([[20.0, 5, 0], [0, 15, 8], [3, 0, 10]])
    real = np.clip(rng.normal(size=(300, 3)) @ mix + [120, 100, 90], 0, 255).astype(int)
    made = np.clip(rng.normal(size=(200, 3)) @ mix.T + [100, 120, 90], 0, 255).astype(int)
    return real, made, pictures(tmp_path / "real", real), pictures(tmp_path / "made", made)


def test_the_distance_of_two_clouds_is_that_of_their_gaussians(sets, tmp_path):
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), by SciPy."""
    real, made, of_real, of_made = sets
    c1, c2 = np.cov(real.T), np.cov(made.T)
    expected = ((real.mean(0) - made.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
    fid = FID(tmp_path / "real", size=8, batch_size=64, feature=Colour())
    assert fid.missing() is None
    cpu = torch.device("cpu")
    assert fid.score(of_made, [""] * 200, cpu) == pytest.approx(expected, rel=1e-4)
    assert abs(fid.score(of_real, [""] * 300, cpu)) < 1e-3  # the first set left nothing behind
    assert fid.score(of_made[:100], [""] * 100, cpu) != pytest.approx(expected, rel=1e-3)
    assert fid.about()["real_images"] == 300 and fid.about()["images"] == 100
    with pytest.raises(ValueError, match="FID of 1 image"):
        fid.score(of_made[:1], [""], cpu)


def test_what_is_missing_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert "holds fewer than 2 images" in FID(tmp_path / "empty").missing()
    assert "holds fewer than 2 images" in FID(tmp_path / "nowhere").missing()
    pictures(tmp_path / "real", [(0, 0, 0), (9, 9, 9)])
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'coolsd[eval]'" in FID(tmp_path / "real").missing()
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: object())
    said = FID(tmp_path / "real", weights=tmp_path / "inception.pth").missing()
    assert f"are not at {tmp_path / 'inception.pth'}, or not whole; put https://" in said and "\n" not in said
    (tmp_path / "inception.pth").touch()
    assert "or not whole" in FID(tmp_path / "real", weights=tmp_path / "inception.pth").missing()
    with (tmp_path / "inception.pth").open("wb") as file:
        file.truncate(1 << 27)  # sparse
    assert FID(tmp_path / "real", weights=tmp_path / "inception.pth").missing() is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = ClipScore(str(tmp_path / "no-model")).missing()
    assert said.startswith("clip_score: ") and f"hf download {tmp_path / 'no-model'}" in said and "\n" not in said


def test_the_middle_square_is_resized(tmp_path):
    wide = Image.new("RGB", (30, 10), (255, 0, 0))
    wide.paste((0, 0, 255), (10, 0, 20, 10))
    wide.save(tmp_path / "wide.png")
    (square,) = squares([tmp_path / "wide.png"], 4)
    assert square.shape == (3, 4, 4) and square.dtype == torch.uint8
    assert torch.equal(square, torch.tensor([0, 0, 255], dtype=torch.uint8)[:, None, None].expand(3, 4, 4))
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"text.png is no picture"):
        list(squares([tmp_path / "text.png"], 4))
    (tmp_path / "drawing.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(ValueError, match="cannot identify"):  # not: where Ghostscript is, that is run
        list(squares([tmp_path / "drawing.png"], 4))
    Image.new("1", (1 << 14, (1 << 12) + 1)).save(tmp_path / "bomb.png")
    with pytest.raises(ValueError, match=r"bomb.png has 16384 x 4097 pixels"):
        list(squares([tmp_path / "bomb.png"], 4))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Folder of a random CLIP of one layer, whose tokenizer knows letters."""
    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(33, 127)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=12)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": len(words), "max_position_embeddings": 12, "eos_token_id": len(words) - 1}
    text |= {"bos_token_id": len(words) - 2, "pad_token_id": len(words) - 1}
    torch.manual_seed(0)
    network = CLIPModel(
        CLIPConfig(text_config=text, vision_config={**size, "image_size": 16, "patch_size": 8}, projection_dim=8)
    )
    network.save_pretrained(folder)
    shape = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPProcessor(CLIPImageProcessor(**shape), tokenizer).save_pretrained(folder)
    return folder


def test_clip_score_is_that_of_transformers_clip(clip, tmp_path):
    rng = np.random.default_rng(1)
    of = pictures(tmp_path / "made", rng.integers(0, 255, (7, 3)), size=(20, 16))
    captions = ["a red apple", "b", "c d e f g h i j k l m n o p", "rose", "sun", "x y", "zz"]
    score = ClipScore(str(clip), batch_size=3)
    assert score.missing() is None
    found = score.score(of, captions, torch.device("cpu"))
    network, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    expected = []
    for path, caption in zip(of, captions, strict=True):
        inputs = processor(text=caption, images=Image.open(path), return_tensors="pt", truncation=True, max_length=12)
        with torch.no_grad():
            out = network(**inputs)
        cosine = float(out.logits_per_image.detach()) / float(network.logit_scale.detach().exp())
        expected.append(100 * max(cosine, 0.0))
    assert found == pytest.approx(np.mean(expected), abs=1e-3) and min(expected) < max(expected)
    assert score.about()["captions_cut"] == 1  # fourteen letters and two marks; the first has nine and two
    assert score.about()["network"] == weights_hash(network)
    prefixed = ClipScore(str(clip), prefix="A photo depicts").score(of, captions, torch.device("cpu"))
    assert prefixed != pytest.approx(found, abs=1e-4)


def test_evaluate_measures_what_it_can(clip, saved_toy, tmp_path, monkeypatch, capfd):
    """FID by a network of ours, CLIP score, and one whose weights are not here: named, before anything is decoded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pictures(tmp_path / "real", [(10, 20, 30), (200, 10, 0), (7, 70, 170)])
    recipe = tmp_path / "evaluate.yaml"
    recipe.write_text(f"""
methods:
  - {{name: eagle-1, rule: vanilla, first: 2}}
metrics:
  - class_path: coolsd.metrics.FID
    init_args: {{real: {tmp_path / "real"}, size: 8, feature: {{class_path: tests.test_metrics.Colour}}}}
  - class_path: coolsd.metrics.ClipScore
    init_args: {{model: {clip}}}
  - class_path: coolsd.metrics.ClipScore
    init_args: {{model: {tmp_path / "absent"}}}
""")
    command = ["evaluate", "--config", str(recipe), "--target", str(saved_toy / "target")]
    command += ["--head", str(saved_toy / "draft"), "--prompts", json.dumps(["a b", "c", "a"])]
    command += ["--out", str(tmp_path / "run")]
    assert cli.main([*command, "--check"]) == 0
    said = capfd.readouterr().out
    assert "metrics of images: fid, clip_score" in said and "absent could not be loaded" in said
    assert not (tmp_path / "run").exists()
    assert cli.main(command) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    for row, count in zip(found["rows"], (3, 2), strict=True):
        made = [tmp_path / "run" / file for file in row["per_image"]["file"]]
        assert len(made) == count
        fid = FID(tmp_path / "real", size=8, feature=Colour())
        if count == 3:
            assert row["fid"] == pytest.approx(fid.score(made, [], torch.device("cpu")), rel=1e-5)
        else:
            assert row["fid"] is None  # of fewer images: nothing to compare with the others
        words = [found["captions"][prompt] for prompt in row["per_image"]["prompt"]]
        assert row["clip_score"] == pytest.approx(ClipScore(str(clip)).score(made, words, torch.device("cpu")))
        assert row["image_reward"] is None
        assert np.mean(row["per_image"]["clip_score"]) == pytest.approx(row["clip_score"])
    assert found["metrics"]["fid"]["feature"] == "Colour" and found["metrics"]["clip_score"]["images"] == 3
    table = (tmp_path / "run" / "table.md").read_text().splitlines()
    assert table[0].endswith("| fid | clip score |") and table[2].endswith(f"| {found['rows'][0]['clip_score']:.2f} |")
    assert "clip score" in (tmp_path / "run" / "report.html").read_text()


class Half(Metric):
    """Of each image a half, or what `fault` says."""

    column = "half"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.column = f"half_{fault}" if fault else "half"

    def missing(self):
        return "half: gone for today" if self.fault == "missing" else None

    def score(self, pictures, captions, device):
        if self.fault == "breaks":
            raise KeyError("weights")
        if self.fault == "stopped":
            raise KeyboardInterrupt
        return float("nan") if self.fault == "nan" else len(pictures) / 2

    def about(self):
        return {"fault": self.fault}


def test_a_metric_that_fails_costs_no_other_and_what_was_measured_stays(saved_toy, tmp_path, capfd):
    def run(*faults):
        listed = [f"{{class_path: tests.test_metrics.Half, init_args: {{fault: '{fault}'}}}}" for fault in faults]
        recipe = tmp_path / "evaluate.yaml"
        recipe.write_text(f"methods: [{{name: 'a [/b]', rule: vanilla}}]\nmetrics: [{', '.join(listed)}]\n")
        command = ["evaluate", "--config", str(recipe), "--target", str(saved_toy / "target"), "--baseline", "a [/b]"]
        command += ["--head", str(saved_toy / "draft"), "--prompts", '["a b", "c"]', "--out", str(tmp_path / "run")]
        return cli.main(command), json.loads((tmp_path / "run" / "results.json").read_text())

    code, found = run("", "breaks", "nan")
    assert code == 2 and [row["half"] for row in found["rows"]] == [1.0, 1.0]
    assert list(found["metrics"]) == ["half"] and found["rows"][0]["half_nan"] is None
    said = capfd.readouterr().err
    assert "half_breaks: KeyError 'weights'; half_nan: ValueError the score is nan" in said
    (tmp_path / "run" / "report.html").unlink()
    code, found = run("", "stopped")  # Ctrl-C
    assert code == 130 and [row["half"] for row in found["rows"]] == [1.0, 1.0] and found["rows"][0]["against_baseline"]
    assert (tmp_path / "run" / "report.html").exists()
    code, found = run("missing")  # a later run that lacks the network, or is stopped before it scores
    assert (
        code == 0
        and [row["half"] for row in found["rows"]] == [1.0, 1.0]
        and found["metrics"] == {"half": {"fault": ""}}
    )


def test_a_broken_download_is_one_sentence(clip, tmp_path):
    for damage in (b"", b"x" * 100, (clip / "model.safetensors").read_bytes()[:-9]):
        folder = tmp_path / str(len(damage))
        shutil.copytree(clip, folder)
        (folder / "model.safetensors").write_bytes(damage)
        said = ClipScore(str(folder)).missing()
        assert said.startswith("clip_score: ") and "\n" not in said and "hf download" in said
