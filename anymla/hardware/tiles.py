"""Which launch row a call takes, from its widths and the chip alone, for plans, `explain` and the audit."""

from collections.abc import Callable

from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import Launch, launch_rows


def attend_row(
    arch: str,
    rows: int,
    latent: int,
    rope: int,
    kv_format: str,
    block_size: int,
    *,
    sparse: bool = False,
    element_bytes: int = 2,
    refuses: Callable[[Launch], object] = lambda row: None,
) -> Launch:
    """The row that attention takes: of those that fit on the chip the first whose tile holds the rows.

    Args:
        arch: The chip.
        rows: Rows of a sequence that share its keys: query tokens times heads, or heads where the split must
            not depend on the number of tokens.
        latent: kv_lora_rank.
        rope: qk_rope_head_dim.
        kv_format: Of the cache.
        block_size: Tokens of a page.
        sparse: Whether keys are given one by one.
        element_bytes: Of a query's element as it is multiplied.
        refuses: True, or a reason, for rows that do not take the call for another cause.

    Returns:
        The row; where no tile is that large, the first of the largest.
    """
    room, vendor = (ARCHES[arch].shared_bytes, ARCHES[arch].vendor) if arch in ARCHES else (0, "")
    fits = [
        row
        for row in launch_rows("attend", arch)
        if not refuses(row)
        and _kernel_takes(row, vendor, latent, rope, kv_format, sparse or block_size % row.block_n != 0)
        and (not room or attend_shared_bytes(row, arch, latent, rope, element_bytes) <= room)
    ]
    if not any(row.kernel for row in fits) and any(row.kernel for row in launch_rows("attend", arch)):
        # Of widths without a kernel of their own the compiler keeps small blocks alone in registers.
        fits = [row for row in fits if row.block_n == min(each.block_n for each in fits)]
    assert fits, f"no launch row of attend takes {rows} rows of {latent} + {rope} on {arch}"
    apart = sparse or block_size % max(row.block_n for row in fits) != 0
    most = max(row.block_m for row in fits)
    fits = [row for row in fits if row.block_m >= min(rows, most)]
    if apart or kv_format.startswith("fp8"):
        # What a warpgroup of its own gathers or converts costs the others nothing, however few the rows.
        fits = [row for row in fits if row.kernel] or fits
    return fits[0]


def _kernel_takes(row: Launch, vendor: str, latent: int, rope: int, kv_format: str, apart: bool) -> bool:
    """Whether a row's kernel has layouts, and registers, for these widths, this format and where keys lie."""
    takes = {
        "attend_swapped": kv_format in ("bf16", "fp16") and not apart,
        "attend_bytes": kv_format == "fp8_e4m3fn" and rope != 16,
        # Tiled rows of 256 values have 392 bytes, no multiple of 16.
        "attend_wgmma": kv_format != "fp32"
        and "fnuz" not in kv_format
        and (latent == 512 or not kv_format.startswith("fp8_ds_mla")),
    }
    if row.kernel:
        return takes[row.kernel] and latent in (256, 512) and rope in (0, 16, 32, 64, 128)
    # Rows that cannot be copied 16 bytes at a time pass through registers.
    return row.block_m == 16 or vendor != "nvidia" or not _uneven(latent, rope)


def _uneven(latent: int, rope: int) -> bool:
    """Whether rows of these widths lie anyhow."""
    return bool(latent % 16 or rope % 16)


def attend_shared_bytes(row: Launch, arch: str, latent: int, rope: int, element_bytes: int = 2) -> int:
    """The most on-chip bytes of a program of attention; the audit holds it against what compilers lay out.

    AMD keeps queries in registers, and operands pass through LDS in chunks. Elsewhere the block in use has
    left the buffers of those in flight, except where a warpgroup multiplies from them.
    """
    uneven = _uneven(latent, rope)
    latent, rope = padded(latent, row.chunk), padded(rope)
    block, weights = row.block_n * (latent + rope), row.block_m * row.block_n
    if arch in ARCHES and ARCHES[arch].vendor == "amd":
        # Sums, in fp32, pass only where they have to be transposed.
        passing = max(row.block_m, row.block_n) * min(row.chunk, latent) * (2 if row.swap else 1)
        return element_bytes * max((row.num_stages - 1) * block + weights, passing)
    if row.kernel == "attend_bytes":
        # Queries, sums of every row and what is written of them at a time, weights; keys as bytes; barriers.
        keys = row.num_stages * row.block_n * (latent + max(rope, 32))
        return 2 * row.block_m * (3 * latent + max(rope, 32) + 2 * 128 + 2 * row.block_n) + keys + 512
    if row.kernel == "attend_wgmma":
        # Weights take the room of RoPE parts as large; maxima, sums and barriers beside.
        weights = 0 if rope == row.block_n else 2 * weights
        return element_bytes * (row.block_m * (latent + rope) + 2 * block + weights) + 32 * row.block_m
    in_flight = row.num_stages if row.kernel or row.block_m >= 64 else max(row.num_stages - 1, 1)
    # Four warps' maxima and barriers; elsewhere where each key lies.
    beside = 16 * row.block_m + 32 if row.kernel else 4 * row.block_n * in_flight
    held = element_bytes * (row.block_m * (latent + rope) + in_flight * block + weights) + beside
    # What passes through registers is laid out anew.
    passing = element_bytes * (2 * row.block_n * latent + row.block_m * rope)
    return max(held, passing) if uneven else held


def prefill_row(
    arch: str, q_len: int, nope: int, rope: int, value: int, element_bytes: int = 2, *, largest: bool = False
) -> Launch:
    """The row that prefill takes: of those for these widths the smallest tile that holds the query tokens.

    Args:
        arch: The chip.
        q_len: The most query tokens of a sequence.
        nope: qk_nope_head_dim.
        rope: qk_rope_head_dim.
        value: v_head_dim.
        element_bytes: Of an element.
        largest: Whether tiles must not depend on the batch: then the largest, always.

    Returns:
        The row; where no tile is that large, the largest.
    """
    room = ARCHES[arch].shared_bytes if arch in ARCHES else 0
    widest = max(prefill_widths(nope, rope, value))
    fits = [
        row
        for row in launch_rows("prefill", arch)
        if row.widest >= widest
        and (not room or prefill_shared_bytes(row, arch, nope, rope, value, element_bytes) <= room)
    ]
    assert fits, f"no launch row of prefill takes {nope} + {rope} / {value} on {arch}"
    narrowest = min(row.widest for row in fits)
    fits = [row for row in fits if row.widest == narrowest]
    enough = [] if largest else [row for row in fits if row.block_m >= q_len]
    return enough[0] if enough else fits[-1]


def prefill_shared_bytes(
    row: Launch, arch: str, nope: int, rope: int, value: int, element_bytes: int = 2
) -> int:
    """The on-chip bytes of a program, as the compiler has been seen to lay them out.

    AMD keeps queries in registers and one block less than the stages in LDS; sums pass through it when they
    are kept. Elsewhere queries and every stage are in shared memory.
    """
    key_width, value_width = prefill_widths(nope, rope, value)
    block, weights = row.block_n * (key_width + value_width), row.block_m * row.block_n
    if arch in ARCHES and ARCHES[arch].vendor == "amd":
        sums = 4 * row.block_m * chunked(value)[0]
        return max(element_bytes * (max(row.num_stages - 1, 1) * block + weights), sums)
    return element_bytes * (row.block_m * key_width + row.num_stages * block)


def prefill_widths(nope: int, rope: int, value: int) -> tuple[int, int]:
    """Columns of a key and of a value as they are multiplied."""
    (nope_chunk, nope_chunks), (value_chunk, value_chunks) = chunked(nope), chunked(value)
    return nope_chunk * nope_chunks + (padded(rope) if rope else 0), value_chunk * value_chunks


def chunked(width: int) -> tuple[int, int]:
    """Width and number of the chunks in which so many columns are multiplied, with little to mask."""
    for chunk in (128, 64, 32):
        if width % chunk == 0:
            return chunk, width // chunk
    return (64, -(-width // 64)) if width > 128 else (padded(width), 1)


def padded(width: int, chunk: int = 0) -> int:
    """The width that a kernel works in: whole chunks, or one power of two from 16 on."""
    if chunk and width % chunk == 0:
        return width
    return max(16, 1 << (width - 1).bit_length())
