"""First pass of `draft_attention.py`: a split of the positions, for all query rows of a key head.

Each warp holds 16 query rows in registers. All rows together are a group of warps, and a block has
several groups, each with its part of every page's keys, its ring of them in shared memory and its
own barrier: while one waits or takes exponentials, another multiplies. Their sums meet at the end,
in order.

Splits are whole pages of committed positions, and behind them one of what is left: the page that
is not full, and the block's own rows. The committed pages do not wait for the kernel ahead on the
stream, which must not write them, nor `lengths` and `page_table`.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.arguments import bf16, read, write
from ddtree_numba.kernels.draft_attention_steps import LOWEST, PAGE, make_steps
from ddtree_numba.kernels.launch import Kernel, kernel

STAGES = 3  # pages of all rings: 96 KB for heads of 128 columns, of 99 that sm_120 has
WARPS = 8  # of a block
SPLITS = 132  # of a request, at most: one for each multiprocessor of an H200
SHORT = 32  # pages of a context whose splits are single pages; else at least two


@cuda.jit(device=True, inline="always")
def split_pages(length, window, splits):
    """First page in view, splits of whole pages, pages of each.

    Of the request alone: how its sums are split does not depend on other requests.
    """
    first = max(length - window + 1, 0) // PAGE
    whole = length // PAGE - first
    each = max((whole + splits - 2) // (splits - 1), 2 if whole > SHORT else 1)
    return first, (whole + each - 1) // each, each


@cache
def make(width: int, tiles: int) -> Kernel:
    """For heads of `width` columns, and 16 * tiles query rows to a key head."""
    groups = max(min(WARPS // tiles, 4), 1)
    lanes, keys = 32 * tiles, PAGE // groups  # of a group
    columns, row_bytes = width // 8, 2 * width
    step = lanes // columns  # positions that a group copies at once
    passes = keys // step
    stage = 2 * keys * row_bytes  # keys, then values
    ring = STAGES * stage
    query_size, sums_size, score_size, weight_size = width // 2, width // 2, keys // 2, keys // 4
    steps = make_steps(width, tiles, keys)
    key_place, value_place, load_query = steps.key_place, steps.value_place, steps.load_query
    find_scores, hide, weigh = steps.find_scores, steps.hide, steps.weigh
    add_values, meet = steps.add_values, steps.meet

    @cuda.jit(device=True, inline="always")
    def group_barrier(group):
        """All warps of the group; a barrier's number is a constant, so one branch each."""
        if tiles == 1:
            cuda.syncwarp()
        elif groups == 1:
            cuda.syncthreads()
        elif group == 0:
            ptx.bar_sync(1, lanes)
        elif group == 1:
            ptx.bar_sync(2, lanes)
        elif group == 2:
            ptx.bar_sync(3, lanes)
        else:
            ptx.bar_sync(4, lanes)

    @cuda.jit(device=True, inline="always")
    def copy_committed(key_to, value_to, pages, source, to_value, across, position, oldest):
        """This thread's pieces of a page; zeros for what the window has left behind."""
        for n in range(passes):
            size = 16 if position + n * step >= oldest else 0
            at = source + n * step * across
            ptx.copy16_part(key_to + n * step * row_bytes, pages, at, size)
            ptx.copy16_part(value_to + n * step * row_bytes, pages, at + to_value, size)

    @kernel(
        threads=lanes * groups,
        name=f"draft_attention_split_{width}_{16 * tiles}",
        shared_bytes=groups * ring,
        registers=255,
        opcodes=("HMMA.16816.F32.BF16", "LDSM", "LDGSTS.E.BYPASS.128"),
        pdl=True,
    )
    @cuda.jit
    def draft_attention_split_kernel(
        q: read(bf16),
        q_request: int64,
        q_row: int64,
        k: read(bf16),
        k_request: int64,
        k_row: int64,
        v: read(bf16),
        v_request: int64,
        v_row: int64,
        pages: read(bf16),
        page_table: read(int32),
        table_width: int32,
        lengths: read(int32),
        block: int32,
        group_rows: int32,
        scale: float32,
        causal: int32,
        window: int32,
        splits: int32,
        sums: write(float32),
        tops: write(float32),
    ):
        split, head, request = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        heads = cuda.gridDim.y
        group, thread = int32(cuda.threadIdx.x) // lanes, int32(cuda.threadIdx.x) % lanes
        tile, lane = thread >> 5, thread & 31
        shared = ptx.shared_address(cuda.shared.array(0, uint32, alignment=16))
        mine = shared + group * ring
        length = lengths[request]
        first, count, each = split_pages(length, window, splits)
        if split <= count:
            last = split == count
            page = first + split * each
            end = min(page + each, length // PAGE)
            if last:
                page, end = length // PAGE, (length + block + PAGE - 1) // PAGE
            oldest = length - window + 1  # position that the block's first row sees

            # copies: a thread has one piece of every step-th key, and of its value
            row, column = thread // columns, thread % columns * 8
            key_to = mine + key_place(row, thread % columns)
            value_to = mine + value_place(row, thread % columns)
            table = request * table_width
            to_value = heads * width
            across = 2 * to_value  # elements from position to position
            inner = head * width + column
            row += group * keys
            offset = row * across + inner
            if last:
                entry = int64(0)
                if page * PAGE < length:
                    entry = int64(page_table[table + page]) * PAGE * across
                ptx.wait_for_previous()
                for s in range(STAGES - 1):
                    if page + s < end:
                        for n in range(passes):
                            position = (page + s) * PAGE + row + n * step
                            i = position - length
                            here = s * stage + n * step * row_bytes
                            if i < 0:
                                size = 16 if position >= oldest else 0
                                at = entry + offset + n * step * across
                                ptx.copy16_part(key_to + here, pages, at, size)
                                ptx.copy16_part(value_to + here, pages, at + to_value, size)
                            else:  # what lies behind the block is zeros
                                size = 16 if i < block else 0
                                i = min(i, block - 1)
                                at = request * k_request + i * k_row + inner
                                ptx.copy16_part(key_to + here, k, at, size)
                                at = request * v_request + i * v_row + inner
                                ptx.copy16_part(value_to + here, v, at, size)
                    ptx.copy_commit()
            else:
                for s in range(STAGES - 1):
                    if page + s < end:
                        at = int64(page_table[table + page + s]) * PAGE * across + offset
                        position = (page + s) * PAGE + row
                        key, value = key_to + s * stage, value_to + s * stage
                        copy_committed(key, value, pages, at, to_value, across, position, oldest)
                    ptx.copy_commit()
                ptx.wait_for_previous()
            ptx.launch_next()

            query = cuda.local.array(query_size, uint32)
            acc = cuda.local.array(sums_size, float32)
            score = cuda.local.array(score_size, float32)
            weight = cuda.local.array(weight_size, uint32)
            top = cuda.local.array(2, float32)
            total = cuda.local.array(2, float32)
            own = cuda.local.array(2, int32)  # positions of the lane's rows
            for h in range(2):
                m = 16 * tile + 8 * h + (lane >> 2)
                if m >= block * group_rows:  # padding: any row will do
                    m = int32(0)
                i = m // group_rows
                m += (head - i) * group_rows
                load_query(
                    q, request * q_request + i * q_row + m * width + 8 * (lane & 3), query, h
                )
                own[h], top[h], total[h] = int32(length + i), LOWEST, float32(0)
            for i in range(sums_size):
                acc[i] = float32(0)

            entry = int64(0)
            if page + STAGES - 1 < end:
                entry = int64(page_table[table + page + STAGES - 1])
            slot, free = int32(0), int32((STAGES - 1) * stage)
            while page < end:
                ptx.copy_wait(STAGES - 2)
                group_barrier(group)  # the page is there, and nobody still reads the one before
                if page + STAGES - 1 < end:
                    at = entry * PAGE * across + offset
                    position = (page + STAGES - 1) * PAGE + row
                    key, value = key_to + free, value_to + free
                    copy_committed(key, value, pages, at, to_value, across, position, oldest)
                    if page + STAGES < end:
                        entry = int64(page_table[table + page + STAGES])
                ptx.copy_commit()
                find_scores(query, mine + slot, lane, score)
                if last or page * PAGE < oldest + block - 1:
                    position = page * PAGE + group * keys + 2 * (lane & 3)
                    hide(score, position, own, length + block, causal, window)
                weigh(score, scale, weight, top, total, acc)
                add_values(weight, mine + slot, lane, acc)
                free, slot = slot, int32(slot + stage)
                if slot == ring:
                    slot = int32(0)
                page = int32(page + 1)

            for h in range(2):
                total[h] = ptx.add(total[h], ptx.shfl_xor_f(total[h], 1))
                total[h] = ptx.add(total[h], ptx.shfl_xor_f(total[h], 2))
            if groups > 1:
                meet(shared, tile, group, lane, top, total, acc)
            if group == 0:
                at = int64(request * heads + head) * splits * tiles
                for n in range(columns):
                    z, i = 4 * n, ((at + split * tiles + tile) * columns + n) * 128 + lane * 4
                    ptx.stg4_f(sums, i, acc[z], acc[z + 1], acc[z + 2], acc[z + 3])
                if lane & 3 == 0:
                    for h in range(2):
                        i = ((at + tile * splits) * 16 + (8 * h + (lane >> 2)) * splits + split) * 2
                        tops[i], tops[i + 1] = top[h], total[h]

    return draft_attention_split_kernel
