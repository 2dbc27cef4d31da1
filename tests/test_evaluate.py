"""`coolsd evaluate` on a toy target: results.json is strict JSON, complete, and follows from its own raw numbers."""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from coolsd import cli, evaluate, report, results
from coolsd.generate_images import EMOJI_SAMPLING

CAPTIONS = ["a b", "../../x", "<script>alert(1)</script>", "c"]
METHODS = """
methods:
  - {name: eagle-1, rule: vanilla}
  - {name: cool & hot, rule: cool-sd, delta: 2, floor: 1.0, length: 3, first: 3}
  - name: uniform
    rule: {class_path: coolsd.rules.relaxed.Uniform, init_args: {delta: 1.5}}
    drafter: {class_path: coolsd.drafters.chain.Chain, init_args: {length: 2}}
"""


@pytest.fixture(scope="module")
def command(saved_toy, tmp_path_factory):
    """`evaluate` of three methods with the saved toy pair."""
    recipe = tmp_path_factory.mktemp("recipe") / "evaluate.yaml"
    recipe.write_text(METHODS)
    return [
        "--config", str(recipe), "--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"),
        "--dtype", "float32", "--prompts", json.dumps(CAPTIONS), "--repeats", "2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(command, tmp_path_factory):
    """(folder, results.json) of one run."""
    out = tmp_path_factory.mktemp("run")
    assert cli.main(["evaluate", *command, "--out", str(out)]) == 0

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return out, json.loads((out / "results.json").read_text("utf-8"), parse_constant=refuse)


def test_plain_decoding_is_the_first_row_with_speedup_one(run):
    _, found = run
    assert [row["name"] for row in found["rows"]] == ["ar", "eagle-1", "cool & hot", "uniform"]
    plain = found["rows"][0]
    assert plain["speedup"] == 1.0 and plain["speedup_ci95"] == [1.0, 1.0] and plain["rule"] is None
    assert plain["accepted_length"] == {"mean": 1.0, "std": 0.0, "ci95": [1.0, 1.0]}
    assert plain["bias_per_token"]["mean"] == 0 and plain["kl_per_token"]["mean"] == 0


def test_rows_have_what_the_design_promises(run):
    _, found = run
    assert found["schema"] == 1 and found["prompts"] == 4 and found["target"].startswith("target@")
    assert {"versions", "device", "cpu", "threads", "dtype", "date", "command"} <= set(found["environment"])
    for row in found["rows"]:
        assert {"mean", "std", "ci95"} == set(row["latency_s"]) and set(row["seconds"]) >= {"draft", "target", "verify"}
        assert row["fid"] is row["clip_score"] is row["image_reward"] is None
        assert row["sampling"] == asdict(EMOJI_SAMPLING)
    relaxed, custom = found["rows"][2:]
    assert relaxed["rule"]["name"] == "cool-sd" and relaxed["drafter"]["depth"] == 3
    assert len(relaxed["rule"]["schedule"]) == len(relaxed["acceptance_per_position"]) == 3
    assert min(relaxed["rule"]["schedule"]) >= 1 and relaxed["drafter"]["head"] == found["draft"]
    assert custom["rule"]["schedule"] == [1.5, 1.5] and custom["drafter"]["depth"] == 2
    assert found["rows"][1]["bias_per_token"]["mean"] == 0 < relaxed["bias_per_token"]["mean"]


def test_without_certificates_everything_else_is_the_same(command, run, tmp_path):
    assert cli.main(["evaluate", *command, "--certificates", "false", "--out", str(tmp_path)]) == 0
    found, before = json.loads((tmp_path / "results.json").read_text()), run[1]
    assert before["certificates"] is True and found["certificates"] is False
    for row, certified in zip(found["rows"][1:], before["rows"][1:], strict=True):
        assert row["bias_per_token"] is row["kl_per_token"] is None is not certified["bias_per_token"]
        for name in ("accepted_length", "nll_per_token", "acceptance_per_position"):
            assert row[name] == certified[name]
    deviate = ["cool & hot", "uniform"]
    assert [row["name"] for row in results.relaxed(found["rows"])] == deviate
    assert [row["name"] for row in results.relaxed(before["rows"])] == deviate
    bias = next(axis for axis in report.chart(found).axes if axis.get_title().startswith("bias"))
    assert [text.get_text().strip() for text in bias.texts] == ["-"] * 4  # not 0
    assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 2  # its journal is not continued with them


def test_a_caption_without_words_is_told_by_its_number(command, tmp_path, capfd):
    captions = ["a b"] * 66 + [" ", "a"]  # beyond the first that are encoded together
    assert cli.main(["evaluate", *command, "--prompts", json.dumps(captions), "--out", str(tmp_path / "run")]) == 2
    assert "caption 66 (' ') has no words" in capfd.readouterr().err and not (tmp_path / "run").exists()


def test_summaries_follow_from_the_numbers_of_single_images(run):
    _, found = run
    plain = dict(zip(found["rows"][0]["per_image"]["row"], found["rows"][0]["per_image"]["latency_s"], strict=True))
    for row, prompts in zip(found["rows"], (4, 4, 3, 4), strict=True):
        raw = row["per_image"]
        assert row["images"] == len(raw["row"]) == 2 * prompts
        assert raw["row"] == [4 * repeat + prompt for repeat in range(2) for prompt in range(prompts)]
        for key in results.MEASURED:
            assert math.isclose(row[key]["mean"], statistics.fmean(raw[key]), abs_tol=1e-12)
            assert math.isclose(row[key]["std"], statistics.stdev(raw[key]), abs_tol=1e-12)
            # two images a caption are one observation: their mean
            of_captions = [statistics.fmean(raw[key][prompt::prompts]) for prompt in range(prompts)]
            error = stats.t.ppf(0.975, prompts - 1) * stats.sem(of_captions)
            assert row[key]["ci95"][1] - row[key]["mean"] == pytest.approx(error, rel=1e-4, abs=1e-12)
        assert [round(8 / calls, 5) for calls in raw["target_calls"]] == [round(a, 5) for a in raw["accepted_length"]]
        speedup = statistics.fmean(plain[i] for i in raw["row"]) / statistics.fmean(raw["latency_s"])
        assert math.isclose(row["speedup"], speedup) and row["speedup_ci95"][0] <= speedup <= row["speedup_ci95"][1]
        assert math.isclose(row["speedup_over_accepted_length"], speedup / row["accepted_length"]["mean"])


def test_every_method_draws_every_prompt_once_inside_the_folder(run):
    out, found = run
    files = [file for row in found["rows"] for file in row["per_image"]["file"] if file]
    assert len(set(files)) == 4 + 4 + 3 + 4
    assert {str(file.relative_to(out)) for file in (out / "images").rglob("*.png")} == set(files)
    hostile = next(file for file in files if file.startswith("images/0001"))
    assert Image.open(out / hostile).text["caption"] == "../../x"


def test_results_do_not_depend_on_the_batch_size(run, command, tmp_path):
    _, found = run
    evaluate.main([*command, "--out", str(tmp_path), "--batch_size", "3"])
    batched = json.loads((tmp_path / "results.json").read_text())
    for one, many in zip(found["rows"], batched["rows"], strict=True):
        assert one["per_image"]["target_calls"] == many["per_image"]["target_calls"]

    for row in batched["rows"][:2]:  # prompts 0 to 2 share a clock, prompt 3 has its own; two repeats
        latency, batch = row["per_image"]["latency_s"], row["per_image"]["batch"]
        assert batch == [0, 0, 0, 3, 4, 4, 4, 7] and len(set(latency)) == 4
        assert math.isclose(row["latency_s"]["mean"], statistics.fmean(latency))  # an image counts once, not a batch
        seconds, images = (3 * (latency[0] + latency[4]), latency[3] + latency[7]), (6, 2)  # of what ran together
        off = [time - row["latency_s"]["mean"] * count for time, count in zip(seconds, images, strict=True)]
        error = stats.t.ppf(0.975, 1) * stats.sem(off) / 4
        assert row["latency_s"]["ci95"][1] - row["latency_s"]["mean"] == pytest.approx(error, rel=1e-4)
        plain = batched["rows"][0]["per_image"]["latency_s"]
        assert math.isclose(row["speedup"], statistics.fmean(plain) / statistics.fmean(latency))


def test_ctrl_c_keeps_what_all_methods_have_decoded(run, command, tmp_path, monkeypatch):
    _, found = run
    real, calls = evaluate.generate, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4 * 3 + 3:  # one unmeasured round, then two whole prompts and half of the third
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(evaluate, "generate", interrupted)
    assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 130
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["captions"] == CAPTIONS[: kept["prompts"]] and kept["prompts"] in (2, 3)
    for whole, cut in zip(found["rows"], kept["rows"], strict=True):
        count = len(cut["per_image"]["row"])
        assert count >= 2 and cut["per_image"]["target_calls"] == whole["per_image"]["target_calls"][:count]

    with (tmp_path / evaluate.JOURNAL).open("ab") as file:
        file.write(b'["uniform 1 3", [{"prom')  # power went off within a line
    calls.clear()
    monkeypatch.setattr(evaluate, "generate", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 0
    assert len(calls) == 4 + 2 * (4 + 4 + 3 + 4) - 10  # warm up again, then what was not measured before: 4 + 4 + 2
    again = json.loads((tmp_path / "results.json").read_text())
    for whole, resumed, cut in zip(found["rows"], again["rows"], kept["rows"], strict=True):
        for key in ("row", "target_calls", "file", "nll_per_token"):
            assert resumed["per_image"][key] == whole["per_image"][key]
        assert resumed["per_image"]["latency_s"][: cut["images"]] == cut["per_image"]["latency_s"]

    calls.clear()
    assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 0 and not calls
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == again["rows"]


def test_a_folder_of_other_settings_or_files_is_left_alone(run, command, tmp_path, capfd):
    folder, _ = run
    before = (folder / evaluate.JOURNAL).read_bytes()
    assert cli.main(["evaluate", *command, "--out", str(folder), "--seed", "1", "--repeats", "1"]) == 2
    assert "begun with another repeats and seed; choose another folder" in capfd.readouterr().err
    assert (folder / evaluate.JOURNAL).read_bytes() == before
    for content in (
        b"precious notes without an end",
        b"{}\n[]\n",
        b"[1]\n",
        b"\xff\n",
        b"{}\n" + b"[" * 100_000 + b"\n",
    ):
        (tmp_path / evaluate.JOURNAL).write_bytes(content)
        assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 2
        assert "no record of finished images" in capfd.readouterr().err
        assert (tmp_path / evaluate.JOURNAL).read_bytes() == content
    (tmp_path / evaluate.JOURNAL).rename(tmp_path / "results.json")
    assert cli.main(["evaluate", *command, "--out", str(tmp_path)]) == 2
    assert "cannot be continued" in capfd.readouterr().err and (tmp_path / "results.json").read_bytes() == content


def test_a_picture_that_was_deleted_is_drawn_again(run, command, monkeypatch):
    folder, found = run
    calls, real = [], evaluate.generate
    monkeypatch.setattr(evaluate, "generate", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    (folder / found["rows"][1]["per_image"]["file"][2]).unlink()
    assert cli.main(["evaluate", *command, "--out", str(folder)]) == 0 and len(calls) == 2  # warm up, draw
    assert json.loads((folder / "results.json").read_text())["rows"][1]["images"] == 8


def test_a_rule_of_ones_own_is_a_class_path(command, tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text("""
from dataclasses import dataclass

@dataclass(frozen=True)
class Squared:
    weights: tuple[float, ...] = (1.0, 0.5)

    def accept_probs(self, target_probs, draft_probs, depth):
        return (target_probs / draft_probs).clamp(max=1).sqrt()
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = tmp_path / "own.yaml"
    recipe.write_text("methods: [{name: own, rule: {class_path: my_rules.Squared}}]")
    for _ in range(2):  # the second time it goes on, from settings that came back as lists
        assert cli.main(["evaluate", *command[2:], "--config", str(recipe), "--out", str(tmp_path / "out")]) == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][1]
    assert row["rule"]["name"] == "my_rules.Squared" and row["bias_per_token"]["mean"] > 0


def test_check_decodes_and_writes_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "generate", lambda *_: pytest.fail("--check must not decode"))
    evaluate.main([*command, "--out", str(tmp_path / "none"), "--check"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("differ", ["--methods", "[{name: a}, {name: A}]"]),
        ("differ", ["--methods", "[{name: ar}]"]),
        ("no rule named", ["--methods", "[{name: a, rule: warm}]"]),
        ("no drafter named", ["--methods", "[{name: a, drafter: tree}]"]),
        ("first is 9", ["--methods", "[{name: a, first: 9}]"]),
        ("whole batches of 2", ["--methods", "[{name: a, first: 3}]", "--batch_size", "2"]),
        ("must be >= 1", ["--repeats", "0"]),
        ("empty list", ["--prompts", "[]"]),
        ("no checkpoint", ["--head", "nowhere"]),
    ],
)
def test_mistakes_are_one_sentence(words, arguments, command, tmp_path, capsys):
    assert cli.main(["evaluate", *command, "--out", str(tmp_path / "none"), "--check", *arguments]) == 2
    sentence = capsys.readouterr().err.strip()
    assert words in sentence and "\n" not in sentence


def test_the_interval_is_students():
    values = [1.0, 2.0, 4.0, 4.5, 5.0, 8.0, 8.5, 9.0]
    low, high = results.summary(values)["ci95"]
    expected = stats.t.interval(0.95, 7, loc=statistics.fmean(values), scale=stats.sem(values))
    assert math.isclose(low, expected[0], rel_tol=1e-3) and math.isclose(high, expected[1], rel_tol=1e-3)
    for df in range(1, 200):
        assert results.student(df) == pytest.approx(stats.t.ppf(0.975, df), rel=2e-3 if df < 8 else 3e-4)
    assert results.summary([3.0]) == {"mean": 3.0, "std": None, "ci95": None} and results.summary([]) is None


def test_differences_to_a_baseline_are_students_paired_t(run, command, tmp_path, capfd):
    folder, _ = run
    assert cli.main(["evaluate", *command, "--out", str(folder), "--baseline", "cool & hot"]) == 0
    found = json.loads((folder / "results.json").read_text())
    base, table = found["rows"][2], (folder / "table.md").read_text()
    assert found["baseline"] == "cool & hot" and base["against_baseline"] is None
    assert "less cool & hot, image by image" in table and "less cool &amp; hot" in (folder / "report.html").read_text()
    for row in found["rows"]:
        for key in results.COMPARED if row is not base else ():
            by_row = dict(zip(row["per_image"]["row"], row["per_image"][key], strict=True))
            own = [by_row[index] for index in base["per_image"]["row"]]  # six images; the others have eight
            pairs = [[statistics.fmean(of[prompt::3]) for prompt in range(3)] for of in (own, base["per_image"][key])]
            expected, difference = stats.ttest_rel(*pairs), row["against_baseline"][key]  # an observation a caption
            assert math.isclose(difference["t"], expected.statistic, rel_tol=1e-3)
            low, high = expected.confidence_interval()
            assert difference["ci95"] == pytest.approx([low, high], rel=1e-3, abs=1e-3)
    assert cli.main(["evaluate", *command, "--out", str(tmp_path), "--baseline", "warm"]) == 2
    assert "no method named 'warm' for a baseline; choose one of ar, eagle-1" in capfd.readouterr().err


def covered(interval, truth):
    return interval["ci95"][0] <= truth <= interval["ci95"][1]


@pytest.mark.parametrize(("captions", "images"), [(4, 8), (16, 4), (16, 1)])
def test_intervals_cover_the_truth_however_images_share_captions(captions, images):
    """95% of 2000 intervals, within 4 standard errors; by image, where four share a caption, no more than 75%."""
    rng, hits, naive = np.random.default_rng(0), 0, 0
    groups = np.repeat(np.arange(captions), images).tolist()
    for _ in range(2000):
        values = (np.repeat(rng.normal(size=captions), images) + 0.5 * rng.normal(size=captions * images)).tolist()
        hits += covered(results.summary(values, groups), 0.0)
        naive += covered(results.summary(values), 0.0)
    assert abs(hits / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)
    assert naive < 0.75 * 2000 or images == 1


@pytest.mark.parametrize("batches", [2, 4, 8, 64])
def test_intervals_of_speed_ups_cover_the_truth_of_few_batches_too(batches):
    rng, hits = np.random.default_rng(1), 0
    for _ in range(2000):
        plain, own = 2 + 0.2 * rng.normal(size=batches), 1 + 0.1 * rng.normal(size=batches)
        hits += covered(results.ratio(plain.tolist(), own.tolist()), 2.0)
    assert abs(hits / 2000 - 0.95) < 0.005 + 4 * math.sqrt(0.95 * 0.05 / 2000)  # 0.005: linear in the noise only


def test_acceptance_by_position_is_that_of_the_tests_whatever_an_image_cuts_off():
    # depth 2; calls with 3, 1 tokens, then 1 at the image's end, whose test is not known; 2, and 3 at an end
    assert results.acceptance_per_position([[3, 1, 1], [2, 3]], 2) == [3 / 4, 2 / 3]
    assert results.acceptance_per_position([[1, 1]], 2) == [0.0, None]
    rng, images, truth, depth, length = np.random.default_rng(0), [], 0.8, 5, 16
    for _ in range(3000):
        left, calls = length, []
        while left:
            passed = int((np.cumprod(rng.random(depth) < truth)).sum())
            calls.append(min(left, passed + 1))
            left -= calls[-1]
        images.append(calls)
    for share in results.acceptance_per_position(images, depth):
        assert abs(share - truth) < 0.015  # 0.04 below, if the last calls are left out whole


def test_every_drafter_and_every_rule_has_a_short_name_in_a_recipe(saved_toy, tmp_path):
    recipe = tmp_path / "methods.yaml"
    recipe.write_text("""
methods:
  - {name: window, drafter: sjd, length: 4, rule: cool-sd}
  - {name: coupled, drafter: scd, rule: lantern, k: 2, bound: 0.3, resampling: own}
  - {name: tree, drafter: eagle-25, rule: grouped}
  - {name: large tree, drafter: lantern-57, rule: linear-sd, delta: 1.2}
  - {name: best, drafter: dynamic-tree, rule: lantern++, k: 3}
  - name: by class
    drafter: {class_path: coolsd.drafters.jacobi.Jacobi, init_args: {window: 3, coupling: maximal}}
    rule: vanilla
""")
    arguments = ["--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--device", "cpu"]
    arguments += ["--config", str(recipe), "--prompts", '["a b", "c"]', "--out", str(tmp_path / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"][1:]
    names = ["jacobi", "jacobi", "static-tree", "static-tree", "dynamic-tree", "jacobi"]
    assert [row["drafter"]["name"] for row in rows] == names
    assert [row["drafter"]["nodes"] for row in rows] == [4, 16, 26, 58, 26, 3]  # the root counts
    assert [row["drafter"]["head"] is None for row in rows] == [True, True, False, False, False, True]
    assert all(row["kl_per_token"] is None for row in rows[1:5])  # own resampling and trees have no such certificate
    assert rows[5]["bias_per_token"]["mean"] == 0 and all(row["bias_per_token"]["mean"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{name: x, drafter: eagle-25, rule: vanilla, length: 3}", "length: drafter eagle-25 has a shape of its own"),
        ("{name: x, drafter: eagle-26, rule: vanilla}", "no drafter named 'eagle-26'"),
        ("{name: x, rule: lantern, k: 5}", "k is 5, but must be at most 4"),
        ("{name: x, rule: vanilla, k: 5}", "rule vanilla has no k"),
    ],
)
def test_wrong_methods_are_told_in_a_sentence(line, said, saved_toy, tmp_path, capsys):
    recipe = tmp_path / "methods.yaml"
    recipe.write_text(f"methods: [{line}]")
    arguments = ["--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--device", "cpu"]
    assert cli.main(["evaluate", "--config", str(recipe), *arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


FATAL = '''
import os
import signal
from dataclasses import dataclass
from pathlib import Path

tests = []


@dataclass(frozen=True)
class Fatal:
    """Uniform relaxation that kills its process at the 12th test, once: where the file is, and takes it along."""

    flag: str

    def accept_probs(self, target_probs, draft_probs, depth):
        tests.append(depth)
        if len(tests) == 12 and Path(self.flag).exists():
            Path(self.flag).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return (1.5 * target_probs / draft_probs).clamp(max=1)
'''


def test_two_processes_one_of_them_killed_are_one(command, tmp_path, monkeypatch, capfd):
    """torchrun: the prompts are shared; SIGKILL amid the work, the same command again, and the results are those of
    one process that nobody disturbed, latencies aside."""
    (tmp_path / "fatal.py").write_text(FATAL)
    flag = tmp_path / "flag"
    recipe = tmp_path / "fatal.yaml"
    recipe.write_text(f"""
methods:
  - {{name: eagle-1, rule: vanilla}}
  - {{name: fatal, rule: {{class_path: fatal.Fatal, init_args: {{flag: {flag}}}}}}}
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["evaluate", *command[2:], "--config", str(recipe), "--out"]
    assert cli.main([*words, str(tmp_path / "one")]) == 0
    flag.touch()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    codes = []
    for _ in range(2):
        shared = [*launch, "-m", "coolsd.cli", *words, str(tmp_path / "two")]
        codes.append(subprocess.run(shared, env=environment, capture_output=True, timeout=300).returncode)
        codes.append((tmp_path / "two" / "results.json").exists())
    assert codes == [1, False, 0, True] and not flag.exists()
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2) and two["captions"] == CAPTIONS
    for alone, shared in zip(one["rows"], two["rows"], strict=True):
        for key in ("row", "target_calls", "file", "accepted_length"):
            assert alone["per_image"][key] == shared["per_image"][key]
        assert alone["per_image"]["nll_per_token"] == pytest.approx(shared["per_image"]["nll_per_token"], rel=1e-5)
        assert alone["length_at_token"] == shared["length_at_token"]
        for name in alone["per_image"]["file"]:
            if name is not None:
                with Image.open(tmp_path / "one" / name) as a, Image.open(tmp_path / "two" / name) as b:
                    assert a.tobytes() == b.tobytes()
    (tmp_path / "two" / evaluate.journal_name(1)).rename(tmp_path / "elsewhere")  # on a disk of its own
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(evaluate.torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(evaluate.torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(evaluate.torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(evaluate.torch, "get_num_threads", lambda: 1)
    assert cli.main([*words, str(tmp_path / "two")]) == 2
    assert "12 of 24 batches are in no journal" in capfd.readouterr().err
    (tmp_path / "elsewhere").rename(tmp_path / "two" / evaluate.journal_name(1))
    shares = [(tmp_path / "two" / evaluate.journal_name(rank)).read_bytes().count(b"\n") for rank in (0, 1)]
    assert shares == [1 + 3 * 4] * 2  # settings, and half of the 8 batches by each of 3 methods
