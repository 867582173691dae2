"""Absorption: what turns per-head keys and values into one shared latent, and back.

T query tokens, H heads, P = qk_nope_head_dim, L = kv_lora_rank, V = v_head_dim, S tokens of latent.

A grouped-query model with G key-value heads of width d is MLA, exactly: the latent of a token is its keys and
values of all heads side by side, L = 2·G·d, there is no RoPE part (the keys are rotated already), and the
up-projections are selections of one block. Nothing is approximated, since every product is with 1 or 0.
"""

import torch
from torch import Tensor

from anymla.arguments import check_count, check_device, shown
from anymla.contract import check_tensor
from anymla.errors import Reasons
from anymla.problem import count_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def absorb_q(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Carry the queries through W_UK into the space of the latent, so that keys need no up-projection.

    Args:
        q_nope: [T, H, P] queries without their RoPE part.
        w_uk: [H, P, L], same dtype. From `split_kv_b`.

    Returns:
        ql_nope [T, H, L], same dtype. [0, H, L] for no tokens.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """
    return _per_head("absorb_q", "q_nope", q_nope, "w_uk", w_uk, "H, P from q_nope")


def project_v(out: Tensor, w_uv: Tensor) -> Tensor:
    """Carry the latent output through W_UV into each head's values.

    Args:
        out: [T, H, L] latent output of a decode.
        w_uv: [H, L, V], same dtype. From `split_kv_b`.

    Returns:
        [T, H, V], same dtype. [0, H, V] for no tokens.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """
    return _per_head("project_v", "out", out, "w_uv", w_uv, "H, L from out")


def split_kv_b(
    weight: Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Tensor, Tensor]:
    """Split the weight of kv_b_proj into its key and value halves.

    Args:
        weight: [H·(P + V), L], each head's P key rows before its V value rows.
        num_heads: H.
        qk_nope_head_dim: P.
        v_head_dim: V.

    Returns:
        w_uk [H, P, L] and w_uv [H, L, V], contiguous copies of the same dtype.

    Raises:
        InvalidInput: the weight does not have H·(P + V) rows, or a number is not positive.

    Source: modeling_deepseek_v2, kv_b_proj.
    """
    reasons = Reasons("split_kv_b")
    num_heads = check_count(reasons, "num_heads", num_heads)
    qk_nope_head_dim = check_count(reasons, "qk_nope_head_dim", qk_nope_head_dim)
    v_head_dim = check_count(reasons, "v_head_dim", v_head_dim)
    # A number that is none says nothing of the rows.
    rows = None if reasons.found else num_heads * (qk_nope_head_dim + v_head_dim)
    check_tensor(
        reasons, "weight", weight, (rows, None), DTYPES, origin="num_heads * (qk_nope_head_dim + v_head_dim)"
    )
    reasons.raise_if_any()
    per_head = weight.reshape(num_heads, qk_nope_head_dim + v_head_dim, weight.shape[1])
    w_uk, w_uv = torch.split(per_head, [qk_nope_head_dim, v_head_dim], dim=1)
    return w_uk.contiguous(), w_uv.transpose(1, 2).contiguous()


def block_selectors(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """The up-projections of a grouped-query model seen as MLA: each picks one head's block of the latent.

    Args:
        num_heads: H.
        num_kv_heads: G, which divides H; head h uses key-value head h // (H / G).
        head_dim: d, of keys and of values.
        dtype: Of the result.
        device: Of the result.

    Returns:
        w_uk [H, d, 2·G·d] and w_uv [H, 2·G·d, d] of zeros and ones.

    Raises:
        InvalidInput: the heads do not divide, or a number is not positive.
    """
    reasons = Reasons("block_selectors")
    num_heads = check_count(reasons, "num_heads", num_heads)
    if not reasons.found:
        num_kv_heads = _check_groups(reasons, num_heads, num_kv_heads)
    head_dim = check_count(reasons, "head_dim", head_dim)
    reasons.need(
        isinstance(dtype, torch.dtype) and dtype in DTYPES,
        "dtype",
        shown(dtype),
        " or ".join(map(str, DTYPES)),
    )
    device = check_device(reasons, device)
    reasons.raise_if_any()
    identity = torch.eye(head_dim, dtype=dtype, device=device).expand(num_heads, -1, -1).transpose(0, 1)
    w_uk = absorb_gqa(identity, num_kv_heads).transpose(0, 1)
    w_uv = w_uk.roll(num_kv_heads * head_dim, dims=2).transpose(1, 2)
    return w_uk.contiguous(), w_uv.contiguous()


def absorb_gqa(q: Tensor, num_kv_heads: int) -> Tensor:
    """Put each query where its key-value head's keys stand in the latent: `absorb_q` with `block_selectors`.

    Args:
        q: [T, H, d] queries, rotated.
        num_kv_heads: G, which divides H.

    Returns:
        ql_nope [T, H, 2·G·d], zero outside the block, same dtype. Its q_pe is [T, H, 0].

    Raises:
        InvalidInput: q is not [T, H, d], or the heads do not divide.
    """
    reasons = Reasons("absorb_gqa")
    if check_tensor(reasons, "q", q, (None, None, None), DTYPES):
        num_kv_heads = _check_groups(reasons, q.shape[1], num_kv_heads)
    reasons.raise_if_any()
    group, head_dim = q.shape[1] // num_kv_heads, q.shape[2]
    absorbed = q.new_zeros(q.shape[0], q.shape[1], 2 * num_kv_heads * head_dim)
    for g in range(num_kv_heads):
        heads = slice(g * group, (g + 1) * group)
        absorbed[:, heads, g * head_dim : (g + 1) * head_dim] = q[:, heads]
    return absorbed


def project_gqa(out: Tensor, num_kv_heads: int) -> Tensor:
    """Take each head's values out of the latent output: `project_v` with `block_selectors`.

    Args:
        out: [T, H, 2·G·d] latent output of a decode.
        num_kv_heads: G, which divides H.

    Returns:
        [T, H, d], same dtype.

    Raises:
        InvalidInput: out is not [T, H, 2·G·d], or the heads do not divide.
    """
    reasons = Reasons("project_gqa")
    if check_tensor(reasons, "out", out, (None, None, None), DTYPES):
        num_kv_heads = _check_groups(reasons, out.shape[1], num_kv_heads)
        whole = bool(reasons.found) or (out.shape[2] > 0 and out.shape[2] % (2 * num_kv_heads) == 0)
        reasons.need(
            whole, "out", f"width {out.shape[2]}", f"a multiple of {2 * num_kv_heads}, 2 * num_kv_heads"
        )
    reasons.raise_if_any()
    tokens, heads, width = out.shape
    shape = tokens, num_kv_heads, heads // num_kv_heads, num_kv_heads, width // (2 * num_kv_heads)
    values = out[:, :, width // 2 :].view(shape)
    return torch.stack([values[:, g, :, g] for g in range(num_kv_heads)], dim=1).flatten(1, 2)


def gqa_latent(k: Tensor, v: Tensor) -> Tensor:
    """The latent of a grouped-query model: keys, then values.

    Args:
        k: [S, G, d] keys, rotated.
        v: [S, G, d], same dtype.

    Returns:
        kv_c [S, 2·G·d], same dtype. Its k_pe is [S, 0].

    Raises:
        InvalidInput: k or v is not [S, G, d], or they differ.
    """
    reasons = Reasons("gqa_latent")
    if check_tensor(reasons, "k", k, (None, None, None), DTYPES):
        check_tensor(reasons, "v", v, tuple(k.shape), (k.dtype,), k.device, "from k")
    reasons.raise_if_any()
    return torch.cat((k.flatten(1), v.flatten(1)), -1)


def _per_head(what: str, x_name: str, x: Tensor, w_name: str, w: Tensor, origin: str) -> Tensor:
    """[T, H, A] times [H, A, B], head by head: [T, H, B]."""
    reasons = Reasons(what)
    if check_tensor(reasons, x_name, x, (None, None, None), DTYPES):
        check_tensor(reasons, w_name, w, (x.shape[1], x.shape[2], None), (x.dtype,), x.device, origin)
    reasons.raise_if_any()
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def _check_groups(reasons: Reasons, num_heads: int, num_kv_heads: object) -> int:
    """G, noting key-value heads that do not divide the heads."""
    count = count_of(num_kv_heads) or 0
    right = count > 0 and num_heads > 0 and num_heads % count == 0
    reasons.need(right, "num_kv_heads", shown(num_kv_heads), f"a divisor of {num_heads}, the heads")
    return count
