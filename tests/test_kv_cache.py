"""The cache: rows of their own length, masks that equal an obvious loop, and contents that equal a rebuilt cache."""

import math

import pytest
import torch

from coolsd.interfaces import DraftTree
from coolsd.kv_cache import KVCache
from coolsd.tree import ancestors, chain

FORK = (-1, 0, 0, 1, 1, 2, 3)  # 0 -> 1 -> 3 -> 6, 0 -> 1 -> 4, 0 -> 2 -> 5
CAPTIONS = ["a", "b c a", "a b c a"]


def new_cache(rows=3, slots=40, valid=None):
    return KVCache(2, rows, slots, 2, 4, valid, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("parent", [None, FORK, chain(4)])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_equal_the_obvious_loop(parent, padded):
    valid = torch.tensor([[False, False, True, True], [True] * 4, [False, True, True, True]]) if padded else None
    cache = new_cache(valid=valid)
    for counts in ((4, 4, 4), (1, 3, 2), (0, 5, 1), (2, 0, 0)):  # the prompt, then rows that accept differently
        cache.keep(None, torch.tensor(counts), cache.longest + max(counts))
        nodes = len(parent) if parent else 5
        seen = ancestors(parent, torch.device("cpu")) if parent else None
        flat, mask = cache.place(nodes, seen)
        assert mask.shape[:3] == (3, 1, nodes) and cache.longest + nodes <= mask.shape[-1] <= cache.slots
        for row, length in enumerate(cache.length.tolist()):
            assert flat.view(3, -1)[row].tolist() == [row * 40 + length + n for n in range(nodes)]
            for node in range(nodes):
                above = {node}
                while parent and (up := parent[min(above)]) >= 0:
                    above.add(up)
                for slot in range(mask.shape[-1]):
                    new = slot - length
                    if new < 0:
                        visible = valid is None or slot >= 4 or bool(valid[row, slot])
                    else:
                        visible = new in above if parent else new <= node
                    assert mask[row, 0, node, slot] == (0 if visible else -math.inf)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_may_have_trees_of_their_own_and_grow_them_level_by_level(padded):
    valid = torch.tensor([[False, False, True, True], [True] * 4, [False, True, True, True]]) if padded else None
    cache = new_cache(valid=valid)
    cache.keep(None, torch.tensor([4, 7, 5]), 7)
    shapes = (FORK, chain(6), (-1, 0, 1, 1, 0, 4, 5))
    seen = torch.stack([ancestors(shape, torch.device("cpu")) for shape in shapes])
    flat, mask = cache.place(7, seen)
    for row, shape in enumerate(shapes):
        alone_flat, alone = cache.place(7, ancestors(shape, torch.device("cpu")))
        assert torch.equal(mask[row], alone[row]) and torch.equal(flat, alone_flat)
    for first, last in ((0, 1), (1, 4), (4, 7)):  # nodes of earlier calls are there and seen
        part_flat, part = cache.place(last - first, seen[:, first:last, :last])
        assert torch.equal(part_flat.view(3, -1), flat.view(3, -1)[:, first:last])
        assert torch.equal(part, mask[:, :, first:last])


def test_padding_sees_itself_and_nobody_sees_padding():
    valid = torch.tensor([[False, False, True, True]])
    _, mask = new_cache(rows=1, valid=valid).place(4)
    seen = mask[0, 0, :, :4] == 0
    assert seen.tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_a_fully_valid_prompt_costs_no_mask():
    assert new_cache(valid=torch.ones(3, 4, dtype=torch.bool)).valid is None


def test_no_room_is_an_error_that_names_the_numbers():
    cache = new_cache(slots=10)
    cache.keep(None, torch.tensor([6, 2, 0]), 6)
    cache.place(4)
    with pytest.raises(ValueError, match="5 nodes behind 6 tokens do not fit into 10 cache slots"):
        cache.place(5)


def test_keep_moves_a_path_and_leaves_the_rest(rng):
    cache = new_cache()
    for store in cache.stores:
        store.copy_(torch.randn(store.shape, generator=rng))
    cache.keep(None, torch.tensor([5, 7, 3]), 7)
    before = torch.stack(cache.stores).view(2, 3, 40, 4, 4)
    path = torch.tensor([[0, 1, 3, 6], [0, 2, 5, 5], [0, 0, 0, 0]])
    cache.keep(path, torch.tensor([4, 2, 0]), 11)
    after = torch.stack(cache.stores).view(2, 3, 40, 4, 4)
    assert cache.length.tolist() == [9, 9, 3] and cache.longest == 11
    assert torch.equal(after[:, 0, 5:9], before[:, 0, [5, 6, 8, 11]])
    assert torch.equal(after[:, 1, 7:9], before[:, 1, [7, 9]])
    for row, length in enumerate((5, 7, 3)):
        assert torch.equal(after[:, row, :length], before[:, row, :length])


def store_of(cache, row):
    length = int(cache.length[row])
    return torch.stack(cache.stores).view(len(cache.stores), cache.rows, cache.slots, -1)[:, row, :length]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("guidance", [False, True])
def test_after_rounds_the_cache_equals_one_rebuilt_from_scratch(toy, rng, shape, guidance):
    target, _ = toy(sharpness=1.0)  # values of order 1: float32 rounding stays ten times below the 1e-5 asked for
    parent = chain(3) if shape == "chain" else FORK
    prompt = target.encode(CAPTIONS, guidance)
    branches = prompt.branches
    _, cache = target.prefill(prompt, len(parent))
    # nodes accepted by each row in each round; [] = a finished row, [0] = every draft rejected
    if shape == "chain":
        rounds = [[[0], [0, 1, 2, 3], [0, 1]], [[0, 1, 2], [0], []], [[0, 1, 2, 3], [], [0]]]
    else:
        rounds = [[[0], [0, 1, 3, 6], [0, 2, 5]], [[0, 1, 4], [0], []], [[0, 2], [], [0, 1, 3, 6]]]
    committed = [[] for _ in CAPTIONS]
    for accepted in rounds:
        tokens = torch.randint(5, (3, len(parent)), generator=rng)
        target.score(DraftTree(tokens, parent, torch.empty(3, 0, 5)), prompt, cache)
        for row, nodes in enumerate(accepted):
            committed[row] += tokens[row, nodes].tolist()
        path = None
        if shape == "tree":
            path = torch.tensor([nodes + [0] * (4 - len(nodes)) for nodes in accepted]).repeat_interleave(branches, 0)
        count = torch.tensor([len(nodes) for nodes in accepted]).repeat_interleave(branches)
        cache.keep(path, count, 4 + max(map(len, committed)))
    for row, tokens in enumerate(committed):
        alone = target.encode(CAPTIONS[row : row + 1], guidance)
        _, fresh = target.prefill(alone, len(tokens))
        target.score(DraftTree(torch.tensor([tokens]), chain(len(tokens) - 1), torch.empty(1, 0, 5)), alone, fresh)
        fresh.keep(None, torch.tensor([len(tokens)] * branches), 4 + len(tokens))
        for branch in range(branches):
            kept, rebuilt = store_of(cache, row * branches + branch), store_of(fresh, branch)
            assert 0.5 < float(rebuilt.abs().max()) < 10
            torch.testing.assert_close(kept, rebuilt, rtol=0, atol=1e-5)
