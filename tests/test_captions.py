"""Captioned images of every layout, and of every kind of broken or hostile file."""

import io
import json
import tarfile
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from coolsd.cli import main
from data.captions import ImageCaptionPairs, center_crop, read_image
from data.features import FeatureCache
from data.states import BadItem, Selection
from tests.hostile_images import encoded, make, noise
from tests.test_features import arguments, checkpoint  # noqa: F401

SIZE = 32


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def images(count=6):
    return [(f"{i}.png", encoded(noise(60 + i, 50), "PNG"), f"caption {i}") for i in range(count)]


def beside(folder):
    for name, content, words in images():
        (folder / name).write_bytes(content)
        (folder / name).with_suffix(".txt").write_text(words + "\n")
    return {"source": str(folder)}


def imagefolder(folder):
    for name, content, _ in images():
        (folder / name).write_bytes(content)
    lines = [json.dumps({"file_name": name, "text": words}) for name, _, words in images()]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return {"source": str(folder)}


def webdataset(folder):
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for name, content, words in images()[3 * shard : 3 * shard + 3]:
                stem = name.split(".")[0]
                about = json.dumps({"about": words}).encode()
                for member, data in ((name, content), (f"{stem}.txt", words.encode()), (f"{stem}.json", about)):
                    entry = tarfile.TarInfo(member)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return {"source": str(folder)}


def table():
    rows = {"image": [{"bytes": content, "path": name} for name, content, _ in images()],
            "caption": [[words, words.upper()] for _, _, words in images()]}  # fmt: skip
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.List(datasets.Value("string"))})
    return datasets.Dataset.from_dict(rows, features=features)


def parquet(folder):
    table().to_parquet(str(folder / "part.parquet"))
    return {"source": str(folder / "*.parquet")}


def saved(folder):
    table().save_to_disk(str(folder / "saved"))
    return {"source": str(folder / "saved")}


def coco(folder):
    for name, content, _ in images():
        (folder / name).write_bytes(content)
    found = [{"id": 7 * i, "file_name": name} for i, (name, _, _) in enumerate(images())]
    words = [{"image_id": 7 * i, "caption": words} for i, (_, _, words) in enumerate(images())]
    words += [{"image_id": one["image_id"], "caption": one["caption"].upper()} for one in words]
    (folder / "captions.json").write_text(json.dumps({"images": found, "annotations": words}))
    return {"source": str(folder), "annotations": str(folder / "captions.json")}


@pytest.mark.parametrize("layout", [beside, imagefolder, webdataset, parquet, saved, coco])
def test_every_layout_gives_the_same_pairs(layout, tmp_path):
    where = layout(tmp_path)
    pairs = ImageCaptionPairs(**where, size=SIZE)
    assert [pairs.caption(i) for i in range(len(pairs))] == [words for _, _, words in images()]
    for index, (_, content, words) in enumerate(images()):
        found = pairs[index]
        expected = center_crop(Image.open(io.BytesIO(content)), SIZE)
        assert found["caption"] == words and found["image"].shape == (3, SIZE, SIZE)
        assert found["image"].permute(1, 2, 0).flatten().tolist() == list(expected.tobytes())
    assert ImageCaptionPairs(**where, size=SIZE).fingerprint == pairs.fingerprint
    assert ImageCaptionPairs(**where, size=SIZE + 8).fingerprint != pairs.fingerprint
    if layout in (parquet, saved, coco):
        everything = ImageCaptionPairs(**where, size=SIZE, captions="all")
        assert [everything[i]["caption"] for i in (0, 1, 10, 11)] == [
            "caption 0",
            "CAPTION 0",
            "caption 5",
            "CAPTION 5",
        ]
        assert len(everything) == 12 and torch.equal(everything[10]["image"], pairs[5]["image"])


def test_a_stream_gives_the_same_pairs_in_order_and_starts_again(tmp_path):
    where, whole = webdataset(tmp_path), [words for _, _, words in images()]
    stream = ImageCaptionPairs(**where, size=SIZE, streaming=True, limit=8, columns=("png", "json.about"))
    assert [stream[i]["caption"] for i in (0, 1, 4)] == [whole[i] for i in (0, 1, 4)]
    assert stream[2]["caption"] == whole[2]  # back
    with pytest.raises(BadItem, match="end of the stream: it has 6 rows"):
        stream[6]
    assert Selection(stream, 5).chosen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"columns": ("picture", "caption")}, "no column 'picture'; its columns are image, caption"),
        ({"source": "./nowhere"}, "no folder and no file"),
        ({"source": "nobody/nothing"}, "cannot be read as captioned images"),
        ({"annotations": "./nothing.json"}, "No such file"),
        ({"size": 0}, "size is 0"),
        ({"streaming": True}, "streaming needs a limit"),
        ({"captions": "some"}, "choose one or all"),
    ],
)
def test_a_wrong_source_is_one_sentence(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        ImageCaptionPairs(**{**beside(tmp_path), "size": SIZE, **change})


def test_columns_are_asked_for_where_they_have_unusual_names(tmp_path):
    table().rename_columns({"image": "a", "caption": "b"}).to_parquet(str(tmp_path / "x.parquet"))
    with pytest.raises(ValueError, match=r"no image column .* its columns are a, b; name the two by columns"):
        ImageCaptionPairs(str(tmp_path), SIZE)
    assert ImageCaptionPairs(str(tmp_path), SIZE, columns=("a", "b"))[3]["caption"] == "caption 3"


def test_a_file_of_others_opens_nothing_outside(tmp_path):
    (tmp_path / "secret.png").write_bytes(images()[0][1])
    inside = tmp_path / "inside"
    inside.mkdir()
    found = {"images": [{"id": 1, "file_name": "../secret.png"}], "annotations": [{"image_id": 1, "caption": "x"}]}
    (tmp_path / "c.json").write_text(json.dumps(found))
    with pytest.raises(BadItem, match="path outside the folder"):
        ImageCaptionPairs(str(inside), SIZE, annotations=str(tmp_path / "c.json"))[0]
    cell = pa.array([{"bytes": None, "path": str(tmp_path / "secret.png")}])
    pq.write_table(pa.table({"image": cell, "caption": ["x"]}), inside / "t.parquet")
    for source, said in ((inside / "t.parquet", "only followed inside a folder"), (inside, "path outside the folder")):
        with pytest.raises(BadItem, match=said):
            ImageCaptionPairs(str(source), SIZE)[0]


# ------------------------------------------------------------------------------------------- hostile files


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "images"
    return folder, make(folder)


def test_every_kind_of_file_is_used_or_skipped_for_its_reason(hostile):
    folder, expected = hostile
    pairs = ImageCaptionPairs(str(folder), SIZE)
    assert len(pairs) == len(expected) >= 30
    found, pictures = {}, {}
    for index, name in enumerate(pairs.rows["image"]):
        try:
            pictures[name], found[name] = pairs[index]["image"], None
        except BadItem as bad:
            found[bad.item] = bad.reason
    assert found == expected
    assert pictures["clear.png"].min() == 255 and pictures["gray_alpha.png"].min() == 255  # on white
    assert pictures["animated.gif"].float().mean((1, 2)).tolist() == [255, 0, 0]  # its first frame
    top, bottom = pictures["turned.jpg"][:, :, 4:12].float(), pictures["turned.jpg"][:, :, -12:-4].float()
    assert bottom[0].mean() > 240 > 20 > top[0].mean()  # red was above and is now on the right
    assert pictures["sixteen_bits.png"][:, 16, 4].tolist() == [255] * 3
    assert pictures["sixteen_bits.png"][:, 16, -4].tolist() == [100] * 3


def test_limits_are_the_users(hostile):
    folder, _ = hostile
    with pytest.raises(BadItem, match="40 x 40, more than 1599"):
        read_image((folder / "plain.jpg").read_bytes(), 1599)
    assert read_image((folder / "plain.jpg").read_bytes(), 1600).size == (40, 40)


def test_extraction_skips_counts_and_lists(hostile, checkpoint, tmp_path, capfd):  # noqa: F811
    folder, expected = hostile
    data = ["--data.dataset", "data.captions.ImageCaptionPairs", "--data.dataset.source", str(folder)]
    command = ["extract", *arguments(checkpoint, tmp_path / "cache"), *data, "--data.dataset.size", "64"]
    command[command.index("--data.limit") + 1] = str(len(expected))
    reasons = Counter(reason for reason in expected.values() if reason)
    assert main(command) == 2
    said = capfd.readouterr().err
    assert "of 33 items cannot be used: 1 " in said and "--max-bad-fraction above 0.01" in said
    assert (tmp_path / "cache" / "skipped.jsonl").stat().st_size

    assert main([*command, "--max-bad-fraction", "0.5"]) == 0
    cache = FeatureCache(tmp_path / "cache")
    cache.verify()
    assert len(cache) == len(expected) - sum(reasons.values()) and cache.skipped == dict(reasons)
    lines = [json.loads(line) for line in (tmp_path / "cache" / "skipped.jsonl").read_text().splitlines()]
    assert {line["item"] for line in lines if line["item"].endswith(".png")} < {n for n, r in expected.items() if r}
    assert Counter(line["reason"] for line in lines) == reasons
    captions = [cache[i].caption for i in range(len(cache))]
    assert captions.count("a thing") == len(captions) - 2
    assert main(["cache", "info", str(cache.folder)]) == 0
    assert f"kept               {len(cache)}; skipped: " in capfd.readouterr().out
