"""The fused kernels of attention over spans: the forward, its gradients, and decoding.

A program of the forward holds a tile of queries and loops over the keys of each source. Both ends of a span only move
forward, so four numbers, read from the spans of the tile's first and last query, bound the loop and the masked parts:

    first query  # # # # # # . . . .        lo(first query)             from here on somebody reads,
                 . . # # # # # . . .        lo(last), hi(first query)   between these everybody does: no mask,
    last query   . . . # # # # # # .        hi(last query)              up to here somebody does
                       └full┘

Queries of several groups at the same positions are rows of one tile, so both streams of a two-stream network share
every key that is loaded. The gradient of keys is the same loop on the transposed mask: the queries that read key j are
contiguous, too, and both ends of their range move forward with j. In decoding there are few queries and many keys: a
program takes a share of the keys for all heads that read them, and a second kernel combines the shares.

The backward walks twice: along the keys for the gradient of queries, along the queries for the gradients of keys and
values. Scores are computed in both, 7 products for a pair of query and key where one walk would take 5, but nothing is
added up in memory: every element of a result is written by one program, which adds in a fixed order, so results are
bitwise the same in every run.

Exponentials are taken to base 2, which is one instruction; sums and accumulators are float32.

Tuples, one entry per group or source, are unrolled by the compiler. Strides come in threes: row, head, position; the
channels of a tensor are contiguous. BLOCK_D is D rounded up to a power of two.
Shapes: B rows, T queries, N keys of a source, H heads, G key heads, D head width.
"""

# ruff: noqa: RUF005 - Triton has no starred expressions
# What Triton's compiler treats as a constexpr, a range or a tuple is not one to a type checker.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)

# ---- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(at, stride, index, limit, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Positions `index` of one head, (index, BLOCK_D); zero past D and, where MASKED, from `limit` on."""
    d = tl.arange(0, BLOCK_D)
    at = at + index[:, None] * stride + d[None, :]
    if MASKED:
        tile = tl.load(at, mask=(index[:, None] < limit) & (d[None, :] < D), other=0.0)
    elif D == BLOCK_D:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=d[None, :] < D, other=0.0)
    return tile


@triton.jit
def store_tile(at, stride, index, tile, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows of a tile for which `mask` holds."""
    d = tl.arange(0, BLOCK_D)
    at = at + index[:, None] * stride + d[None, :]
    tl.store(at, tile.to(at.dtype.element_ty), mask=mask[:, None] & (d[None, :] < D))


@triton.jit
def load_groups(
    x, strides, b, h, i, group, T, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The rows of a tile, each from the tensor of its group; zero where there is no such query."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = x[0] + b * strides[0] + h * strides[1] + i[:, None] * strides[2] + d
    tile = tl.load(at, mask=((group == 0) & (i < T))[:, None] & (d < D), other=0.0)
    for g in tl.static_range(1, GROUPS):
        at = x[g] + b * strides[3 * g] + h * strides[3 * g + 1] + i[:, None] * strides[3 * g + 2] + d
        tile += tl.load(at, mask=((group == g) & (i < T))[:, None] & (d < D), other=0.0)
    return tile


@triton.jit
def tile_walk(lo, hi, first, last, to_group, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """(start, end, before, full, blocks): the tile reads within start .. end, cut into `blocks` blocks; the first
    `before` of them need a mask, the next `full` do not, the others do.

    lo, hi point to the spans of the first group, `to_group` entries before those of the next.
    """
    start, end = tl.load(lo + first), tl.load(hi + last)
    every_from, every_to = tl.load(lo + last), tl.load(hi + first)
    for g in tl.static_range(1, GROUPS):
        start = tl.minimum(start, tl.load(lo + g * to_group + first))
        end = tl.maximum(end, tl.load(hi + g * to_group + last))
        every_from = tl.maximum(every_from, tl.load(lo + g * to_group + last))
        every_to = tl.minimum(every_to, tl.load(hi + g * to_group + first))
    blocks = tl.cdiv(tl.maximum(end - start, 0), BLOCK)
    before = tl.minimum(tl.cdiv(tl.maximum(every_from - start, 0), BLOCK), blocks)
    full = tl.maximum(tl.maximum(every_to - start, 0) // BLOCK - before, 0)
    return start, end, before, full, blocks


@triton.jit
def number_of_blocks(full, blocks, MASKED: tl.constexpr):
    """Blocks in one of the two passes over a source: those that need a mask, or those that do not."""
    return blocks - full if MASKED else full


@triton.jit
def nth_block(n, before, full, MASKED: tl.constexpr):
    """The n-th block of the pass: masked blocks lie before and after the full ones."""
    return n + tl.where(n < before, 0, full) if MASKED else before + n


@triton.jit
def tile_of_queries(T, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row, head, group and position of every row of the tile, first and last position): the longest tiles first."""
    SLOTS: tl.constexpr = triton.next_power_of_2(GROUPS)
    QUERIES: tl.constexpr = BLOCK_M // SLOTS
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    m = tl.arange(0, BLOCK_M)
    i, group = first + m % QUERIES, m // QUERIES
    return (
        tl.program_id(2).to(tl.int64),
        tl.program_id(1).to(tl.int64),
        group,
        i,
        first,
        tl.minimum(first + QUERIES, T) - 1,
    )


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def read_block(
    acc, m, l, q, k, v, k_stride, v_stride, j, end, lo, hi, to_base_2,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The running softmax over the keys j: unscaled output, largest score (base 2) and sum of weights."""
    keys = load_tile(k, k_stride, j, end, MASKED, D, BLOCK_D)
    score = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASKED:
        score = tl.where((lo[:, None] <= j[None, :]) & (j[None, :] < hi[:, None]), score, float("-inf"))
    largest = tl.maximum(m, tl.max(score, 1) * to_base_2)
    # A query that has read nothing yet has no largest score: -inf minus -inf would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest
    p = tl.exp2(score * to_base_2 - shift[:, None])
    keep = tl.exp2(m - shift)
    l = l * keep + tl.sum(p, 1)
    values = load_tile(v, v_stride, j, end, MASKED, D, BLOCK_D)
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return acc, largest, l


@triton.jit
def read_keys(
    acc, m, l, q, k, v, k_stride, v_stride, lo, hi, start, end, before, full, blocks, to_base_2,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The running softmax over one pass over a source."""
    for n in tl.range(0, number_of_blocks(full, blocks, MASKED)):
        j = start + nth_block(n, before, full, MASKED) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc, m, l = read_block(acc, m, l, q, k, v, k_stride, v_stride, j, end, lo, hi, to_base_2, MASKED, D, BLOCK_D)
    return acc, m, l


@triton.jit
def forward_kernel(
    q, k, v, y, lse, bounds, to_hi, to_row, T, B, H, heads_per_key, to_base_2,
    q_strides, k_strides, v_strides, y_strides,
    GROUPS: tl.constexpr, SOURCES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y and log-sum-exp (GROUPS, B, H, T) of one tile of queries; grid (tiles, H, B)."""
    b, h, group, i, first, last = tile_of_queries(T, GROUPS, BLOCK_M)
    here, key_head = (i < T) & (group < GROUPS), h // heads_per_key
    queries = load_groups(q, q_strides, b, h, i, group, T, GROUPS, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    for s in tl.static_range(SOURCES):
        at = bounds + b * to_row + s * GROUPS * T
        lo = tl.load(at + group * T + i, mask=here, other=0)
        hi = tl.load(at + to_hi + group * T + i, mask=here, other=0)
        start, end, before, full, blocks = tile_walk(at, at + to_hi, first, last, T, GROUPS, BLOCK_N)
        keys = k[s] + b * k_strides[3 * s] + key_head * k_strides[3 * s + 1]
        values = v[s] + b * v_strides[3 * s] + key_head * v_strides[3 * s + 1]
        k_stride, v_stride = k_strides[3 * s + 2], v_strides[3 * s + 2]
        for is_full in tl.static_range(2):
            acc, m, l = read_keys(
                acc, m, l, queries, keys, values, k_stride, v_stride, lo, hi, start, end, before, full, blocks,
                to_base_2,
                not is_full, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    total = tl.where(l == 0.0, 1.0, l)  # a query that reads nothing: exactly zero, and -inf
    out = acc / total[:, None]
    tl.store(
        lse + ((group * B + b) * H + h) * T + i, tl.where(l == 0.0, float("-inf"), m * LN_2 + tl.log(total)), mask=here
    )
    for g in tl.static_range(GROUPS):
        at = y[g] + b * y_strides[3 * g] + h * y_strides[3 * g + 1]
        store_tile(at, y_strides[3 * g + 2], i, out, here & (group == g), D, BLOCK_D)


# ---- the gradient of queries ----------------------------------------------------------------------------------------


@triton.jit
def gradient_of_queries(
    dq, q, dy, sums, delta, k, v, k_stride, v_stride, lo, hi, start, end, before, full, blocks, to_base_2,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds to dq, not yet scaled, the contribution of a source's keys."""
    for n in tl.range(0, number_of_blocks(full, blocks, MASKED)):
        j = start + nth_block(n, before, full, MASKED) * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = load_tile(k, k_stride, j, end, MASKED, D, BLOCK_D)
        values = load_tile(v, v_stride, j, end, MASKED, D, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(keys), input_precision="ieee") * to_base_2 - sums[:, None])
        if MASKED:
            p = tl.where((lo[:, None] <= j[None, :]) & (j[None, :] < hi[:, None]), p, 0.0)
        ds = p * (tl.dot(dy, tl.trans(values), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit
def query_gradient_kernel(
    q, k, v, y, dy, dq, lse, terms, bounds, to_hi, to_row, T, B, H, heads_per_key, to_base_2, scale,
    q_strides, k_strides, v_strides, y_strides, dy_strides, dq_strides,
    GROUPS: tl.constexpr, SOURCES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries and, for the gradient of keys, what it needs of each: terms (GROUPS, B, H, T, 2), the
    log-sum-exp to base 2 and the sum of y dy; grid (tiles, H, B)."""
    b, h, group, i, first, last = tile_of_queries(T, GROUPS, BLOCK_M)
    here, key_head = (i < T) & (group < GROUPS), h // heads_per_key
    queries = load_groups(q, q_strides, b, h, i, group, T, GROUPS, D, BLOCK_D)
    gradient = load_groups(dy, dy_strides, b, h, i, group, T, GROUPS, D, BLOCK_D)
    out = load_groups(y, y_strides, b, h, i, group, T, GROUPS, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
    line = ((group * B + b) * H + h) * T + i
    sums = tl.load(lse + line, mask=here, other=0.0) * LOG2_E
    tl.store(terms + 2 * line, sums, mask=here)
    tl.store(terms + 2 * line + 1, delta, mask=here)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for s in tl.static_range(SOURCES):
        at = bounds + b * to_row + s * GROUPS * T
        lo = tl.load(at + group * T + i, mask=here, other=0)
        hi = tl.load(at + to_hi + group * T + i, mask=here, other=0)
        start, end, before, full, blocks = tile_walk(at, at + to_hi, first, last, T, GROUPS, BLOCK_N)
        keys = k[s] + b * k_strides[3 * s] + key_head * k_strides[3 * s + 1]
        values = v[s] + b * v_strides[3 * s] + key_head * v_strides[3 * s + 1]
        k_stride, v_stride = k_strides[3 * s + 2], v_strides[3 * s + 2]
        for is_full in tl.static_range(2):
            acc = gradient_of_queries(
                acc, queries, gradient, sums, delta, keys, values, k_stride, v_stride, lo, hi, start, end, before,
                full, blocks, to_base_2, not is_full, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    for g in tl.static_range(GROUPS):
        at = dq[g] + b * dq_strides[3 * g] + h * dq_strides[3 * g + 1]
        store_tile(at, dq_strides[3 * g + 2], i, acc * scale, here & (group == g), D, BLOCK_D)


# ---- the gradient of keys and values --------------------------------------------------------------------------------


@triton.jit
def gradient_of_keys(
    dk, dv, k, v, q, dy, terms, q_stride, dy_stride, lo, hi, start, end, before, full, blocks, to_base_2,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one head's queries; lo, hi bound the queries that read each key."""
    for n in tl.range(0, number_of_blocks(full, blocks, MASKED)):
        i = start + nth_block(n, before, full, MASKED) * BLOCK_M + tl.arange(0, BLOCK_M)
        queries = load_tile(q, q_stride, i, end, MASKED, D, BLOCK_D)
        gradient = load_tile(dy, dy_stride, i, end, MASKED, D, BLOCK_D)
        of_row, dot = tl.split(load_tile(terms, 2, i, end, MASKED, 2, 2))
        p = tl.exp2(tl.dot(k, tl.trans(queries), input_precision="ieee") * to_base_2 - of_row[None, :])
        if MASKED:
            p = tl.where((lo[:, None] <= i[None, :]) & (i[None, :] < hi[:, None]), p, 0.0)
        dv = tl.dot(p.to(gradient.dtype), gradient, dv, input_precision="ieee")
        ds = (p * (tl.dot(v, tl.trans(gradient), input_precision="ieee") - dot[None, :])).to(queries.dtype)
        dk = tl.dot(ds, queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_gradient_kernel(
    q, k, v, dy, dk, dv, terms, readers, to_hi, to_row, T, N, B, H, heads_per_key, to_base_2, scale,
    q_strides, k_strides, v_strides, dy_strides, dk_strides, dv_strides,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one source; grid (tiles, key heads, B)."""
    first = tl.program_id(0) * BLOCK_N
    last = tl.minimum(first + BLOCK_N, N) - 1
    key_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    j = first + tl.arange(0, BLOCK_N)
    keys = load_tile(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], j, N, True, D, BLOCK_D)
    values = load_tile(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], j, N, True, D, BLOCK_D)
    sum_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    sum_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for g in tl.static_range(GROUPS):
        at = readers + b * to_row + g * N
        lo = tl.load(at + j, mask=j < N, other=0)
        hi = tl.load(at + to_hi + j, mask=j < N, other=0)
        start, end, before, full, blocks = tile_walk(at, at + to_hi, first, last, N, 1, BLOCK_M)
        for h in range(key_head * heads_per_key, (key_head + 1) * heads_per_key):
            queries = q[g] + b * q_strides[3 * g] + h * q_strides[3 * g + 1]
            gradient = dy[g] + b * dy_strides[3 * g] + h * dy_strides[3 * g + 1]
            q_stride, dy_stride = q_strides[3 * g + 2], dy_strides[3 * g + 2]
            of_head = terms + ((g * B + b) * H + h) * T * 2
            for is_full in tl.static_range(2):
                sum_k, sum_v = gradient_of_keys(
                    sum_k, sum_v, keys, values, queries, gradient, of_head, q_stride, dy_stride, lo, hi,
                    start, end, before, full, blocks, to_base_2, not is_full, D, BLOCK_D, BLOCK_M,
                )  # fmt: skip
    store_tile(dk + b * dk_strides[0] + key_head * dk_strides[1], dk_strides[2], j, sum_k * scale, j < N, D, BLOCK_D)
    store_tile(dv + b * dv_strides[0] + key_head * dv_strides[1], dv_strides[2], j, sum_v, j < N, D, BLOCK_D)


# ---- decoding -------------------------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(
    q, k, v, outputs, largest, totals, bounds, to_hi, to_row, T, heads_per_key, to_base_2,
    q_strides, k_strides, v_strides,
    GROUPS: tl.constexpr, SOURCES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What all queries of a key head read from one share of the keys; grid (shares, key heads, B).

    Row m of the tile is query m % T of head m // T % heads_per_key of group m // T // heads_per_key. Writes the
    unscaled outputs (B, G, shares, BLOCK_M, BLOCK_D), the largest scores (base 2) and the sums of weights.
    """
    share, key_head, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i, head, group = m % T, key_head * heads_per_key + m // T % heads_per_key, m // T // heads_per_key
    here, d = group < GROUPS, tl.arange(0, BLOCK_D)
    queries = tl.zeros([BLOCK_M, BLOCK_D], dtype=q[0].dtype.element_ty)
    for g in tl.static_range(GROUPS):
        at = q[g] + b * q_strides[3 * g] + head * q_strides[3 * g + 1] + i * q_strides[3 * g + 2]
        queries += tl.load(at[:, None] + d[None, :], mask=(group == g)[:, None] & (d[None, :] < D), other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # One loop over the blocks of all sources, as a second one would wait for its first keys again: block n of all lies
    # at begins[s] + n BLOCK_N of source s, the last with firsts[s] <= n.
    blocks, firsts, begins, ends, los, his, keys, values = 0, (), (), (), (), (), (), ()
    for s in tl.static_range(SOURCES):
        at = bounds + b * to_row + (s * GROUPS + group) * T + i
        lo, hi = tl.load(at, mask=here, other=0), tl.load(at + to_hi, mask=here, other=0)
        start, end = tl.min(tl.where(here, lo, 2147483647)), tl.max(hi)
        keys_per_share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), BLOCK_N), tl.num_programs(0)) * BLOCK_N
        start += share * keys_per_share
        end = tl.minimum(start + keys_per_share, end)
        firsts, begins, ends = firsts + (blocks,), begins + (start - blocks * BLOCK_N,), ends + (end,)
        los, his = los + (lo,), his + (hi,)
        keys += (k[s] + b * k_strides[3 * s] + key_head * k_strides[3 * s + 1],)
        values += (v[s] + b * v_strides[3 * s] + key_head * v_strides[3 * s + 1],)
        blocks += tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    for n in tl.range(0, blocks):
        begin, end, lo, hi, ks, vs = begins[0], ends[0], los[0], his[0], keys[0], values[0]  # type: ignore
        k_stride, v_stride = k_strides[2], v_strides[2]
        for s in tl.static_range(1, SOURCES):
            is_past = n >= firsts[s]
            begin, end = tl.where(is_past, begins[s], begin), tl.where(is_past, ends[s], end)
            lo, hi = tl.where(is_past, los[s], lo), tl.where(is_past, his[s], hi)
            ks, vs = tl.where(is_past, keys[s], ks), tl.where(is_past, values[s], vs)
            k_stride = tl.where(is_past, k_strides[3 * s + 2], k_stride)
            v_stride = tl.where(is_past, v_strides[3 * s + 2], v_stride)
        j = begin + n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc, top, total = read_block(
            acc, top, total, queries, ks, vs, k_stride, v_stride, j, end, lo, hi, to_base_2, True, D, BLOCK_D
        )  # fmt: skip
    line = ((b * tl.num_programs(1) + key_head) * tl.num_programs(0) + share) * BLOCK_M + m
    tl.store(outputs + line[:, None] * BLOCK_D + d[None, :], acc)
    tl.store(largest + line, top)
    tl.store(totals + line, total)


@triton.jit
def combine_kernel(
    outputs, largest, totals, y, lse, T, H, heads_per_key, y_strides,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """y and log-sum-exp of one query, combined from all shares; grid (rows of a tile, key heads, B)."""
    m, key_head, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, head, group = m % T, key_head * heads_per_key + m // T % heads_per_key, m // T // heads_per_key
    share, d = tl.arange(0, SHARES), tl.arange(0, BLOCK_D)
    line = ((b * tl.num_programs(1) + key_head) * SHARES + share) * BLOCK_M + m
    tops = tl.load(largest + line)
    top = tl.max(tops, 0)
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(tl.load(totals + line) * weight, 0)
    acc = tl.sum(tl.load(outputs + line[:, None] * BLOCK_D + d[None, :]) * weight[:, None], 0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    at = ((group * tl.num_programs(2) + b) * H + head) * T + i
    tl.store(lse + at, tl.where(total == 0.0, float("-inf"), top * LN_2 + tl.log(tl.where(total == 0.0, 1.0, total))))
    for g in tl.static_range(GROUPS):
        at = y[g] + b * y_strides[3 * g] + head * y_strides[3 * g + 1] + i * y_strides[3 * g + 2]
        tl.store(at + d, out.to(at.dtype.element_ty), mask=d < tl.where(group == g, D, 0))
