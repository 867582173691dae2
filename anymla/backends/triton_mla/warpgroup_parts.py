"""Device code that the kernels of several warpgroups share: items, keys, and what belongs to no sequence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from anymla.backends.triton_mla import attend, keys

placed_item = gluon.jit(attend.placed_item.fn)
row_at = gluon.jit(keys.row_at.fn)
sink_share = gluon.jit(attend.sink_share.fn)

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def write_free_rows(
    qo_indptr, out, lse, num_tokens, num_seqs, num_heads,
    stride_ot, stride_oh, stride_od, stride_lt, stride_lh, L: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Rows that belong to no sequence."""
    cols_at: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, L, cols_at)
    free = gl.load(qo_indptr + num_seqs)
    for step in range(gl.program_id(0), num_tokens - free, gl.num_programs(0)):
        for head in range(num_heads):
            o_row = out + row_at(free + step, head, stride_ot, stride_oh)
            gl.store(o_row + cols * stride_od, gl.zeros([L], out.dtype.element_ty, cols_at))
            if HAS_LSE:
                gl.store(lse + row_at(free + step, head, stride_lt, stride_lh), float("-inf"))


@gluon.jit
def key_span(
    lo, hi, seq_len, q_len, first_row, num_heads, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """The keys of an item, from and to, as far as any of its rows sees."""
    seen_by_any = seq_len
    if CAUSAL and not SPARSE:
        last_token = gl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
        seen_by_any = gl.maximum(seq_len - q_len + 1 + last_token, 0)
    return lo * BLOCK_N, gl.minimum(hi * BLOCK_N, seen_by_any)


@gluon.jit
def page_of(
    table, stride, key, end_key,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, BOXES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of a block of keys, or of each key; a sparse block's slots."""
    if BOXES:
        return gl.load(table + (key // BLOCK_SIZE) * stride, mask=key < end_key, other=0)
    else:
        keys_now = key + gl.arange(0, BLOCK_N, LAYOUT)
        if SPARSE:
            return gl.load(table + keys_now * stride, mask=keys_now < end_key, other=-1)
        else:
            return gl.load(table + keys_now // BLOCK_SIZE * stride, mask=keys_now < end_key, other=0)


@gluon.jit
def rows_of(
    cache, page, key, end_key, stride_page, stride_token,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the rows of a block of keys begin, and which there are: the others become zeros, not read."""
    if SPARSE:
        valid = page >= 0
        slots = gl.where(valid, page, 0)
        offsets = (slots // BLOCK_SIZE).to(gl.int64) * stride_page + (slots % BLOCK_SIZE) * stride_token
    else:
        keys_now = key + gl.arange(0, BLOCK_N, LAYOUT)
        valid = keys_now < end_key
        offsets = page.to(gl.int64) * stride_page + (keys_now % BLOCK_SIZE) * stride_token
    return (cache + offsets)[:, None], valid[:, None]


@gluon.jit
def announce(bar, COPIED: gl.constexpr):
    """Let the readers go on, once all that was brought is there."""
    if COPIED:
        # Every copying thread adds itself to those that the barrier waits for.
        async_copy.mbarrier_arrive(bar, increment_count=True)
    else:
        fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def bring(
    to, rows, first, stride, valid,
    WIDTH: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Columns of some rows; those of rows that are not there become zeros, not read."""
    cols_at: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if COPIED:
        cols = first + gl.arange(0, WIDTH, cols_at)
        async_copy.async_copy_global_to_shared(to, rows + cols[None, :], mask=valid)
    else:
        # Views whose rows lie anyhow pass through registers, a few columns at a time.
        STEP: gl.constexpr = min(WIDTH, 32)
        for at in gl.static_range(0, WIDTH, STEP):
            cols = first + at + gl.arange(0, STEP, cols_at)
            values = gl.load(rows + cols[None, :] * stride, mask=valid, other=0.0)
            to.slice(at, STEP, 1).store(values.to(to.dtype))
