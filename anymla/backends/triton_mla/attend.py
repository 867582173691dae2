"""The attention kernel: rows of one sequence in tiles, keys from pages or from indices, work cut evenly.

A tile is up to BLOCK_M rows (query token, head) of one sequence, so a verify block reads the cache once.
The key blocks of all tiles stand in one line, which is cut into one stretch a program (see `schedule`). A tile
that one program covers alone is written out at once; the pieces of any other go to the workspace, for `combine`.
A batch-invariant line has PIECES items a tile instead, of PIECE_BLOCKS blocks each, and is cut between items only.
"""

import triton
import triton.language as tl

from anymla.backends.triton_mla.keys import load_keys

LN_2 = tl.constexpr(0.6931471805599453)
TAIL_N = tl.constexpr(16)
"""Keys of a block that some row of the tile does not see, or that a sequence ends in."""


@triton.jit
def attend_kernel(
    ql_nope,
    q_pe,
    cache,
    k_scale,
    block_table,
    seq_lens,
    qo_indptr,
    indices,
    counts,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    line,
    stretches,
    sm_scale_log2e,
    num_tokens,
    num_seqs,
    num_heads,
    num_keys,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_pt,
    stride_ph,
    stride_pd,
    stride_page,
    stride_token,
    stride_table,
    stride_table_col,
    stride_indices,
    stride_indices_col,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lt,
    stride_lh,
    L: tl.constexpr,
    R: tl.constexpr,
    L_POW2: tl.constexpr,
    R_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES_A_SEQ: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One stretch of the line a program; the grid is the number of stretches."""
    program = tl.program_id(0)
    first_item = tl.load(stretches + 3 * program)
    end_item = tl.load(stretches + 3 * program + 1)
    start = tl.load(stretches + 3 * program + 2)
    end = tl.load(stretches + 3 * program + 5)
    key_scale = tl.load(k_scale) if HAS_SCALE else 1.0
    score_scale = sm_scale_log2e * key_scale
    dtype: tl.constexpr = ql_nope.dtype.element_ty

    cols_l = tl.arange(0, L_POW2)
    cols_r = tl.arange(0, R_POW2)
    in_l = cols_l < L
    in_r = cols_r < R
    offs_n = tl.arange(0, BLOCK_N)

    for item in range(first_item, end_item):
        item_start = tl.load(line + item)
        item_end = tl.load(line + item + 1)
        lo = tl.maximum(start, item_start) - item_start
        hi = tl.minimum(end, item_end) - item_start
        if lo < hi:
            tile = item // PIECES
            if PIECES == 1:
                whole = (lo == 0) & (hi == item_end - item_start)
                slot = 2 * program + (item != first_item).to(tl.int32)
            else:
                whole = tl.load(line + (tile + 1) * PIECES) - tl.load(line + tile * PIECES) <= PIECE_BLOCKS
                slot = item
                lo += item % PIECES * PIECE_BLOCKS
                hi += item % PIECES * PIECE_BLOCKS
            seq = tile // TILES_A_SEQ
            first_row = (tile % TILES_A_SEQ) * BLOCK_M
            if SPARSE:
                q_start = seq
                q_len = 1
                seq_len = tl.load(counts + seq) if HAS_COUNTS else num_keys
            else:
                q_start = tl.load(qo_indptr + seq)
                q_len = tl.load(qo_indptr + seq + 1) - q_start
                seq_len = tl.load(seq_lens + seq)
            rows = first_row + tl.arange(0, BLOCK_M)
            tokens = rows // num_heads
            heads = rows % num_heads
            live = tokens < q_len
            if CAUSAL and not SPARSE:
                visible = tl.maximum(seq_len - q_len + 1 + tokens, 0)
                last_token = tl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
                seen_by_all = tl.maximum(seq_len - q_len + 1 + first_row // num_heads, 0)
                seen_by_any = tl.maximum(seq_len - q_len + 1 + last_token, 0)
            else:
                visible = tl.full((BLOCK_M,), 0, tl.int32) + seq_len
                seen_by_all = seq_len
                seen_by_any = seq_len
            row_tokens = (q_start + tokens).to(tl.int64)
            q_rows = ql_nope + row_tokens * stride_qt + heads * stride_qh
            q_l = tl.load(
                q_rows[:, None] + cols_l[None, :] * stride_qd, mask=live[:, None] & in_l[None, :], other=0.0
            )
            if R > 0:
                p_rows = q_pe + row_tokens * stride_pt + heads * stride_ph
                q_r = tl.load(
                    p_rows[:, None] + cols_r[None, :] * stride_pd,
                    mask=live[:, None] & in_r[None, :],
                    other=0.0,
                )
            else:
                q_r = q_l

            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, L_POW2), tl.float32)

            start_key = lo * BLOCK_N
            end_key = tl.minimum(hi * BLOCK_N, seen_by_any)
            if SPARSE:
                slots_row = indices + seq.to(tl.int64) * stride_indices
                for key in range(start_key, end_key, BLOCK_N):
                    keys = key + offs_n
                    within = keys < end_key
                    slots = tl.load(slots_row + keys * stride_indices_col, mask=within, other=-1)
                    valid = slots >= 0
                    slots = tl.where(valid, slots, 0)
                    offsets = (slots // BLOCK_SIZE).to(tl.int64) * stride_page + (
                        slots % BLOCK_SIZE
                    ) * stride_token
                    k_l, k_r = load_keys(
                        cache, 0, offsets, valid, dtype, L, R, L_POW2, R_POW2, FORMAT, True
                    )
                    top, total, acc = _absorb(
                        q_l, q_r, k_l, k_r, valid[None, :], score_scale, top, total, acc, R, True
                    )
            else:
                table = block_table + seq.to(tl.int64) * stride_table
                whole_end = tl.minimum(end_key, seen_by_all) // BLOCK_N * BLOCK_N
                if BLOCK_SIZE % BLOCK_N == 0:
                    # One page a block, its id read one block ahead.
                    page = tl.load(
                        table + (start_key // BLOCK_SIZE) * stride_table_col, mask=start_key < whole_end, other=0
                    )
                    for key in range(start_key, whole_end, BLOCK_N):
                        after = key + BLOCK_N
                        next_page = tl.load(
                            table + (after // BLOCK_SIZE) * stride_table_col, mask=after < whole_end, other=0
                        )
                        base = page.to(tl.int64) * stride_page + (key % BLOCK_SIZE) * stride_token
                        k_l, k_r = load_keys(
                            cache, base, offs_n * stride_token, offs_n >= 0, dtype, L, R, L_POW2, R_POW2, FORMAT, False
                        )
                        top, total, acc = _absorb(
                            q_l, q_r, k_l, k_r, offs_n[None, :] >= 0, score_scale, top, total, acc, R, False
                        )
                        page = next_page
                else:
                    for key in range(start_key, whole_end, BLOCK_N):
                        keys = key + offs_n
                        pages = tl.load(table + (keys // BLOCK_SIZE) * stride_table_col)
                        offsets = pages.to(tl.int64) * stride_page + (keys % BLOCK_SIZE) * stride_token
                        k_l, k_r = load_keys(
                            cache, 0, offsets, offs_n >= 0, dtype, L, R, L_POW2, R_POW2, FORMAT, False
                        )
                        top, total, acc = _absorb(
                            q_l, q_r, k_l, k_r, offs_n[None, :] >= 0, score_scale, top, total, acc, R, False
                        )
                # Few keys at a time: masks and repairs of a whole block would spill.
                for key in tl.range(tl.maximum(start_key, whole_end), end_key, TAIL_N, num_stages=1):
                    keys = key + tl.arange(0, TAIL_N)
                    valid = keys < end_key
                    pages = tl.load(table + (keys // BLOCK_SIZE) * stride_table_col, mask=valid, other=0)
                    offsets = pages.to(tl.int64) * stride_page + (keys % BLOCK_SIZE) * stride_token
                    k_l, k_r = load_keys(cache, 0, offsets, valid, dtype, L, R, L_POW2, R_POW2, FORMAT, True)
                    seen = keys[None, :] < tl.minimum(visible, end_key)[:, None]
                    top, total, acc = _absorb(
                        q_l, q_r, k_l, k_r, seen, score_scale, top, total, acc, R, True
                    )

            empty = total == 0.0
            acc = acc * (key_scale / tl.where(empty, 1.0, total))[:, None]
            acc = tl.where(empty[:, None], 0.0, acc)
            row_lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2)
            if whole:
                if HAS_SINKS:
                    acc = acc * sink_share(row_lse, tl.load(sinks + heads, mask=live, other=0.0))[:, None]
                o_rows = out + row_tokens * stride_ot + heads * stride_oh
                tl.store(
                    o_rows[:, None] + cols_l[None, :] * stride_od,
                    acc.to(out.dtype.element_ty),
                    mask=live[:, None] & in_l[None, :],
                )
                if HAS_LSE:
                    tl.store(lse + row_tokens * stride_lt + heads * stride_lh, row_lse, mask=live)
            else:
                piece = slot.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
                tl.store(part_out + piece[:, None] * L_POW2 + cols_l[None, :], acc)
                tl.store(part_lse + piece, row_lse)

    if not SPARSE:
        # Rows that belong to no sequence.
        free = tl.load(qo_indptr + num_seqs)
        for step in range(program, num_tokens - free, tl.num_programs(0)):
            row = (free + step).to(tl.int64)
            for head in range(num_heads):
                nothing = tl.zeros((L_POW2,), out.dtype.element_ty)
                tl.store(out + row * stride_ot + head * stride_oh + cols_l * stride_od, nothing, mask=in_l)
                if HAS_LSE:
                    tl.store(lse + row * stride_lt + head * stride_lh, float("-inf"))


@triton.jit
def sink_share(row_lse, sink):
    """What a sink leaves of a row: 1 / (1 + exp(sink - lse)); 0 for an empty row, 1 for a sink of -inf."""
    share = 1.0 / (1.0 + tl.exp(sink - row_lse))
    return tl.where(row_lse == float("-inf"), 0.0, share)


@triton.jit
def _absorb(q_l, q_r, k_l, k_r, seen, score_scale, top, total, acc, R: tl.constexpr, MASKED: tl.constexpr):
    """Take one block of keys into the running softmax."""
    if R > 0:
        scores = tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
        scores = tl.dot(q_l, tl.trans(k_l), scores, input_precision="ieee")
    else:
        scores = tl.dot(q_l, tl.trans(k_l), input_precision="ieee")
    scores = scores * score_scale
    if MASKED:
        # A weight of 0 times a value of NaN is NaN: rows that do not see a broken key must not get it.
        fine = k_l == k_l
        broken = tl.min(fine.to(tl.int32), 1) == 0
        k_l = tl.where(fine, k_l, 0.0)
        scores = tl.where(broken[None, :], float("nan"), scores)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet would subtract -inf from -inf.
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - floor[:, None])
    decay = tl.exp2(top - floor)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(k_l.dtype), k_l, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
