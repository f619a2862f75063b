"""Tree attention against a dense softmax in float64, and bit for bit against plain decoding."""

import numpy as np
import pytest

from ddtree_numba.spec import tree_attention as spec
from ddtree_numba.spec.numerics import BF16, F32
from ddtree_numba.spec.tree_attention import CASES, inputs, random_paths, tree_attention
from tests.cases import small

SMALL = dict(N=17, h=2, W=24, latent=16)


def key_rows(given, r, i):
    """The keys that node i of request r sees, in position order: committed, then its path."""
    start, path = int(given["starts"][r]), given["paths"][r, i]
    pages = given["page_table"][r, np.arange(start) // 64]
    committed = given["pages"][pages, np.arange(start) % 64]
    return np.concatenate([committed, given["scratch"][r, path[path >= 0]]])


def dense(given):
    q, latent = given["q"].astype(np.float64), given["latent"]
    out = np.zeros((*q.shape[:-1], latent))
    for r, size in enumerate(given["sizes"]):
        for i in range(size):
            keys = key_rows(given, r, i).astype(np.float64)
            scores = given["scale"] * (q[r, i] @ keys.T)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[r, i] = weights / weights.sum(-1, keepdims=True) @ keys[:, :latent]
    return out


def as_float32(given):
    return given | {name: given[name].astype(F32) for name in ("q", "pages", "scratch")}


def as_decoding(given, r, i):
    """What plain decoding sees at node i: its ancestors committed in fresh pages, one node."""
    keys = key_rows(given, r, i)
    start = len(keys) - 1
    count = start // 64 + 1
    pages = np.full((count, 64, keys.shape[1]), np.nan, keys.dtype)
    pages.reshape(count * 64, -1)[:start] = keys[:-1]
    return given | dict(
        q=given["q"][r : r + 1, i : i + 1],
        pages=pages[::-1],
        page_table=np.arange(count)[None, ::-1],
        scratch=keys[None, -1:],
        starts=np.array([start]),
        paths=np.zeros((1, 1, 1), np.int32),
        sizes=np.array([1]),
    )


@pytest.mark.parametrize("name", small(CASES))
def test_agrees_with_a_dense_softmax(name, rng):
    given = as_float32(inputs(CASES[name], rng))
    np.testing.assert_allclose(tree_attention(**given), dense(given), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["tiny", "split_edges", "chain"])
def test_bfloat16_rounds_weights_and_result_only(name, rng):
    given = inputs(CASES[name], rng)
    out = tree_attention(**given)
    assert out.dtype == BF16
    error = np.abs(out.astype(np.float64) - dense(given))
    bound = np.abs(given["scratch"][:, 0].astype(F32)).max() * 2**-8  # of a mean of values
    assert error.max() < bound and error.max() > 1e-4


def test_values_meet_rounded_weights_and_the_sum_does_not():
    """63 weights of 0.5019 round to 0.5: 31.5 / (1 + 63 * 0.5019), not 31.5 / (1 + 63 * 0.5)."""
    weight = 0.5019
    keys = np.full((64, 2), [1, np.log(weight)], np.float64)  # value, score
    keys[0] = 0
    given = dict(
        q=np.array([0, 1], BF16).reshape(1, 1, 1, 2),
        pages=keys[None].astype(F32),
        scratch=np.array([0, -1e4], F32).reshape(1, 1, 2),
        page_table=np.array([[0]]),
        starts=np.array([64]),
        paths=np.zeros((1, 1, 1), np.int32),
        sizes=np.array([1]),
        scale=1.0,
        latent=1,
    )
    unrounded, rounded = (np.array(31.5 / (1 + 63 * w)).astype(BF16) for w in (weight, 0.5))
    assert tree_attention(**given).item() == unrounded.item() != rounded.item()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", [name for name in small(CASES) if name != "chain"])
def test_s09_a_node_has_the_bits_of_plain_decoding(name, dtype, rng):
    """The law: a key gives the same bits from a page as from scratch, whoever else is there."""
    given = inputs(CASES[name], rng)
    if dtype == F32:
        given = as_float32(given)
    out = tree_attention(**given)
    for r, size in enumerate(given["sizes"]):
        for i in sorted({0, 1, size // 2, size - 1} & set(range(size))):
            alone = tree_attention(**as_decoding(given, r, i))
            assert alone[0, 0].tobytes() == out[r, i].tobytes(), (r, i)


@pytest.mark.parametrize("start", [0, 1000])
def test_s09_a_long_chain_has_the_bits_of_plain_decoding(start, rng):
    """Prefill: 256 nodes in a row, through chunk and split borders, at the embedded sizes."""
    case = dict(starts=[start], sizes=[256], N=256, h=8, W=80, latent=64, chain=True)
    given = inputs(case, rng)
    out = tree_attention(**given)
    for i in (0, 1, 23, 24, 63, 64, 127, 128, 200, 255):
        alone = tree_attention(**as_decoding(given, 0, i))
        assert alone[0, 0].tobytes() == out[0, i].tobytes(), i


def test_s09_splits_end_at_absolute_positions(rng):
    """Around 16384 the splits grow to 2048; trees on both sides keep the bits of plain decoding."""
    case = dict(starts=[16380, 18430], sizes=[9, 9], N=9, h=1, W=12, latent=8)
    given = as_float32(inputs(case, rng))
    out = tree_attention(**given)
    np.testing.assert_allclose(out, dense(given), rtol=1e-4, atol=2e-6)
    for r, i in ((0, 0), (0, 8), (1, 8)):
        assert tree_attention(**as_decoding(given, r, i))[0, 0].tobytes() == out[r, i].tobytes()


def test_s09_bits_do_not_show_which_nodes_went_together(rng, monkeypatch):
    given = inputs(CASES["past_64_nodes"], rng)
    out = tree_attention(**given)
    for block in (1, 7, 1000):
        monkeypatch.setattr(spec, "BLOCK", block)
        assert tree_attention(**given).tobytes() == out.tobytes()


def test_s09_bits_would_show_a_split_in_another_place(rng, monkeypatch):
    """The control: where a running maximum starts afresh is visible in the bits."""
    given = as_float32(inputs(dict(SMALL, starts=[1000], sizes=[17]), rng))
    out = tree_attention(**given)
    monkeypatch.setattr(spec, "starts_split", lambda position: position % 448 == 0)
    other = tree_attention(**given)
    np.testing.assert_allclose(other, out, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(other, out)


@pytest.mark.parametrize("nodes", [1, 2, 17, 33, 65])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 127, 128])
def test_s29_page_borders(start, nodes, rng):
    """Unowned pages, and the free rows of the last one, are NaN: one row too many would show."""
    given = inputs(dict(starts=[start], sizes=[nodes], N=nodes, h=1, W=12, latent=8), rng)
    assert (given["page_table"][0] >= 0).sum() == -(-start // 64)
    assert np.isnan(given["pages"].astype(F32)).any()
    given = as_float32(given)
    np.testing.assert_allclose(tree_attention(**given), dense(given), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 63, 64, 65, 129, 257])
def test_s25_a_node_sees_its_path_alone(nodes, shape, rng):
    """Key row j is the unit vector j with a constant score, so the result is the mask itself."""
    width = nodes + 1
    if shape == "star":
        paths = np.full((1, nodes, 2), -1, np.int32)
        paths[0, :, 0], paths[0, 1:, 1] = 0, np.arange(1, nodes)
    else:
        paths = random_paths([nodes], nodes, rng, chain=shape == "chain")
    keys = np.eye(nodes, width, dtype=F32)
    keys[:, -1] = 1
    out = tree_attention(
        q=np.eye(1, width, nodes, dtype=F32)[None, None].repeat(nodes, 1),
        pages=np.full((1, 64, width), np.nan, F32),
        scratch=keys[None],
        page_table=np.array([[-1]]),
        starts=np.array([0]),
        paths=paths,
        sizes=np.array([nodes]),
        scale=1.0,
        latent=nodes,
    )[0, :, 0]
    seen = np.array([np.isin(np.arange(nodes), path) for path in paths[0]])
    assert np.array_equal(out != 0, seen)
    np.testing.assert_allclose(out.sum(1), 1, rtol=1e-5)


def test_s25_two_sizes_share_one_buffer(rng):
    given = inputs(dict(SMALL, starts=[30, 40], sizes=[5, 65], N=65), rng)
    out = tree_attention(**given)
    for r, size in enumerate((5, 65)):
        one = {n: given[n][r : r + 1, :size] for n in ("q", "scratch", "paths")}
        one |= {n: given[n][r : r + 1] for n in ("page_table", "starts", "sizes")}
        assert tree_attention(**given | one)[0].tobytes() == out[r, :size].tobytes()


def test_m01_padding_reads_nothing_and_gives_zeros(rng):
    """Requests of 8, 3, 1 and 0 nodes; queries, keys and pages of padding are NaN, its page -1."""
    given = inputs(CASES["padding"], rng)
    assert (given["page_table"][2:] == -1).all()
    out = tree_attention(**given).astype(F32)
    for r, size in enumerate(given["sizes"]):
        assert np.isfinite(out[r]).all() and not out[r, size:].any()
        assert out[r, :size].any(axis=(1, 2)).all()
    again = {**given, "pages": np.nan_to_num(given["pages"].astype(F32), nan=7).astype(BF16)}
    assert tree_attention(**again).tobytes() == out.astype(BF16).tobytes()


@pytest.mark.parametrize("name", ["tiny", "past_64_nodes"])
def test_s12_a_nan_key_reaches_its_descendants_only(name, rng):
    given = inputs(CASES[name], rng)
    clean = tree_attention(**given)
    given["scratch"][0, 3] = np.nan
    out = tree_attention(**given)
    below = (given["paths"][0] == 3).any(1)
    assert below.sum() > 0 and np.isnan(out[0, below].astype(F32)).all()
    assert out[0, ~below].tobytes() == clean[0, ~below].tobytes()
    assert out[1:].tobytes() == clean[1:].tobytes()


@pytest.mark.parametrize("heads", [(0, 1), (3, 5), (7, 8)])
def test_a_rank_may_hold_any_heads(heads, rng):
    given = as_float32(inputs(CASES["tiny"], rng))
    part = tree_attention(**given | {"q": given["q"][:, :, slice(*heads)]})
    whole = tree_attention(**given)[:, :, slice(*heads)]
    np.testing.assert_allclose(part, whole, rtol=2e-5, atol=2e-6)


def test_page_order_does_not_matter(rng):
    given = inputs(CASES["page_edges"], rng)
    out = tree_attention(**given)
    order = rng.permutation(len(given["pages"]))
    moved = {"pages": given["pages"][order], "page_table": np.argsort(order)[given["page_table"]]}
    assert tree_attention(**given | moved).tobytes() == out.tobytes()


def test_far_apart_scores_survive(rng):
    """A later chunk outgrows the first by far more than float32's exponent, and the reverse."""
    given = as_float32(inputs(dict(SMALL, starts=[600], sizes=[17]), rng))
    given["scale"] = 100.0
    out = tree_attention(**given)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, dense(given), rtol=2e-2, atol=2e-2)


def test_m07_a_page_beyond_32_bits(tmp_path, rng):
    """Slot 3,728,271 of 576 values is the first past 2^31 elements: a sparse file holds them."""
    page = 3_728_271 // 64 + 1
    pages = np.memmap(tmp_path / "pages", BF16, "w+", shape=(page + 1, 64, 576))
    pages[page, :3] = rng.standard_normal((3, 576))
    assert page * 64 * 576 > 2**31
    given = dict(
        q=rng.standard_normal((1, 1, 2, 576)).astype(F32),
        scratch=rng.standard_normal((1, 1, 576)).astype(BF16),
        starts=np.array([3], np.int32),
        paths=np.zeros((1, 1, 1), np.int32),
        sizes=np.array([1], np.int32),
        scale=0.1,
        latent=512,
    )
    far = dict(given, pages=pages, page_table=np.array([[page]], np.int32))
    near = dict(given, pages=np.array(pages[page:]), page_table=np.zeros((1, 1), np.int32))
    assert np.array_equal(tree_attention(**far), tree_attention(**near))


def test_shapes_that_do_not_fit_are_named(rng):
    given = inputs(CASES["tiny"], rng)
    with pytest.raises(ValueError, match=r"pages \(\d+, 32, 80\)"):
        tree_attention(**given | {"pages": given["pages"][:, :32]})
    with pytest.raises(ValueError, match=r"scratch \(1, 16, 80\)"):
        tree_attention(**given | {"scratch": given["scratch"][:, :16]})
    with pytest.raises(ValueError, match="latent 81"):
        tree_attention(**given | {"latent": 81})
