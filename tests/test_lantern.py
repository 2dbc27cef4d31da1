"""LANTERN and LANTERN++ against the public code's numbers (tests/parity) and a slow loop; the table of neighbours."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import coolsd.rules.lantern as lantern_module
import coolsd.rules.neighbours as neighbours_module
from coolsd import load_target
from coolsd.checkpoint import fingerprint
from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.interfaces import DraftTree
from coolsd.rules.lantern import Lantern, LanternPP
from coolsd.rules.neighbours import nearest, neighbours
from coolsd.rules.relaxed import Vanilla
from coolsd.sampling import Sampling, draw, residual
from coolsd.verify import own_resampling, verify

PARITY = Path(__file__).parent / "parity"
POSTERIOR = json.loads((PARITY / "lantern_posterior_a.json").read_text())
TREES = json.loads((PARITY / "lantern_tree_a.json").read_text())
ONES = torch.ones(1)


def target_of(codebook, folder=None):
    return SimpleNamespace(codebook=lambda: codebook, device=codebook.device, folder=folder)


def rule_of(case, codebook, resampling="own"):
    """The rule of a case; the public code tells LANTERN from LANTERN++ by its bound."""
    if not case["lantern"]:
        return Vanilla()
    kind = Lantern if case["delta"] <= 1 else LanternPP
    return kind(case["k"], case["delta"], resampling).bind(target_of(torch.tensor(codebook)))


# ------------------------------------------------------------------------------------------ parity


def resample(rule, p, q, x):
    if own_resampling(rule):
        return rule.resample(p[None], q[None], ONES, torch.tensor([[x]]))[0]
    return residual(p, torch.minimum(p, q))


@pytest.mark.parametrize("case", POSTERIOR["cases"], ids=lambda case: case["name"])
def test_acceptance_and_own_residual_are_those_of_the_public_code(case):
    rule, seen = rule_of(case, POSTERIOR["codebook"]), iter(case["tests"])
    p, q = torch.tensor(case["p"]), torch.tensor(case["q"])
    for x, qx in zip(case["tokens_in_order"], case["qx_conditional"], strict=True):
        if qx > 0:
            wanted = next(seen)
            token = torch.tensor([x])
            if case["lantern"]:
                mass = rule.accepted_at(p, torch.ones_like(p), ONES, token)  # q = 1: the relaxed mass itself
                torch.testing.assert_close(mass[0].item(), wanted["px_adj"], rtol=1e-5, atol=1e-7)
            mass = rule.accepted_mass(p, torch.full_like(p, qx), ONES)[x]
            torch.testing.assert_close(float(mass) / qx, wanted["accept_prob"], rtol=1e-5, atol=1e-7)
        p = resample(rule, p, q, x)
        q = q * (1 - torch.nn.functional.one_hot(torch.tensor(x), len(q)))
        q = q / q.sum().clamp(min=1e-38)
    assert next(seen, None) is None
    public = torch.tensor([math.nan if value is None else value for value in case["residual"]])
    if case["residual_is_nan"] or bool((public == 1 / len(public)).all()):  # 0 / 0, or uniform: nothing was owed
        public = torch.tensor(case["p"])
        for x in case["rejected_siblings"]:
            public = resample(rule, public, torch.tensor(case["q"]), x)
    torch.testing.assert_close(p, public, rtol=1e-5, atol=1e-7)


def test_for_lumina_the_public_code_spares_the_target_instead():
    """Its file for Lumina-mGPT takes the k + 1 nearest codes out of p, that for Anole (and LlamaGen's) out of q."""
    codebook, p, q = (
        torch.tensor([[0.0], [1.0], [2.1], [9.0]]),
        torch.tensor([0.1, 0.3, 0.4, 0.2]),
        torch.full((4,), 0.25),
    )
    for layout, wanted in ((None, [0.0, 0.3, 0.4, 0.0]), (object(), [0.0, 0.0, 0.0, 0.0])):
        target = target_of(codebook)
        target.layout = layout
        law = resample(LanternPP(1, 5.0, "own").bind(target), p, q, 0)  # m = 1; its k + 1 = 2 nearest are 1 and 2
        torch.testing.assert_close(law, p if layout else torch.tensor(wanted) / sum(wanted))
    law = resample(LanternPP(1, 5.0, "own").bind(target), torch.tensor([0.1, 0.2, 0.2, 0.5]), q, 0)
    torch.testing.assert_close(law, torch.tensor([0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("case", TREES["cases"], ids=lambda case: case["name"])
def test_a_whole_tree_is_decided_as_by_the_public_code(case):
    """The sampled ten of the twelve golden trees: greedy decoding has no acceptance rule here."""
    choices = [[], *TREES["trees"][case["tree"]]["choices"]]
    parent = (-1, *(choices.index(choice[:-1]) for choice in choices[1:]))
    children = {node: [c for c, above in enumerate(parent) if above == node] for node in range(len(parent))}
    inner = [node for node in children if children[node]]
    q = torch.zeros(1, max(inner) + 1, TREES["vocab"])
    q[0, inner] = torch.tensor(case["draft_probs_rows"])
    tokens = torch.tensor([case["tree_candidates"]])
    p = Sampling(case["temperature"], case["top_k"]).probs(torch.tensor([[case["target_logits_per_node"]]]))
    # the public code draws a number per executed test; ours has one per node
    uniforms, node, tried = torch.zeros(len(parent)), 0, 0
    for test in case["trace"]:
        while tokens[0, children[node][tried]] != test["token"]:
            tried += 1  # a candidate without draft mass is skipped
        child = children[node][tried]
        uniforms[child - 1] = test["r"]
        node, tried = (child, 0) if test["accepted"] else (node, tried + 1)
    uniforms = uniforms.repeat(200, 1)
    uniforms[:, -1] = (torch.arange(200) + 0.5) / 200  # traces the final law
    rule = rule_of(case, TREES["codebook"])
    tree = DraftTree(tokens.expand(200, -1), parent, q.expand(200, -1, -1))
    for certificates in (False, True):
        decision = verify(tree, p.expand(200, -1, -1), rule, torch.ones(tree.depth), uniforms, certificates)
        accepted = case["result"]["accept_length"]
        assert bool((decision.emitted == accepted + 1).all())
        assert decision.tokens[0, :accepted].tolist() == case["result"]["accepted_tokens_incl_root"][1:]
        last = draw(torch.tensor(case["result"]["sample_p"]).expand(200, -1), uniforms[:, -1])
        assert float((decision.tokens[:, accepted] == last).float().mean()) > 0.98  # the rest: rounding at a boundary


def test_neighbours_are_those_of_the_public_code():
    golden = load_file(PARITY / "codebook_neighbours_a.safetensors")
    table = nearest(golden["codebook"], 63)
    assert table.dtype == torch.int32 and torch.equal(table.long(), golden["nearest"])
    distance = torch.cdist(golden["codebook"], golden["codebook"]).gather(1, table.long())
    torch.testing.assert_close(distance, golden["dist64_sorted"], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------ the rule


def slow_mass(rule, table, p, q):
    """A of one position by the definition: p(x) and its nearest codes, one by one, while what is added fits."""
    mass = []
    for x in range(len(p)):
        limit = rule.bound if isinstance(rule, Lantern) else (rule.bound - 1) * float(p[x])
        added = 0.0
        for y in table[x, : rule.k].tolist():
            if added + float(p[y]) > limit:
                break
            added += float(p[y])
        mass.append(min(float(q[x]), float(p[x]) + added))
    return torch.tensor(mass, dtype=torch.float64)


@pytest.mark.parametrize("rule", [Lantern(4, 0.2), Lantern(1, 1.0), Lantern(11, 0.0), LanternPP(5, 1.7), LanternPP(11)])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 22])
def test_all_tokens_single_tokens_and_the_loop_agree(rule, chunk, monkeypatch, rng, distributions):
    monkeypatch.setattr(lantern_module, "CHUNK", chunk)
    codebook = torch.randn(12, 3, generator=rng)
    bound = rule.bind(target_of(codebook))
    target, draft = distributions(rng, 6, 4, 12, sharpness=2.0).double(), distributions(rng, 6, 4, 12).double()
    target = target * (target > 0.02)  # as after top-k
    target = target / target.sum(-1, keepdim=True)
    dense = bound.accepted_mass(target, draft, ONES)
    slow = [slow_mass(rule, nearest(codebook, 11), p, q) for p, q in zip(target.view(-1, 12), draft.view(-1, 12))]  # noqa: B905
    torch.testing.assert_close(dense.view(-1, 12), torch.stack(slow), rtol=0, atol=1e-12)
    tokens = torch.randint(12, (6, 4, 2), generator=rng)
    torch.testing.assert_close(bound.accepted_at(target, draft, ONES, tokens), dense.gather(-1, tokens))
    assert bool((dense >= torch.minimum(target, draft)).all()) and bool((dense <= draft).all())
    if rule.bound not in (0.0,):
        assert bool((dense > torch.minimum(target, draft)).any())


def test_lantern_without_a_limit_to_spend_is_vanilla(rng, distributions):
    target, draft = distributions(rng, 50, 9), distributions(rng, 50, 9)
    for rule in (Lantern(8, 0.0), LanternPP(8, 1.0 + 1e-9)):
        mass = rule.bind(target_of(torch.randn(9, 4, generator=rng))).accepted_mass(target, draft, ONES)
        assert torch.equal(mass, torch.minimum(target, draft))


def test_lantern_of_all_neighbours_without_a_limit_accepts_everything(rng, distributions):
    """A sum of every other probability may round to above 1: it is added all the same."""
    for codes in (5, 8, 64):
        target, rule = distributions(rng, 4000, codes), Lantern(codes - 1, 1.0)
        target[:, 0] = 0.0  # a draft of p = 0, to which all is added
        target /= target.sum(-1, keepdim=True)
        mass = rule.bind(target_of(torch.randn(codes, 3, generator=rng))).accepted_mass(target, torch.ones(()), ONES)
        torch.testing.assert_close(mass, torch.ones_like(mass))


def test_generate_decodes_with_lantern_and_keeps_the_table_beside_the_target(saved_toy, toy, monkeypatch):
    _, head = toy()
    target = load_target(saved_toy / "target", device="cpu", dtype="float32")
    before = fingerprint(saved_toy / "target")
    assert torch.equal(target.codebook(), target.image_tokenizer.quantize.embedding.weight)
    results = {}
    for rule in (Vanilla(), Lantern(3, 0.0), Lantern(3, 0.6), LanternPP(4, 4.0), LanternPP(4, 4.0, "own")):
        result = generate(target, ["a", "b c"] * 8, Chain(head, 3), rule, seed=3, decode_images=False)
        results[rule] = result
        assert bool((result.tokens < 5).all()) and bool(result.bias_per_token.isfinite().all())
        assert (result.kl_per_token is None or bool(result.kl_per_token.isfinite().all())) or rule.resampling == "own"
    assert torch.equal(results[Vanilla()].tokens, results[Lantern(3, 0.0)].tokens)
    assert results[Lantern(3, 0.6)].accepted_length.mean() > results[Vanilla()].accepted_length.mean()
    assert float(results[Lantern(3, 0.0)].bias_per_token.max()) == 0 < results[LanternPP(4, 4.0)].bias_per_token.mean()
    (table,) = (saved_toy / "target").glob("neighbours-*")
    assert torch.equal(load_file(table)["nearest"].long(), nearest(target.codebook(), 4).long())
    assert fingerprint(saved_toy / "target", verify=True) == before  # the file is no part of the checkpoint
    load_target(saved_toy / "target", device="cpu", dtype="float32", verify=True)


# ----------------------------------------------------------------------------------------- the table


@pytest.fixture
def forget(monkeypatch):
    """Call it to forget the tables in memory."""
    monkeypatch.setattr(neighbours_module, "_KEPT", {})
    return lambda: neighbours_module._KEPT.clear()


def test_neighbours_are_sorted_by_distance_and_ties_by_number(rng, monkeypatch):
    codebook = torch.randn(40, 3, generator=rng)
    codebook[[7, 20, 33]] = codebook[2].clone()  # dead codes are often equal
    whole = nearest(codebook, 39).long()
    assert whole[2, :3].tolist() == [7, 20, 33] and whole[20, :3].tolist() == [2, 7, 33]
    assert all(sorted([x, *row]) == list(range(40)) for x, row in enumerate(whole.tolist()))
    distance = (codebook[:, None].double() - codebook[whole].double()).norm(dim=-1)
    assert bool((distance.diff(dim=-1) >= 0).all())
    monkeypatch.setattr(neighbours_module, "CHUNK", 90)  # two rows at a time
    assert torch.equal(nearest(codebook, 5), whole[:, :5].int())


def test_a_table_is_made_once_kept_on_disk_and_named_by_its_codebook(tmp_path, rng, monkeypatch, forget):
    codebook, made = torch.randn(30, 4, generator=rng), []
    monkeypatch.setattr(neighbours_module, "nearest", lambda *given: made.append(given[1]) or nearest(*given))
    want = nearest(codebook, 9)
    assert torch.equal(neighbours(codebook, 6, tmp_path), want[:, :6]) and made == [6]
    neighbours(codebook, 6, tmp_path)
    forget()
    for count in (6, 4):
        table = neighbours(codebook, count, tmp_path)  # from the file
        assert table.dtype == torch.int32 and torch.equal(table, want[:, :count]) and made == [6]
    assert torch.equal(neighbours(codebook, 9, tmp_path), want) and made == [6, 9]  # more than the file has
    (path,) = tmp_path.iterdir()
    assert load_file(path)["nearest"].dtype == torch.int16 and load_file(path)["nearest"].shape == (30, 9)
    neighbours(codebook + 1e-6, 6, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and len(made) == 3  # another codebook, another file
    forget()
    for wrong in ({"nearest": torch.zeros(29, 9, dtype=torch.int16)}, {"nearest": torch.full((30, 9), 30).short()},
                  {"other": torch.zeros(1)}, {"nearest": torch.zeros(30, 9)}):  # fmt: skip
        save_file(wrong, path)
        with pytest.raises(ValueError, match=f"{path.name} is not a table of neighbours .*delete it"):
            neighbours(codebook, 6, tmp_path)
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is not a table of neighbours"):
        neighbours(codebook, 6, tmp_path)


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path, rng, forget):
    codebook = torch.randn(10, 4, generator=rng)
    with pytest.warns(UserWarning, match="cannot be written"):
        table = neighbours(codebook, 3, tmp_path / "gone")
    assert torch.equal(table, nearest(codebook, 3))
    forget()
    assert torch.equal(neighbours(codebook, 3, None), table)  # a target that was never saved


# ------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lantern(k=0), "Lantern k is 0, but must be an integer >= 1"),
        (lambda: LanternPP(k=2.5), "LanternPP k is 2.5, but must be an integer >= 1"),
        (lambda: Lantern(k=math.nan), "Lantern k is nan"),
        (lambda: Lantern(bound=-0.1), "Lantern bound is -0.1, but must be from 0 to 1 (LanternPP takes one above 1)"),
        (lambda: Lantern(bound=1.5), "Lantern bound is 1.5, but must be from 0 to 1 (LanternPP takes one above 1)"),
        (lambda: Lantern(bound=math.nan), "Lantern bound is nan"),
        (lambda: LanternPP(bound=1.0), "LanternPP bound is 1.0, but must be a number above 1 (Lantern takes"),
        (lambda: LanternPP(bound=math.inf), "LanternPP bound is inf"),
        (lambda: LanternPP(resampling="mine"), "LanternPP resampling is 'mine', but must be 'optimal' or 'own'"),
        (lambda: Lantern(5).bind(target_of(torch.zeros(5, 2))), "Lantern k is 5, but must be at most 4: each of the"),
    ],
)
def test_bad_parameters_are_refused_with_value_and_limit(make, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert message in str(error.value)


def test_a_target_without_a_codebook_is_refused(toy):
    with pytest.raises(ValueError, match="has no image tokenizer, so no codebook; put one into its folder"):
        Lantern(2).bind(toy()[0])
