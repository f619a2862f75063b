"""The best-first tree on the device; see `spec/tree_build.py`. A warp searches, a block a request.

Every chosen node offers its best child that is not chosen yet; offer i lives in lane i % 32. A step
takes the best of all offers, gives it the next index, and replaces it by its next sibling and, in
another lane, its first child. What these need from the table is on its way a step ahead.

Scores are not positive, so their bits without the sign ascend as they get worse: finite, -inf, NaN.
NaN stands behind every list and below the last one; a search that finds nothing else has ended.

Equal scores are ordered by rank path. As a path's ancestors and their better siblings are in the
tree before it, the product of its (rank + 1) is at most the budget, so a path fits 32 bits: a rank
is written as n ones, a zero and the last n bits of rank + 1, where n = floor(log2(rank + 1)). One
more set bit marks the end; it never decides, since a path and its own ancestor are never compared.
"""

from functools import cache

from numba import cuda, float32, int32, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import read, require, write
from ddtree_numba.kernels.launch import Kernel, kernel
from ddtree_numba.spec.tree_build import Tree

MAX_BUDGET, MAX_DEPTHS, MAX_CANDIDATES = 256, 15, 64
WARP = 32
THREADS = 288  # one a node of the largest tree
ROW = 128  # places of a list in the table: a power of two above 64 candidates and the NaN
RANK, PLACE = ROW - 1, (MAX_DEPTHS + 1) * ROW - 1  # bits of a rank; of a place in the table

# A warp loads lists 9 apart, a lane candidates 32 apart. Two lists of NaN are below the last.
WARPS, COLUMNS = THREADS // WARP, -(-(MAX_CANDIDATES + 2) // WARP)
ROWS = -(-(MAX_DEPTHS + 2) // WARPS)
LOADS, TABLE = ROWS * COLUMNS, ROWS * WARPS * ROW

# An offer is one word, so that a sum over lanes brings the best one to all and shows a tie.
PARENT = PLACE.bit_length()  # the first bit of the node that offers, above those of the place
ONE = 1 << PARENT << 8  # counts offers
NOTHING = 0x7FFFFFFF  # a NaN
INFINITY = 0x7F800000
FIRST = 1 << 30  # the path of rank 0
LAST = 0xFFFFFFFF  # behind all paths


@cuda.jit(device=True, inline="always")
def badness(score):
    """Ascends as a score, which is not positive, descends."""
    return uint32(ptx.as_bits(score) & 0x7FFFFFFF)


@cuda.jit(device=True, inline="always")
def score_of(bad):
    """The score; 0 and not -0."""
    return float32(0) - ptx.as_float(bad)


@cuda.jit(device=True, inline="always")
def parent_of(offer):
    return int32(offer >> PARENT & 255)


@cuda.jit(device=True, inline="always")
def first_child(place):
    """Its place: the first of the next list."""
    return int32((place | RANK) + 1)


@cuda.jit(device=True, inline="always")
def sibling_path(path, rank):
    """From the code of a path to that of its next sibling, whose rank is given."""
    end = path & -path
    longer = rank & (rank + 1) == 0  # n grows: the carry has made the ones, two bits follow
    return uint32(path + end + (end >> 2 if longer else end))


@cuda.jit(device=True, inline="always")
def child_path(path):
    """From the code of a path to that of its first child: a zero more."""
    end = path & -path
    return uint32(path - (end >> 1))


@cuda.jit(device=True, inline="always")
def load(table, ids, log_probs, token_ids, first, lists, candidates, limit):
    """A request's lists into shared memory, all at once; NaN behind them and from `limit` on."""
    values = cuda.local.array(LOADS, float32)
    tokens = cuda.local.array(LOADS, int32)
    row, rank = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
    for n in range(LOADS):
        rows, ranks = n // COLUMNS * WARPS, n % COLUMNS * WARP
        values[n], tokens[n] = ptx.as_float(NOTHING), -1
        if row < lists - rows and rank < candidates - ranks:
            i = first + (row + rows) * candidates + rank + ranks
            values[n], tokens[n] = log_probs[i], token_ids[i]
    place = int32(row * ROW + rank)
    for n in range(LOADS):
        rows, ranks = n // COLUMNS * WARPS, n % COLUMNS * WARP
        if row >= limit - rows:
            values[n] = ptx.as_float(NOTHING)
        table[place + rows * ROW + ranks] = values[n]
        ids[place + rows * ROW + ranks] = tokens[n]


def make_search(slots: int):
    """The search by one warp, whose lanes hold `slots` nodes each.

    It leaves in shared memory the offer that each node was, its score, and how many there are.
    """

    @cuda.jit(device=True, inline="always")
    def search(table, budget, chosen, found, size):
        lane = int32(cuda.threadIdx.x)
        offer = cuda.local.array(slots, int32)  # of node s * WARP + lane
        bad = cuda.local.array(slots, uint32)  # badness of what it offers
        path = cuda.local.array(slots, uint32)  # its code
        sibling = cuda.local.array(slots, float32)  # log-probability of the next sibling
        child = cuda.local.array(slots, float32)  # and of the first child
        score = cuda.local.array(slots, float32)  # of the node itself
        was = cuda.local.array(slots, int32)  # the offer that it was
        # through a shuffle, lest the compiler find the address anew in each step
        at = ptx.shfl_idx(ptx.shared_address(table), 0)
        for s in range(slots):
            offer[s], bad[s], path[s] = 0, NOTHING, FIRST
            score[s], was[s] = float32(0), 0
            sibling[s], child[s] = table[1], table[ROW]
        if lane == 0:
            offer[0], bad[0] = ONE, badness(table[0])
        best, value, n = int32(0), float32(0), int32(1)
        least = ptx.redux_min(bad[0])
        while n <= budget and least <= INFINITY:
            value = score_of(least)
            mine, below, earliest = int32(0), uint32(NOTHING), uint32(LAST)
            for s in range(slots):
                if bad[s] == least:
                    mine, below = int32(mine + offer[s]), badness(value + child[s])
                    earliest = min(earliest, path[s])
            best, deeper = int32(ptx.redux_add(mine)), ptx.redux_min(below)
            earliest = ptx.redux_min(earliest)
            if best >= 2 * ONE:  # a tie
                mine, below = int32(0), uint32(NOTHING)
                for s in range(slots):
                    if bad[s] == least and path[s] == earliest:
                        mine, below = offer[s], badness(value + child[s])
                best, deeper = int32(ptx.redux_add(mine)), ptx.redux_min(below)
            parent = parent_of(best)
            for s in range(slots):
                # of many slots, pass over those that stay
                if slots <= 2 or s == parent >> 5 or s == n >> 5:
                    node = int32(s * WARP + lane)
                    won = node == parent  # select: a branch would part the lanes
                    following = sibling_path(path[s], (offer[s] & RANK) + 1)
                    offer[s] += int32(won)
                    bad[s] = cuda.selp(won, badness(score[s] + sibling[s]), bad[s])
                    path[s] = cuda.selp(won, following, path[s])
                    if node == n:
                        offer[s] = ONE + (node << PARENT) + first_child(best & PLACE)
                        bad[s], path[s] = deeper, child_path(earliest)
                        score[s], was[s] = value, best
                    place = offer[s] & PLACE
                    sibling[s] = ptx.lds1_f(at + 4 * (place + 1))
                    child[s] = ptx.lds1_f(at + 4 * first_child(place))
            least = bad[0]
            for s in range(1, slots):
                least = min(least, bad[s])
            least = ptx.redux_min(least)
            n = int32(n + 1)
        for s in range(slots):
            chosen[s * WARP + lane] = was[s]
            found[s * WARP + lane] = score[s]
        if lane == 0:
            size[0] = n
            if n > slots * WARP:  # the last node has no lane
                chosen[n - 1], found[n - 1] = best, value

    return search


@cache
def make(slots: int, capped: bool) -> Kernel:
    nodes = slots * WARP + 1
    search = make_search(slots)

    @kernel(
        threads=THREADS,
        name=f"tree_build_{slots}{'_capped' * capped}",
        registers=32 + 8 * slots,
        opcodes=("REDUX",),
        pdl=True,
    )
    @cuda.jit
    def tree_build_kernel(
        root_tokens: read(int32),
        token_ids: read(int32),
        log_probs: read(float32),
        max_depths: read(int32),
        tokens: write(int32),
        parents: write(int32),
        depths: write(int32),
        scores: write(float32),
        sizes: write(int32),
        lists: int32,
        candidates: int32,
        budget: int32,
    ):
        table = cuda.shared.array(TABLE, float32)
        ids = cuda.shared.array(TABLE, int32)
        chosen = cuda.shared.array(nodes, int32)
        found = cuda.shared.array(nodes, float32)
        size = cuda.shared.array(1, int32)
        request, thread = cuda.blockIdx.x, int32(cuda.threadIdx.x)
        ptx.wait_for_previous()
        ptx.launch_next()
        limit = lists
        if capped:
            limit = min(lists, max_depths[request])
        root = root_tokens[request]  # early: at the end its latency would show
        first = request * lists * candidates
        load(table, ids, log_probs, token_ids, first, lists, candidates, limit)
        cuda.syncthreads()
        if thread < WARP:
            search(table, budget, chosen, found, size)
        cuda.syncthreads()
        if thread <= budget:
            i = request * (budget + 1) + thread
            token, parent, depth, score = int32(-1), int32(-1), int32(0), ptx.as_float(0xFF800000)
            if thread == 0:
                token, score = root, float32(0)
                sizes[request] = size[0]
            elif thread < size[0]:
                place = chosen[thread] & PLACE
                token, parent = ids[place], parent_of(chosen[thread])
                depth, score = int32(place // ROW + 1), found[thread]
            tokens[i] = token
            parents[i] = parent
            depths[i] = depth
            scores[i] = score

    return tree_build_kernel


def tree_build(
    root_tokens, token_ids, log_probs, budget: int, max_depths=None, *, out: Tree, stream=None
) -> Tree:
    """The tree of each request into the arrays of `out`; returns out.

    The order of the log-probabilities is not checked here.
    """
    requests, lists, candidates = log_probs.shape
    for name, value, largest in (
        ("budget", budget, MAX_BUDGET),
        ("log_probs: depths", lists, MAX_DEPTHS),
        ("log_probs: candidates", candidates, MAX_CANDIDATES),
    ):
        if not 0 <= value <= largest:
            raise ValueError(f"{name}: {value}, expected 0 to {largest}")
    require("root_tokens", root_tokens, (requests,), "int32")
    require("token_ids", token_ids, log_probs.shape, "int32")
    require("log_probs", log_probs, log_probs.shape, "float32")
    if max_depths is not None:
        require("max_depths", max_depths, (requests,), "int32")
    for name in ("tokens", "parents", "depths", "scores"):
        dtype = "float32" if name == "scores" else "int32"
        require(f"out.{name}", getattr(out, name), (requests, budget + 1), dtype)
    require("out.sizes", out.sizes, (requests,), "int32")
    slots = next(slots for slots in (1, 2, 4, 8) if budget <= slots * WARP)
    make(slots, max_depths is not None).launch(
        requests,
        *(root_tokens, token_ids, log_probs, max_depths),
        *(out.tokens, out.parents, out.depths, out.scores, out.sizes),
        *(lists, candidates, budget),
        stream=stream,
    )
    return out


def instances() -> list[Kernel]:
    """Budgets to 32, 64, 128 and 256; with a cap on depths near a request's limit."""
    return [make(slots, capped) for slots in (1, 2, 4, 8) for capped in (False, True)]
