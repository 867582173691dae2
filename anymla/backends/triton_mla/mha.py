"""The prefill kernel: flash attention of new tokens over decompressed keys and values of one pass.

Each sequence has two lines of keys: its cached context, and its own new tokens. A pass has some of one line
decompressed. What a tile has summed up is put down in fp32 as it is and taken up by its next pass, and lines
are cut between whole blocks only: however they are cut, a row sees the same blocks in the same order, and its
bits are the same.
"""

import triton
import triton.language as tl

from anymla.backends.triton_mla.attend import sink_share

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["first", "end", "origin", "num_tiles", "num_seqs", "num_heads"])
def mha_kernel(
    q_nope,
    q_pe,
    keys,
    rope,
    values,
    sinks,
    out,
    lse,
    kept_acc,
    kept_top,
    kept_total,
    tiles,
    q_starts,
    context_starts,
    sm_scale_log2e,
    first,
    end,
    origin,
    num_tiles,
    num_seqs,
    num_heads,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_pt,
    stride_ph,
    stride_pd,
    stride_kh,
    stride_vh,
    stride_rt,
    stride_rd,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lt,
    stride_lh,
    P: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    P_WIDTH: tl.constexpr,
    P_CHUNKS: tl.constexpr,
    R_PADDED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    REREAD: tl.constexpr,
    CONTEXT: tl.constexpr,
    AFTER_CONTEXT: tl.constexpr,
    CARRY: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Grid: heads × tiles. The pass has places `first` to `end` of all lines of its kind, one after another.

    Row 0 of keys [H, n, P], rope [n, R] and values [H, n, V] is place `origin`.
    """
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    # The last tiles of a causal sequence have the most keys, so they go first.
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    seq = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    rows = first_row + tl.arange(0, BLOCK_M)
    cols_v = tl.arange(0, V_WIDTH)

    if seq < num_seqs:
        q_start = tl.load(q_starts + seq).to(tl.int64)
        q_len = (tl.load(q_starts + seq + 1) - q_start).to(tl.int32)
        if CONTEXT:
            line_start = tl.load(context_starts + seq)
            line_len = (tl.load(context_starts + seq + 1) - line_start).to(tl.int32)
        else:
            line_start = q_start
            line_len = q_len
        lo = _cut(first - line_start, line_len, ALIGN)
        hi = _cut(end - line_start, line_len, ALIGN)
        if CAUSAL and not CONTEXT:
            seen_by_any = tl.minimum(first_row + BLOCK_M, line_len)
            seen_by_all = first_row + 1
        else:
            seen_by_any = line_len
            seen_by_all = line_len
        stop = tl.minimum(hi, seen_by_any)
        if lo < stop:
            live = rows < q_len
            row_tokens = q_start + rows
            q_p = ()
            acc = ()
            for chunk in tl.static_range(P_CHUNKS):
                cols = chunk * P_WIDTH + tl.arange(0, P_WIDTH)
                q_rows = row_tokens * stride_qt + head * stride_qh
                q_p = q_p + (_load_block(q_nope, q_rows, live, cols, stride_qd, P, P_WIDTH * P_CHUNKS, True),)
            if R > 0:
                q_rows = row_tokens * stride_pt + head * stride_ph
                q_r = _load_block(q_pe, q_rows, live, tl.arange(0, R_PADDED), stride_pd, R, R_PADDED, True)
            else:
                q_r = q_p[0]
            # Sums are kept [T, H, V] in one piece: the offsets within a tile are small.
            kept_0 = (q_start + first_row) * num_heads + head
            places = tl.arange(0, BLOCK_M) * num_heads
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            if CARRY:
                carried = lo > 0
                if AFTER_CONTEXT:
                    context = tl.load(context_starts + seq + 1) - tl.load(context_starts + seq)
                    carried = carried | (context > 0)
                kept = live & carried
                top = tl.load(kept_top + kept_0 + places, mask=kept, other=float("-inf"))
                total = tl.load(kept_total + kept_0 + places, mask=kept, other=0.0)
                for chunk in tl.static_range(V_CHUNKS):
                    cols = chunk * V_WIDTH + cols_v
                    kept_part = _load_block(
                        kept_acc + kept_0 * V, places * V, kept, cols, 1, V, V_WIDTH * V_CHUNKS, True
                    )
                    acc = acc + (kept_part,)
            else:
                for _chunk in tl.static_range(V_CHUNKS):
                    acc = acc + (tl.zeros((BLOCK_M, V_WIDTH), tl.float32),)

            row_0 = line_start - origin
            k_base = keys + head * stride_kh
            v_base = values + head * stride_vh
            full = tl.maximum(tl.minimum(stop, seen_by_all) // BLOCK_N * BLOCK_N, lo)
            for key in tl.range(lo, full, BLOCK_N):
                top, total, acc = _absorb(
                    q_p, q_r, k_base, rope, v_base, stride_rt, stride_rd, row_0, key, stop, rows,
                    sm_scale_log2e, top, total, acc, P, R, V, P_WIDTH, P_CHUNKS, R_PADDED, V_WIDTH, V_CHUNKS,
                    BLOCK_N, REREAD, False, False,
                )  # fmt: skip
            for key in tl.range(full, stop, BLOCK_N):
                top, total, acc = _absorb(
                    q_p, q_r, k_base, rope, v_base, stride_rt, stride_rd, row_0, key, stop, rows,
                    sm_scale_log2e, top, total, acc, P, R, V, P_WIDTH, P_CHUNKS, R_PADDED, V_WIDTH, V_CHUNKS,
                    BLOCK_N, REREAD, True, CAUSAL and not CONTEXT,
                )  # fmt: skip

            is_done = False if CONTEXT else stop == seen_by_any
            if is_done:
                empty = total == 0.0
                row_lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2)
                share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
                if HAS_SINKS:
                    share = share * sink_share(row_lse, tl.load(sinks + head))
                o_rows = out + row_tokens * stride_ot + head * stride_oh
                for chunk in tl.static_range(V_CHUNKS):
                    result = tl.where(empty[:, None], 0.0, acc[chunk] * share[:, None])
                    _store_block(o_rows, live, chunk * V_WIDTH + cols_v, stride_od, result, V)
                if HAS_LSE:
                    tl.store(lse + row_tokens * stride_lt + head * stride_lh, row_lse, mask=live)
            elif CARRY:
                tl.store(kept_top + kept_0 + places, top, mask=live)
                tl.store(kept_total + kept_0 + places, total, mask=live)
                for chunk in tl.static_range(V_CHUNKS):
                    kept_rows = kept_acc + kept_0 * V + places * V
                    _store_block(kept_rows, live, chunk * V_WIDTH + cols_v, 1, acc[chunk], V)
    elif seq == num_seqs and first == 0 and not CONTEXT:
        # Rows that belong to no sequence.
        q_start = tl.load(q_starts + seq).to(tl.int64)
        live = rows < tl.load(q_starts + seq + 1) - q_start
        row_tokens = q_start + rows
        o_rows = out + row_tokens * stride_ot + head * stride_oh
        for chunk in tl.static_range(V_CHUNKS):
            nothing = tl.zeros((BLOCK_M, V_WIDTH), tl.float32)
            _store_block(o_rows, live, chunk * V_WIDTH + cols_v, stride_od, nothing, V)
        if HAS_LSE:
            nothing_seen = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(lse + row_tokens * stride_lt + head * stride_lh, nothing_seen, mask=live)


@triton.jit
def _cut(place, line_len, ALIGN: tl.constexpr):
    """Where a line is cut that a pass ends in: after a whole number of blocks, or at its end."""
    inside = tl.minimum(tl.maximum(place, 0), line_len).to(tl.int32)
    return tl.where(inside < line_len, inside // ALIGN * ALIGN, line_len)


@triton.jit
def _load_block(
    pointer,
    offsets,
    live,
    cols,
    stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    places = pointer + (offsets[:, None] + cols[None, :] * stride)
    if MASKED and WIDTH < WIDTH_PADDED:
        return tl.load(places, mask=live[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(places, mask=live[:, None], other=0.0)
    elif WIDTH < WIDTH_PADDED:
        return tl.load(places, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(places)


@triton.jit
def _store_block(base, live, cols, stride, block, WIDTH: tl.constexpr):
    places = base[:, None] + cols[None, :] * stride
    tl.store(places, block.to(base.dtype.element_ty), mask=live[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def _absorb(
    q_p, q_r, keys, rope, values, stride_rt, stride_rd, row_0, key, stop, rows, score_scale, top, total, acc,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, P_WIDTH: tl.constexpr, P_CHUNKS: tl.constexpr,
    R_PADDED: tl.constexpr, V_WIDTH: tl.constexpr, V_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    REREAD: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Take keys `key` to `key + BLOCK_N` into the running softmax; all rows see all of them unless MASKED.

    `row_0` is the row of key 0 in keys, rope and values.
    """
    steps = tl.arange(0, BLOCK_N)
    offs = key + steps
    valid = offs < stop
    row = row_0 + key
    scores = tl.zeros((top.shape[0], BLOCK_N), tl.float32)
    for chunk in tl.static_range(P_CHUNKS):
        cols = chunk * P_WIDTH + tl.arange(0, P_WIDTH)
        # A value that depends on the key keeps its operand from being laid out once, in registers, for all.
        q = tl.where(key < stop, q_p[chunk], 0.0) if REREAD else q_p[chunk]
        k = _load_block(keys + row * P, steps * P, valid, cols, 1, P, P_WIDTH * P_CHUNKS, MASKED)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    if R > 0:
        k = _load_block(
            rope + row * stride_rt,
            steps.to(tl.int64) * stride_rt,
            valid,
            tl.arange(0, R_PADDED),
            stride_rd,
            R,
            R_PADDED,
            MASKED,
        )
        q = tl.where(key < stop, q_r, 0.0) if REREAD else q_r
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    if MASKED:
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (offs[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
    # A row that has seen nothing yet would subtract -inf from -inf.
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * score_scale - floor[:, None])
    decay = tl.exp2(top - floor)
    total = total * decay + tl.sum(weights, 1)
    new_acc = ()
    for chunk in tl.static_range(V_CHUNKS):
        cols = chunk * V_WIDTH + tl.arange(0, V_WIDTH)
        v = _load_block(values + row * V, steps * V, valid, cols, 1, V, V_WIDTH * V_CHUNKS, MASKED)
        part = tl.dot(weights.to(v.dtype), v, acc[chunk] * decay[:, None], input_precision="ieee")
        new_acc = new_acc + (part,)
    return new_top, total, new_acc
