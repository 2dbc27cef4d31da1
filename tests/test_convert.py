"""Published checkpoints through `coolsd convert`: the official numbers come out, and the same bytes come back."""

import itertools
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import coolsd
from coolsd.checkpoint import save_checkpoint
from coolsd.cli import main
from coolsd.heads.checkpoint import read_head
from coolsd.image_tokenizers import load_image_tokenizer
from coolsd.interfaces import DraftTree
from coolsd.sampling import Sampling
from coolsd.targets.captions import T5Encoder
from coolsd.verify import verify

PARITY = Path(__file__).parent / "parity"


class Golden(nn.Module):
    """A caption encoder that returns the golden features, whatever it is asked."""

    def __init__(self, features, mask):
        super().__init__()
        self.features, self.mask = features, mask.bool()

    def forward(self, captions, slots):
        return self.features, self.mask


def facts(name):
    return json.loads((PARITY / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Golden weights in the files that their authors publish."""
    folder = tmp_path_factory.mktemp("published")
    torch.save({"model": load_file(PARITY / "llamagen_gpt_a_weights.safetensors")}, folder / "t2i.pt")
    vq = {}
    for path in sorted(PARITY.glob("llamagen_vq_a_weights_*.safetensors")):
        vq |= load_file(path)
    torch.save({"model": vq}, folder / "vq.pt")
    drafter, whole = "lantern_drafter_llamagen_a", "lantern_e2e_a"
    for name, weights, config, file in (
        ("lantern", "lantern_llamagen_a_weights", facts("lantern_llamagen_a")["hf_config"], "model.safetensors"),
        ("drafter", f"{drafter}_weights", facts(drafter)["config"], "pytorch_model.bin"),
        ("e2e", f"{whole}_base_weights", facts(whole)["base_hf_config"], "model.safetensors"),
        ("e2e-drafter", f"{whole}_drafter_weights", facts(whole)["drafter_config"], "model.safetensors"),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        tensors = load_file(PARITY / f"{weights}.safetensors")
        (save_file if file.endswith("safetensors") else torch.save)(tensors, folder / name / file)
    return folder


def convert(source, out, *more):
    assert main(["convert", str(source), "--out", str(out), *more]) == 0
    return out


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("ours")
    convert(sources / "t2i.pt", out / "t2i", "--image_size", "64", "--heads", "4")
    for name in ("lantern", "e2e", "drafter", "e2e-drafter"):
        convert(sources / name, out / name)
    convert(sources / "vq.pt", out / "vq", "--image-size", "16")
    return out


def test_an_official_transformer_gives_the_official_numbers(converted):
    io = load_file(PARITY / "llamagen_gpt_a_io.safetensors")
    target = coolsd.load_target(converted / "t2i", "cpu", "float32")
    target.caption_encoder = Golden(io["in.caption_left_padded"], io["in.mask_left"])
    output = target.forced(target.encode(["", "", ""], guidance=True), io["in.tokens"])
    for branch, name in enumerate(("cond", "uncond")):
        torch.testing.assert_close(output.logits[:, branch], io[f"train_{name}.logits"], rtol=0, atol=1e-4)


def test_lanterns_folder_holds_the_same_transformer_and_scores_trees_as_lantern(converted):
    official, lantern = (load_file(converted / name / "model.safetensors") for name in ("t2i", "lantern"))
    assert official.keys() == lantern.keys() and all(torch.equal(official[name], lantern[name]) for name in official)
    io = load_file(PARITY / "lantern_llamagen_a_io.safetensors")
    target = coolsd.load_target(converted / "lantern", "cpu", "float32")
    target.caption_encoder = Golden(io["in.caption_left_padded"], io["in.mask_left"])
    prompt = target.encode([""], guidance=True)
    output, cache = target.prefill(prompt, 5)
    mask, slots = prompt.mask[0], prompt.mask.shape[-1]
    torch.testing.assert_close(output.hidden_states[0][mask], io["prefill_hidden"][mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits[0, :, 0], io["prefill_logits"][:, -1], rtol=0, atol=1e-4)
    guided = [Sampling(guidance=7.5).guided(output.logits)]
    for step in range(3):
        tree = DraftTree(io["in.tokens"][:, step : step + 1], (-1,), torch.empty(1, 0, 97))
        output = target.score(tree, prompt, cache)
        cache.keep(None, torch.ones(2, dtype=torch.long), slots + step + 1)
        torch.testing.assert_close(output.hidden_states[0, :, 0], io["step_hidden"][:, step], rtol=0, atol=1e-5)
        torch.testing.assert_close(output.logits[0, :, 0], io["step_logits"][:, step], rtol=0, atol=1e-4)
        guided.append(Sampling(guidance=7.5).guided(output.logits))
    torch.testing.assert_close(torch.cat(guided, 1)[0], io["cfg_logits"][:4], rtol=0, atol=1e-3)
    among = io["tree.mask"][0, 0] > 0
    parent = tuple(max([m for m in range(n) if among[n, m]], default=-1) for n in range(5))
    output = target.score(DraftTree(io["tree.tokens"], parent, torch.empty(1, 0, 97)), prompt, cache)
    torch.testing.assert_close(output.hidden_states[0], io["tree.hidden"], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits[0], io["tree.logits"], rtol=0, atol=1e-4)


def test_an_image_tokenizer_codes_like_the_official_one(converted):
    io = load_file(PARITY / "llamagen_vq_a_io.safetensors")
    model = load_image_tokenizer(converted / "vq")
    assert torch.equal(model.encode(io["in.image"])[1].flatten(), io["encode.indices"])
    torch.testing.assert_close(model.decode_code(io["in.codes"]), io["decode_code.image"], rtol=0, atol=1e-4)


def test_a_published_head_is_the_golden_one(converted, official_drafter):
    golden, _, _, _ = official_drafter
    ends = {"embedding": golden.embedding, "lm_head": golden.lm_head, "rope": golden.rope}
    with pytest.warns(UserWarning, match="does not say which target"):
        head = read_head(converted / "drafter", ends, "any@0")
    assert head.config == golden.config
    assert all(torch.equal(value, golden.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "to", "file"),
    [
        ("t2i", "llamagen", "llamagen.pt"),
        ("lantern", "lantern-llamagen", "model.safetensors"),
        ("drafter", "lantern-drafter", "model.safetensors"),
    ],
)
def test_there_and_back_is_the_same_bit_by_bit(sources, converted, tmp_path, name, to, file):
    back = convert(converted / name, tmp_path / "back", "--to", to)
    again = torch.load(back / file, weights_only=True)["model"] if file.endswith(".pt") else load_file(back / file)
    source = {"t2i": "llamagen_gpt_a", "lantern": "lantern_llamagen_a", "drafter": "lantern_drafter_llamagen_a"}[name]
    first = load_file(PARITY / f"{source}_weights.safetensors")
    assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first)
    if to != "llamagen":  # what the authors' code reads of it
        then, now = (json.loads((folder / "config.json").read_text()) for folder in (sources / name, back))
        for key in then.keys() & now.keys() - {"max_position_embeddings", "torch_dtype"}:
            assert now[key] == then[key], key


def test_a_head_of_ours_becomes_lanterns_with_its_targets_embedding(saved_toy, tmp_path, capfd):
    source = saved_toy / "draft"
    assert main(["convert", str(source), "--out", str(tmp_path / "out"), "--to", "lantern-drafter"]) == 2
    assert "give --target" in capfd.readouterr().err and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def pair(converted):
    """LANTERN's tiny target and drafter, converted, with its captions and its codebook."""
    given = load_file(PARITY / "lantern_e2e_a_in.safetensors")
    target = coolsd.load_target(converted / "e2e", "cpu", "float32")
    target.caption_encoder = Golden(given["t5_embeddings_right_padded"], given["t5_mask"])  # it fills all slots
    target.codebook = lambda: given["codebook"]
    with pytest.warns(UserWarning, match="only shapes were checked"):
        return target, coolsd.load_head(converted / "e2e-drafter", target)


def test_greedy_decoding_with_a_converted_pair_is_lanterns_run(pair):
    (target, head), run = pair, facts("lantern_e2e_a")["runs"]["greedy"]
    sampling = Sampling(guidance=facts("lantern_e2e_a")["config"]["cfg"], temperature=0)
    for drafter, rule in ((None, None), (coolsd.StaticTree(head, "eagle-25"), coolsd.Vanilla())):
        result = coolsd.generate(target, [""], drafter, rule, sampling, decode_images=False)
        assert result.tokens[0, : len(run["ids"])].tolist() == run["ids"]


class Replayed(Exception):
    pass


class Script:
    """The chance of a golden run, handed out as LANTERN's code asked for it: a uniform for each test that was executed,
    ten tokens for each node whose children are drafted, one at the end of a round."""

    def __init__(self, run, drafter):
        self.uniforms, self.multinomials = iter(run["uniform_draws"]), iter(run["multinomial_outputs_in_call_order"])
        self.rounds, self.lengths, self.ids, self.deciding = len(run["accept_lengths"]), [], [], False
        self.children = [
            [node for node, above in enumerate(drafter.parent) if above == own] for own in range(drafter.nodes)
        ]
        self.columns = self.ranks(drafter)

    def ranks(self, drafter):
        for level in itertools.cycle(drafter.levels):
            rows = torch.tensor(next(self.multinomials))  # [nodes of the level, 10]
            assert rows.shape == (level.last - level.first, 10)
            yield from rows[:, : len(level.draws)].unbind(1)

    def draft(self, left, uniforms):
        tokens = next(self.columns)[None, : left.shape[1]]
        assert bool((left.gather(-1, tokens[..., None]) > 0).all())
        return tokens

    def draw(self, probs, uniforms):
        if self.deciding:
            return torch.zeros(1, dtype=torch.long)
        token = torch.tensor(next(self.multinomials)).flatten()
        assert float(probs[0, token]) > 0
        self.ids = self.ids or token.tolist()  # that of the prefill
        return token

    def verify(self, tree, probs, rule, relaxation, uniforms, certificates):
        """One test more each time; one that has no uniform yet fails, so it is seen which one comes next."""
        node, known = 0, torch.full_like(uniforms, torch.inf)
        self.deciding = True
        while untested := [child for child in self.children[node] if known[0, child - 1] == torch.inf]:
            known[0, untested[0] - 1] = next(self.uniforms)
            decision = verify(tree, probs, rule, relaxation, known, False)
            if untested[0] in decision.path[0, : decision.emitted].tolist():
                node = untested[0]
        self.deciding = False
        decision = verify(tree, probs, rule, relaxation, known, certificates)
        self.ids += decision.tokens[0, : decision.emitted].tolist()
        self.lengths.append(int(decision.emitted) - 1)
        if len(self.lengths) == self.rounds:
            raise Replayed
        return decision


@pytest.mark.parametrize(
    ("name", "rule", "other"),
    [
        ("plain", coolsd.Vanilla(), coolsd.Uniform(1.2)),
        ("lantern", coolsd.Lantern(5, 0.3, "own"), coolsd.Lantern(5, 0.05, "own")),
        ("lanternpp", coolsd.LanternPP(8, 4.0, "own"), coolsd.LanternPP(8, 2.0, "own")),
    ],
)
def test_sampled_decoding_with_a_converted_pair_is_lanterns_run(pair, name, rule, other, monkeypatch):
    (target, head), run = pair, facts("lantern_e2e_a")["runs"][name]
    settings = run["settings"]
    sampling = Sampling(settings["temperature"], settings["top_k"], 1.0, facts("lantern_e2e_a")["config"]["cfg"])

    def replayed(rule):
        drafter = coolsd.StaticTree(head, "eagle-25")
        script = Script(run, drafter)
        monkeypatch.setattr("coolsd.drafters.static_tree.draw", script.draft)
        monkeypatch.setattr("coolsd.decode.draw", script.draw)
        monkeypatch.setattr("coolsd.verify.draw", script.draw)
        monkeypatch.setattr("coolsd.decode.verify", script.verify)
        with pytest.raises((Replayed, StopIteration, AssertionError)):
            coolsd.generate(target, [""], drafter, rule, sampling, decode_images=False)
        return script

    script = replayed(rule)
    assert script.lengths == run["accept_lengths"] and script.ids[: len(run["ids"])] == run["ids"]
    assert next(script.uniforms, None) is None
    assert replayed(other).lengths != run["accept_lengths"]  # negative control


# ------------------------------------------------------------------------------------------------ mistakes


class Malicious:
    def __reduce__(self):
        return (print, ("code of the file ran",))


def damaged(kind, sources, folder):
    weights = load_file(PARITY / "llamagen_gpt_a_weights.safetensors")
    path = folder / "t2i.pt"
    if kind == "truncated":
        path.write_bytes((sources / "t2i.pt").read_bytes()[:-5000])
    elif kind == "noise":
        path.write_bytes(bytes(range(256)) * 50)
    elif kind == "malicious":
        path.write_bytes(pickle.dumps(Malicious()))
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind == "missing":
        torch.save({key: value for key, value in weights.items() if "layers.1.attention.wo" not in key}, path)
    elif kind == "widths":
        weights["layers.0.feed_forward.w3.weight"] = weights["layers.0.feed_forward.w3.weight"][:, :-1]
        torch.save(weights, path)
    elif kind == "layers":
        torch.save({**weights, "layers.300000000.attention.wo.weight": torch.ones(2, 2)}, path)
    elif kind == "other":
        torch.save({"encoder.weight": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("truncated", "not a whole checkpoint"),
        ("noise", "not a whole checkpoint"),
        ("malicious", "not a whole checkpoint"),
        ("list", "holds a list, not tensors by name"),
        ("missing", "lacks layers.1.attention.wo.weight"),
        ("widths", "have different widths"),
        ("layers", "a tensor is of layer 300000000, but there are only"),
        ("other", "of no known format: it has encoder.weight"),
        ("absent", "does not exist"),
    ],
)
def test_a_bad_file_is_one_sentence_and_nothing_is_written(kind, said, sources, tmp_path, capfd):
    path = damaged(kind, sources, tmp_path)
    arguments = ["convert", str(path), "--out", str(tmp_path / "out"), "--image_size", "64", "--heads", "4"]
    assert main(arguments) == 2
    output = capfd.readouterr()
    assert said in output.err and "\n" not in output.err.strip() and "code of the file ran" not in output.out
    assert {entry.name for entry in tmp_path.iterdir()} <= {"t2i.pt"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--heads", "4"], "give --image_size"),
        (["--image_size", "64"], "no published size; give its --heads"),
        (["--image_size", "60", "--heads", "4"], "must be a multiple of 16"),
        (["--image_size", "64", "--heads", "4", "--from", "janus"], "no format named 'janus'"),
        (["--image_size", "64", "--heads", "4", "--tokenizer", "VQ"], "has 64 codes, but"),
    ],
)
def test_what_a_file_does_not_say_is_asked_for(more, said, sources, tmp_path, capfd):
    more = [str(sources / "vq.pt") if word == "VQ" else word for word in more]
    assert main(["convert", str(sources / "t2i.pt"), "--out", str(tmp_path / "out"), *more]) == 2
    assert said in capfd.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    assert main(["convert", str(sources / "t2i.pt"), "--out", str(tmp_path / "out"), *more]) == 2
    assert "is there already" in capfd.readouterr().err


def test_captions_are_encoded_once_for_decoding_without_t5(converted, text_encoder, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "target"
    shutil.copytree(converted / "t2i", folder)
    config = json.loads((folder / "config.json").read_text())
    save_checkpoint(folder, {**config, "text_encoder": str(text_encoder)}, load_file(folder / "model.safetensors"))
    (tmp_path / "prompts.txt").write_text("a red apple\ncat\n")
    assert main(["captions", "--target", str(folder), "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert len(list((folder / "captions").iterdir())) == 2
    monkeypatch.setattr(T5Encoder, "_load", lambda self: pytest.fail("its features were kept"))
    target = coolsd.load_target(folder, "cpu", "float32")
    result = coolsd.generate(target, ["cat", "a red apple"], decode_images=False)
    assert result.tokens.shape == (2, 16)
    assert main(["captions", "--target", "emoji/target", "--prompts", str(tmp_path / "prompts.txt")]) == 2
    assert "not prompted through T5" in capfd.readouterr().err
