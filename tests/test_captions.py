"""Captioned images of every layout, and of every kind of broken or hostile file."""

import contextlib
import errno
import io
import json
import os
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
from data.loader import OnlineFeatures
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


def test_a_caption_file_is_read_no_further_than_a_caption_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("data.captions.LARGEST_CAPTION", 7)
    folder = beside(tmp_path)["source"]
    with (tmp_path / "0.txt").open("ab") as file:
        file.truncate(1 << 36)  # sparse; read whole it would end the process
    assert ImageCaptionPairs(folder, SIZE)[0]["caption"] == "caption"


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


# ------------------------------------------------------------------------------------- what a review brought up


def test_other_columns_are_never_decoded(tmp_path):
    """A second image per sample, which Pillow would hand to another program, or refuse."""
    for shard, extra in enumerate(
        [(".eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), (".gif", b"no image")]
    ):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for ending, data in ((".png", images()[0][1]), (".txt", b"words"), extra):
                entry = tarfile.TarInfo(f"{shard}{ending}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        for streaming in ({}, {"streaming": True, "limit": 1}):
            pairs = ImageCaptionPairs(str(tmp_path / f"{shard}.tar"), SIZE, **streaming)
            assert pairs[0]["caption"] == "words" and pairs[0]["image"].shape == (3, SIZE, SIZE)


def test_splits_are_kept_apart(tmp_path):
    (tmp_path / "data").mkdir()
    for split, rows in (("train", range(4)), ("test", range(4, 6))):
        table().select(rows).to_parquet(str(tmp_path / "data" / f"{split}-00000-of-00001.parquet"))
    for split, count in (("train", 4), ("test", 2)):
        pairs = ImageCaptionPairs(str(tmp_path), SIZE, split=split)
        assert len(pairs) == count and pairs.caption(0) == f"caption {0 if split == 'train' else 4}"
    with pytest.raises(ValueError, match="no split 'val'; its files are of test, train"):
        ImageCaptionPairs(str(tmp_path), SIZE, split="val")
    both = datasets.DatasetDict(train=table().select(range(4)), test=table().select(range(4, 6)))
    both.save_to_disk(str(tmp_path / "saved"))
    assert ImageCaptionPairs(str(tmp_path / "saved"), SIZE, split="test").caption(0) == "caption 4"
    with pytest.raises(ValueError, match="no split 'val'; it has train, test"):
        ImageCaptionPairs(str(tmp_path / "saved"), SIZE, split="val")


def test_files_with_words_of_splits_in_their_names_are_files(tmp_path):
    folder = tmp_path / "[odd]"
    (folder / "more").mkdir(parents=True)
    for where, names in ((folder, ("steam-train.png", "test-3.png")), (folder / "more", ("c.png",))):
        for name in names:
            (where / name).write_bytes(images()[0][1])
        rows = [json.dumps({"file_name": name, "text": f"of {name}"}) for name in names]
        (where / "metadata.jsonl").write_text("\n".join(rows))
    (folder / "stray.tar").touch()
    pairs = ImageCaptionPairs(str(folder), SIZE)
    assert sorted(pairs[i]["caption"] for i in range(len(pairs))) == ["of c.png", "of steam-train.png", "of test-3.png"]


def test_what_img2dataset_writes_is_read(tmp_path):
    (tmp_path / "00000").mkdir()
    beside(tmp_path / "00000")
    pq.write_table(pa.table({"url": ["x"], "caption": ["not this one"]}), tmp_path / "00000.parquet")
    assert ImageCaptionPairs(str(tmp_path), SIZE)[1]["caption"] == "caption 1"


def test_a_saved_dataset_reads_no_file_outside(tmp_path):
    table().save_to_disk(str(tmp_path / "secret"))
    table().save_to_disk(str(tmp_path / "open"))
    state = json.loads((tmp_path / "open" / "state.json").read_text())
    state["_data_files"][0]["filename"] = f"../secret/{state['_data_files'][0]['filename']}"
    (tmp_path / "open" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="lies outside"):
        ImageCaptionPairs(str(tmp_path / "open"), SIZE)
    (tmp_path / "open" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a saved dataset"):
        ImageCaptionPairs(str(tmp_path / "open"), SIZE)


def test_trouble_of_the_machine_is_no_bad_item(tmp_path, monkeypatch):
    pairs = ImageCaptionPairs(**beside(tmp_path), size=SIZE)

    def refuse(self):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            pairs[0]
    (tmp_path / "0.png").unlink()
    with pytest.raises(BadItem, match="missing image"):
        pairs[0]


def test_odd_names_and_palettes(tmp_path):
    beside(tmp_path)
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes(images()[0][1])
    with pytest.warns(UserWarning, match="1 files of .* are left out"):
        assert len(ImageCaptionPairs(str(tmp_path), SIZE)) == 6
    palette = encoded(noise().quantize(2), "PNG", transparency=bytes(500))
    with contextlib.suppress(BadItem):  # and nothing else
        assert read_image(palette, 10_000).mode == "RGB"
    found = {"images": [{"id": 1, "file_name": "a\0.png"}], "annotations": [{"image_id": 1, "caption": "x"}]}
    (tmp_path / "c.json").write_text(json.dumps(found))
    with pytest.raises(BadItem, match="missing image"):
        ImageCaptionPairs(str(tmp_path), SIZE, annotations=str(tmp_path / "c.json"))[0]


def test_too_many_bad_ones_stay_too_many_when_run_again(hostile, checkpoint, tmp_path, capfd):  # noqa: F811
    """Each run sees a part of them; what counts is all."""
    folder, expected = hostile
    data = ["--data.dataset", "data.captions.ImageCaptionPairs", "--data.dataset.source", str(folder)]
    command = ["extract", *arguments(checkpoint, tmp_path / "cache"), *data, "--data.dataset.size", "64"]
    command[command.index("--data.limit") + 1] = str(len(expected))
    bad = sum(reason is not None for reason in expected.values())
    for _ in range(8):
        assert main([*command, f"--max-bad-fraction={0.8 * bad / len(expected)}"]) == 2
    assert f"{bad} of {len(expected)} items cannot be used" in capfd.readouterr().err
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert main([*command, f"--max-bad-fraction={bad / len(expected)}"]) == 0


class Captions(torch.utils.data.Dataset):
    """Images of one colour; every third caption has no word."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        words = "" if index % 3 == 2 else f"a b {index}"
        return {"image": torch.full((3, 64, 64), 20 * index, dtype=torch.uint8), "caption": words}


def test_captions_that_the_target_refuses_are_skipped(checkpoint, tmp_path):  # noqa: F811
    data = ["--data.dataset", "tests.test_captions.Captions", "--max-bad-fraction", "0.4"]
    command = ["extract", *arguments(checkpoint, tmp_path), *data]
    command[command.index("--data.limit") + 1] = "12"
    assert main(command) == 0
    cache = FeatureCache(tmp_path)
    assert len(cache) == 8 and cache.skipped == {"caption with no words": 4}
    online = OnlineFeatures(Captions(), str(checkpoint), dtype="float32", batch_size=2)
    online.setup("fit")
    cached = [cache[index].caption for index in range(8)]
    assert [online.cache[index].caption for index in range(len(online.cache))] == cached


@pytest.mark.parametrize("workers", [0, 3])
def test_a_stream_is_extracted_whole_whatever_the_workers(checkpoint, tmp_path, workers):  # noqa: F811
    (tmp_path / "tars").mkdir()
    where = webdataset(tmp_path / "tars")["source"]
    data = ["--data.dataset", "data.captions.ImageCaptionPairs", "--data.dataset.source", where]
    data += ["--data.dataset.streaming", "true", "--data.dataset.limit", "6", "--data.dataset.size", "64"]
    command = ["extract", *arguments(checkpoint, tmp_path / "cache"), *data, "--data.workers", str(workers)]
    command[command.index("--data.limit") + 1] = "6"
    assert main(command) == 0
    cache = FeatureCache(tmp_path / "cache")
    assert [cache[index].caption for index in range(6)] == [words for _, _, words in images()]
