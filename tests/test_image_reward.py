"""ImageReward on transformers' blocks against a network written out here with the published file's names."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import BertTokenizer

from coolsd import cli
from coolsd.image_reward import MEAN, SD, ImageReward, ImageRewardConfig

SIZE, HEADS = 128, 2
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "apple", "rose", "sun"]
PLACES = {0: (SIZE, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}  # the MLP's linear maps
CLIP_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
CLIP_DEVIATION = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def published(rng):
    """Random tensors of a network of two layers each, by their names: images of 32 pixels, 9 word pieces."""
    vision = {"cls_token": (1, 1, SIZE), "pos_embed": (1, 5, SIZE), "patch_embed.proj.weight": (SIZE, 3, 16, 16)}
    linear, norms = {"patch_embed.proj": (SIZE, 0)}, ["norm"]
    for at in ("blocks.0", "blocks.1"):
        linear |= {f"{at}.attn.qkv": (3 * SIZE, SIZE), f"{at}.attn.proj": (SIZE, SIZE)}
        linear |= {f"{at}.mlp.fc1": (64, SIZE), f"{at}.mlp.fc2": (SIZE, 64)}
        norms += [f"{at}.norm1", f"{at}.norm2"]
    shapes = with_linear(vision, linear, norms, "blip.visual_encoder.")
    text = {"word_embeddings.weight": (len(WORDS), SIZE), "position_embeddings.weight": (40, SIZE)}
    linear, norms = {}, ["embeddings.LayerNorm"]
    for at in ("encoder.layer.0", "encoder.layer.1"):
        for block in ("attention", "crossattention"):
            names = ("self.query", "self.key", "self.value", "output.dense")
            linear |= {f"{at}.{block}.{name}": (SIZE, SIZE) for name in names}
            norms.append(f"{at}.{block}.output.LayerNorm")
        linear |= {f"{at}.intermediate.dense": (96, SIZE), f"{at}.output.dense": (SIZE, 96)}
        norms.append(f"{at}.output.LayerNorm")
    text = {f"embeddings.{name}": shape for name, shape in text.items()}
    shapes |= with_linear(text, linear, norms, "blip.text_encoder.")
    shapes |= with_linear({}, {f"{place}": (out, into) for place, (into, out) in PLACES.items()}, [], "mlp.layers.")
    found = {name: torch.randn(*shape, generator=rng) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    found = {name: x + 1 if "orm" in name and name.endswith("weight") else x for name, x in found.items()}
    return {**found, "blip.text_encoder.embeddings.position_ids": torch.arange(40)[None]}


def with_linear(shapes, linear, norms, prefix):
    shapes = dict(shapes)
    for name, (out, into) in linear.items():
        shapes |= {f"{name}.bias": (out,), **({f"{name}.weight": (out, into)} if into else {})}
    shapes |= {f"{name}.{part}": (SIZE,) for name in norms for part in ("weight", "bias")}
    return {prefix + name: shape for name, shape in shapes.items()}


def written_out(w, pixels, pieces, mask):
    """BLIP's image encoder (pre-norm), BERT with cross-attention (post-norm), the MLP: of one image and caption."""

    def normed(x, name, eps):
        return nn.functional.layer_norm(x, (SIZE,), w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def attend(q, k, v, seen):
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (q, k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(SIZE // HEADS)).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    at = "blip.visual_encoder"
    weight, bias = w[f"{at}.patch_embed.proj.weight"], w[f"{at}.patch_embed.proj.bias"]
    patches = nn.functional.conv2d(pixels[None], weight, bias, stride=16)[0].flatten(1).T
    x = torch.cat([w[f"{at}.cls_token"][0], patches]) + w[f"{at}.pos_embed"][0]
    everywhere = torch.ones(len(x), dtype=torch.bool)
    for block in (f"{at}.blocks.0", f"{at}.blocks.1"):
        q, k, v = linear(normed(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv").chunk(3, -1)
        x = x + linear(attend(q, k, v, everywhere), f"{block}.attn.proj")
        inner = nn.functional.gelu(linear(normed(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1"))
        x = x + linear(inner, f"{block}.mlp.fc2")
    image = normed(x, f"{at}.norm", 1e-6)
    at = "blip.text_encoder.embeddings"
    x = w[f"{at}.word_embeddings.weight"][pieces] + w[f"{at}.position_embeddings.weight"][: len(pieces)]
    x = normed(x, f"{at}.LayerNorm", 1e-12)
    for layer in range(2):
        block = f"blip.text_encoder.encoder.layer.{layer}"
        for part, source, seen in (("attention", None, mask), ("crossattention", image, everywhere)):
            states = x if source is None else source
            q = linear(x, f"{block}.{part}.self.query")
            k, v = (linear(states, f"{block}.{part}.self.{name}") for name in ("key", "value"))
            out = linear(attend(q, k, v, seen), f"{block}.{part}.output.dense")
            x = normed(x + out, f"{block}.{part}.output.LayerNorm", 1e-12)
        inner = nn.functional.gelu(linear(x, f"{block}.intermediate.dense"))
        x = normed(x + linear(inner, f"{block}.output.dense"), f"{block}.output.LayerNorm", 1e-12)
    x = x[0]
    for place in PLACES:
        x = linear(x, f"mlp.layers.{place}")
    return (float(x) - MEAN) / SD


@pytest.fixture
def published_file(tmp_path, rng):
    tensors = published(rng)
    torch.save(tensors, tmp_path / "ImageReward.pt")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "words")
    return tmp_path / "ImageReward.pt", tensors


def test_the_converted_network_gives_the_published_rewards(published_file, tmp_path):
    file, tensors = published_file
    assert cli.main(["convert", str(file), "--out", str(tmp_path / "reward")]) == 0
    report = json.loads((tmp_path / "reward" / "convert.json").read_text())
    assert report["format"] == "image-reward" and report["unused"] == ["blip.text_encoder.embeddings.position_ids"]
    metric = ImageReward(tmp_path / "reward", str(tmp_path / "words"), batch_size=2)
    assert metric.missing() is None
    captions, rng = ["a red apple", "sun", "a rose " * 30], np.random.default_rng(0)
    expected, paths = [], []
    for index, caption in enumerate(captions):
        array = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{index}.png")
        Image.fromarray(array).save(paths[-1])
        pixels = ((torch.tensor(array) / 255 - CLIP_MEAN) / CLIP_DEVIATION).permute(2, 0, 1)
        words = ["[CLS]", *caption.split()[:33], "[SEP]"]
        pieces = torch.tensor([WORDS.index(word) for word in words] + [0] * (35 - len(words)))
        expected.append(written_out(tensors, pixels, pieces, torch.arange(35) < len(words)))
    cpu = torch.device("cpu")
    for path, caption, reward in zip(paths, captions, expected, strict=True):
        assert metric.score([path], [caption], cpu) == pytest.approx(reward, abs=1e-4)
    assert metric.score(paths, captions, cpu) == pytest.approx(np.mean(expected), abs=1e-4)
    assert metric.score(paths, captions[::-1], cpu) != pytest.approx(np.mean(expected), abs=1e-3)
    assert metric.about()["images"] == 3 and len(metric.about()["network"]) == 12


def test_a_broken_file_and_a_missing_one_are_told(published_file, tmp_path, capfd, monkeypatch):
    file, tensors = published_file
    torch.save({name: x for name, x in tensors.items() if name != "mlp.layers.4.bias"}, tmp_path / "short.pt")
    assert cli.main(["convert", str(tmp_path / "short.pt"), "--out", str(tmp_path / "short")]) == 2
    assert "missing mlp.2.bias" in capfd.readouterr().err and not (tmp_path / "short").exists()
    said = ImageReward(tmp_path / "nowhere").missing()
    assert "download https://" in said and "coolsd convert ImageReward.pt" in said and "\n" not in said
    cli.main(["convert", str(file), "--out", str(tmp_path / "reward")])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf download" in ImageReward(tmp_path / "reward", str(tmp_path / "no-words")).missing()
    for change in ({"vision_layers": 10**8}, {"text_size": "768"}, {"positions": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} is .*, but must be an integer from 1 to"):
            ImageRewardConfig(**change)
