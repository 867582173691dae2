"""The attention kernel: rows of one sequence in tiles, keys from pages or from indices, work cut evenly.

A tile is up to BLOCK_M rows (query token, head) of one sequence, so a verify block reads the cache once.
The key blocks of all tiles stand in one line, the first tile of every sequence before any second one (so
that programs which run together share keys), which is cut into one stretch a program (see `schedule`). A
tile that one program covers alone is written out at once; the pieces of any other go to the workspace, for
`combine`. A batch-invariant line has PIECES items a tile instead, of PIECE_BLOCKS blocks each, and is cut
between items only.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from anymla.backends.triton_mla.keys import (
    FN_RATIO,
    FNUZ_RATIO,
    FP8_FN_BYTES,
    FP8_FNUZ_BYTES,
    PLAIN,
    converted,
    latent_of,
    load_block,
    rope_of,
    row_at,
)

LN_2 = tl.constexpr(0.6931471805599453)

OF_A_BATCH = ("num_tokens", "num_seqs", "num_keys", "stride_table", "stride_indices")
"""Sizes that a batch changes: compiling anew where one is 1 or a multiple of 16 would cost seconds."""


@triton.jit(do_not_specialize=OF_A_BATCH)
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
    q_scale,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INVARIANT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    AHEAD: tl.constexpr,
    FP8_SCORES: tl.constexpr,
    SWAP: tl.constexpr,
    REREAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One stretch of the line a program; the grid is the number of stretches.

    Queries in fp8 have a q_scale, and FORMAT is theirs too. With FP8_SCORES they meet the keys as they are.
    """
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    first_item = tl.load(stretches + 3 * program)
    end_item = tl.load(stretches + 3 * program + 1)
    start = tl.load(stretches + 3 * program + 2)
    end = tl.load(stretches + 3 * program + 5)
    key_scale = tl.load(k_scale) if HAS_SCALE else 1.0
    if FORMAT == FP8_FN_BYTES:
        key_scale = key_scale * FN_RATIO
    if FORMAT == FP8_FNUZ_BYTES:
        key_scale = key_scale * FNUZ_RATIO
    score_scale = sm_scale_log2e * key_scale
    Q_FORMAT: tl.constexpr = PLAIN if q_scale is None else FORMAT
    if q_scale is not None:
        score_scale = score_scale * tl.load(q_scale)
    if Q_FORMAT == FP8_FN_BYTES:
        score_scale = score_scale * FN_RATIO
    if Q_FORMAT == FP8_FNUZ_BYTES:
        score_scale = score_scale * FNUZ_RATIO

    WIDTH: tl.constexpr = L_PADDED // CHUNKS
    cols = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, BLOCK_N)

    for item in range(first_item, end_item):
        seq, first_row, q_start, q_len, seq_len, lo, hi, whole, slot = placed_item(
            item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
            BLOCK_M, INVARIANT, PIECES, PIECE_BLOCKS, SPARSE, HAS_COUNTS,
        )  # fmt: skip
        if lo < hi:
            rows = first_row + tl.arange(0, BLOCK_M)
            tokens = rows // num_heads
            heads = rows % num_heads
            live = tokens < q_len
            if CAUSAL and not SPARSE:
                visible = tl.maximum(seq_len - q_len + 1 + tokens, 0)
                last_token = tl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
                seen_by_any = tl.maximum(seq_len - q_len + 1 + last_token, 0)
            else:
                visible = tl.full((BLOCK_M,), 0, tl.int32) + seq_len
                seen_by_any = seq_len
            row_tokens = q_start + tokens
            q_rows = ql_nope + row_at(row_tokens, heads, stride_qt, stride_qh)
            q_l = ()
            acc = ()
            for chunk in tl.static_range(CHUNKS):
                q_l = q_l + (_load_rows(q_rows, live, chunk * WIDTH + cols, stride_qd, L),)
                acc = acc + (tl.zeros((WIDTH, BLOCK_M) if SWAP else (BLOCK_M, WIDTH), tl.float32),)
            if R > 0:
                p_rows = q_pe + row_at(row_tokens, heads, stride_pt, stride_ph)
                q_r = _load_rows(p_rows, live, tl.arange(0, R_PADDED), stride_pd, R)
            else:
                q_r = q_l[0]
            row_scale = tl.full((BLOCK_M,), 0.0, tl.float32) + score_scale
            if AHEAD and not FP8_SCORES:
                # fp8 becomes fp16 in one step, exactly; queries of a wider range are halved into fp16.
                q_l, q_r, row_scale = _in_fp16(q_l, q_r, row_scale, R, CHUNKS, Q_FORMAT, REREAD)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)

            start_key = lo * BLOCK_N
            end_key = tl.minimum(hi * BLOCK_N, seen_by_any)
            if SPARSE:
                # A block is placed by its indices.
                table = indices + seq.to(tl.int64) * stride_indices
                table_stride = stride_indices_col
            else:
                table = block_table + seq.to(tl.int64) * stride_table
                table_stride = stride_table_col
                visible = tl.minimum(visible, end_key)
            if AHEAD:
                # Values that are converted pass through registers; the next block is on its way meanwhile.
                base, offsets, valid = _placed(
                    table, table_stride, start_key, end_key, stride_page, stride_token,
                    BLOCK_N, BLOCK_SIZE, SPARSE,
                )  # fmt: skip
                block = load_block(cache + base, offsets, valid, L, R, L_PADDED, R_PADDED, CHUNKS, FORMAT)
                for key in tl.range(start_key, end_key, BLOCK_N, num_stages=1):
                    base, offsets, next_valid = _placed(
                        table, table_stride, key + BLOCK_N, end_key, stride_page, stride_token,
                        BLOCK_N, BLOCK_SIZE, SPARSE,
                    )  # fmt: skip
                    next_block = load_block(
                        cache + base, offsets, next_valid, L, R, L_PADDED, R_PADDED, CHUNKS, FORMAT
                    )
                    seen = _seen(key + offs_n, visible, valid, SPARSE, SWAP)
                    top, total, acc = _absorb(
                        q_l, q_r, block, seen, row_scale, top, total, acc, key < end_key,
                        R, CHUNKS, FORMAT, SWAP, REREAD,
                    )  # fmt: skip
                    block = next_block
                    valid = next_valid
            elif SPARSE or BLOCK_SIZE % BLOCK_N > 0:
                for key in range(start_key, end_key, BLOCK_N):
                    base, offsets, valid = _placed(
                        table, table_stride, key, end_key, stride_page, stride_token,
                        BLOCK_N, BLOCK_SIZE, SPARSE,
                    )  # fmt: skip
                    block = load_block(cache, offsets, valid, L, R, L_PADDED, R_PADDED, CHUNKS, FORMAT)
                    seen = _seen(key + offs_n, visible, valid, SPARSE, SWAP)
                    top, total, acc = _absorb(
                        q_l, q_r, block, seen, row_scale, top, total, acc, key < end_key,
                        R, CHUNKS, FORMAT, SWAP, REREAD,
                    )  # fmt: skip
            else:
                # One page a block, read one block ahead.
                page = tl.load(table + (start_key // BLOCK_SIZE) * table_stride, mask=start_key < end_key)
                for key in range(start_key, end_key, BLOCK_N):
                    after = key + BLOCK_N
                    next_page = tl.load(table + (after // BLOCK_SIZE) * table_stride, mask=after < end_key)
                    base = page.to(tl.int64) * stride_page + (key % BLOCK_SIZE) * stride_token
                    valid = key + offs_n < end_key
                    block = load_block(
                        cache + base, offs_n * stride_token, valid,
                        L, R, L_PADDED, R_PADDED, CHUNKS, FORMAT,
                    )  # fmt: skip
                    seen = _seen(key + offs_n, visible, valid, SPARSE, SWAP)
                    top, total, acc = _absorb(
                        q_l, q_r, block, seen, row_scale, top, total, acc, key < end_key,
                        R, CHUNKS, FORMAT, SWAP, REREAD,
                    )  # fmt: skip
                    page = next_page

            empty = total == 0.0
            row_lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2)
            share = tl.where(empty, 0.0, key_scale / tl.where(empty, 1.0, total))
            if whole:
                if HAS_SINKS:
                    left = sink_share(row_lse, tl.load(sinks + heads, mask=live, other=0.0))
                o_rows = out + row_at(row_tokens, heads, stride_ot, stride_oh)
                for chunk in tl.static_range(CHUNKS):
                    o_cols = chunk * WIDTH + cols
                    values = tl.trans(acc[chunk]) if SWAP else acc[chunk]
                    values = tl.where(empty[:, None], 0.0, values * share[:, None])
                    if HAS_SINKS:
                        # After the division, as `combine` does: bits depend on no other row of the tile.
                        values = values * left[:, None]
                    mask = live[:, None]
                    if L < L_PADDED:
                        mask = mask & (o_cols < L)[None, :]
                    tl.store(
                        o_rows[:, None] + o_cols[None, :] * stride_od,
                        values.to(out.dtype.element_ty),
                        mask=mask,
                    )
                if HAS_LSE:
                    tl.store(lse + row_at(row_tokens, heads, stride_lt, stride_lh), row_lse, mask=live)
            else:
                places = tl.arange(0, BLOCK_M)
                piece = slot.to(tl.int64) * BLOCK_M
                for chunk in tl.static_range(CHUNKS):
                    values = tl.trans(acc[chunk]) if SWAP else acc[chunk]
                    values = tl.where(empty[:, None], 0.0, values * share[:, None])
                    spots = places[:, None] * L_PADDED + (chunk * WIDTH + cols)[None, :]
                    tl.store(part_out + piece * L_PADDED + spots, values)
                tl.store(part_lse + piece + places, row_lse)

    if not SPARSE:
        # Rows that belong to no sequence.
        free = tl.load(qo_indptr + num_seqs)
        for step in range(program, num_tokens - free, tl.num_programs(0)):
            for head in range(num_heads):
                o_row = out + row_at(free + step, head, stride_ot, stride_oh)
                nothing = tl.zeros((WIDTH,), out.dtype.element_ty)
                for chunk in tl.static_range(CHUNKS):
                    o_cols = chunk * WIDTH + cols
                    tl.store(o_row + o_cols * stride_od, nothing, mask=o_cols < L)
                if HAS_LSE:
                    tl.store(lse + row_at(free + step, head, stride_lt, stride_lh), float("-inf"))


@triton.jit
def placed_item(
    item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
    BLOCK_M: tl.constexpr, INVARIANT: tl.constexpr, PIECES: tl.constexpr, PIECE_BLOCKS: tl.constexpr,
    SPARSE: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """What a stretch does of an item: whose rows, which key blocks lo to hi, whether alone, else its slot."""
    # All that depends on the item alone is asked for at once, before anything waits for it.
    tile = item // PIECES
    seq = tile % num_seqs
    first_row = tile // num_seqs * BLOCK_M
    item_start = tl.load(line + item)
    item_end = tl.load(line + item + 1)
    if SPARSE:
        q_start = seq
        q_len = seq * 0 + 1
        seq_len = tl.minimum(tl.load(counts + seq), num_keys) if HAS_COUNTS else seq * 0 + num_keys
    else:
        q_start = tl.load(qo_indptr + seq)
        q_len = tl.load(qo_indptr + seq + 1) - q_start
        seq_len = tl.load(seq_lens + seq)
    lo = tl.maximum(start, item_start) - item_start
    hi = tl.minimum(end, item_end) - item_start
    if not INVARIANT:
        whole = (lo == 0) & (hi == item_end - item_start)
        slot = 2 * program + (item != first_item).to(tl.int32)
    else:
        tile_start = tl.load(line + tile * PIECES)
        tile_end = tl.load(line + (tile + 1) * PIECES)
        whole = tile_end - tile_start <= PIECE_BLOCKS
        slot = item
        lo += item % PIECES * PIECE_BLOCKS
        hi += item % PIECES * PIECE_BLOCKS
    return seq, first_row, q_start, q_len, seq_len, lo, hi, whole, slot


@triton.jit
def sink_share(row_lse, sink):
    """What a sink leaves of a row: 1 / (1 + exp(sink - lse)); 0 for an empty row, 1 for a sink of -inf."""
    share = 1.0 / (1.0 + tl.exp(sink - row_lse))
    return tl.where(row_lse == float("-inf"), 0.0, share)


@triton.jit
def _load_rows(rows, live, cols, stride, WIDTH: tl.constexpr):
    return tl.load(
        rows[:, None] + cols[None, :] * stride, mask=live[:, None] & (cols < WIDTH)[None, :], other=0.0
    )


@triton.jit
def _in_fp16(
    q_l, q_r, row_scale,
    R: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr, REREAD: tl.constexpr,
):  # fmt: skip
    """Queries in fp16, each row divided by a power of two that the scale of its scores makes up for."""
    most = tl.max(tl.abs(converted(q_l[0], tl.float32, FORMAT)), 1)
    for chunk in tl.static_range(1, CHUNKS):
        most = tl.maximum(most, tl.max(tl.abs(converted(q_l[chunk], tl.float32, FORMAT)), 1))
    if R > 0:
        most = tl.maximum(most, tl.max(tl.abs(converted(q_r, tl.float32, FORMAT)), 1))
    # The exponent alone; 2^-126 for a row of zeros.
    power = (tl.maximum(most, 1.1754943508222875e-38).to(tl.int32, bitcast=True) & 0x7F800000).to(
        tl.float32, bitcast=True
    )
    divided = ()
    for chunk in tl.static_range(CHUNKS):
        half = (converted(q_l[chunk], tl.float32, FORMAT) / power[:, None]).to(tl.float16)
        divided = divided + (_of_16_bits(half, q_l[0].dtype, REREAD),)
    half = (converted(q_r, tl.float32, FORMAT) / power[:, None]).to(tl.float16) if R > 0 else divided[0]
    return divided, _of_16_bits(half, q_r.dtype, REREAD), row_scale * power


@triton.jit
def _of_16_bits(half, loaded: tl.constexpr, REREAD: tl.constexpr):
    """Queries that Triton does not see to be loaded as bytes: it would hold keys twice, in two layouts.

    Where they are reread, it would not, and the sum takes registers.
    """
    if loaded.primitive_bitwidth == 8 and not REREAD:
        return tl.sum(tl.expand_dims(half, 2), 2)
    else:
        return half


@triton.jit
def _placed(
    table, table_stride, key, end_key, stride_page, stride_token,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Where a block of keys lies: elements from the cache's start, and which keys there are."""
    keys = key + tl.arange(0, BLOCK_N)
    valid = keys < end_key
    base = tl.full((), 0, tl.int64)
    if SPARSE:
        slots = tl.load(table + keys * table_stride, mask=valid, other=-1)
        valid = slots >= 0
        slots = tl.where(valid, slots, 0)
        offsets = (slots // BLOCK_SIZE).to(tl.int64) * stride_page + (slots % BLOCK_SIZE) * stride_token
    elif BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table + (key // BLOCK_SIZE) * table_stride, mask=key < end_key, other=0)
        base = page.to(tl.int64) * stride_page
        offsets = (keys % BLOCK_SIZE) * stride_token
    else:
        pages = tl.load(table + (keys // BLOCK_SIZE) * table_stride, mask=valid, other=0)
        offsets = pages.to(tl.int64) * stride_page + (keys % BLOCK_SIZE) * stride_token
    return base, offsets, valid


@triton.jit
def _seen(keys, visible, valid, SPARSE: tl.constexpr, SWAP: tl.constexpr):
    """Which rows see which keys of a block."""
    if SPARSE:
        return valid[:, None] if SWAP else valid[None, :]
    else:
        return keys[:, None] < visible[None, :] if SWAP else keys[None, :] < visible[:, None]


@triton.jit
def _absorb(
    q_l, q_r, block, seen, row_scale, top, total, acc, more,
    R: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr, SWAP: tl.constexpr, REREAD: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the running softmax.

    The latent goes in chunks, whose products do not wait for each other. With SWAP all products are
    transposed: keys and columns stand where matrix instructions want many rows.
    """
    FP8_SCORES: tl.constexpr = q_r.dtype.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if FP8_SCORES else q_r.dtype
    if REREAD:
        # `more` is true, but only the loop knows: so queries are laid out as operands here, block by block,
        # and not once before the loop, in registers for all of them.
        again = ()
        for chunk in tl.static_range(CHUNKS):
            again = again + (tl.where(more, q_l[chunk], 0.0),)
        q_l = again
        q_r = tl.where(more, q_r, 0.0)
    k_l = ()
    for chunk in tl.static_range(CHUNKS):
        k_l = k_l + (latent_of(block, chunk, dtype, R, CHUNKS, FORMAT),)
    keys = block if FP8_SCORES else k_l
    if R > 0:
        k_r = block[CHUNKS] if FP8_SCORES else rope_of(block, dtype, CHUNKS, FORMAT)
        scores = _product(q_r, k_r, SWAP)
        for chunk in tl.static_range(CHUNKS):
            scores += _product(q_l[chunk], keys[chunk], SWAP)
    else:
        scores = _product(q_l[0], keys[0], SWAP)
        for chunk in tl.static_range(1, CHUNKS):
            scores += _product(q_l[chunk], keys[chunk], SWAP)
    AXIS: tl.constexpr = 0 if SWAP else 1
    scores = tl.where(seen, scores * tl.expand_dims(row_scale, AXIS), float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, AXIS))
    # A row that has seen nothing yet would subtract -inf from -inf.
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - tl.expand_dims(floor, AXIS))
    decay = tl.exp2(top - floor)
    total = total * decay + tl.sum(weights, AXIS)
    decay = tl.expand_dims(decay, AXIS)
    weights = weights.to(dtype)
    new_acc = ()
    for chunk in tl.static_range(CHUNKS):
        if SWAP:
            part = tl.dot(tl.trans(k_l[chunk]), weights, acc[chunk] * decay, input_precision="ieee")
        else:
            part = tl.dot(weights, k_l[chunk], acc[chunk] * decay, input_precision="ieee")
        new_acc = new_acc + (part,)
    return new_top, total, new_acc


@triton.jit
def _product(q, k, SWAP: tl.constexpr):
    if SWAP:
        return tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")
