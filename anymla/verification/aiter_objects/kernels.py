"""KERNELS: AITER's decode kernels that the emulator is known to run, a row a code object."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """What a code object is launched with. A row of KERNELS.

    Attributes:
        name: Of the code object, without .co.
        q, kv: bf16 or fp8, of the queries and the cache.
        heads: Heads that it is given.
        q_len: Query tokens a sequence that it is tried with.
        rows: Rows (heads times query tokens) of a workgroup; 0 for a persistent kernel.
        step: Keys that AITER's second stage takes for the least of a split; 0 for a persistent kernel.
        told_heads: Whether it is told the number of heads, where others are told that of rows.
        chips: Where it is tried.
    """

    name: str
    q: str
    kv: str
    heads: int
    q_len: int
    rows: int = 0
    step: int = 0
    told_heads: bool = False
    chips: tuple[str, ...] = ("gfx942", "gfx950")

    @property
    def persistent(self) -> bool:
        """Whether its workgroups walk a plan."""
        return not self.rows

    def __str__(self) -> str:
        mode = "persistent" if self.persistent else "rows"
        return f"{self.q} × {self.kv}, {self.heads} heads, {self.q_len} query tokens, {mode}: {self.name}"


_942, _950 = ("gfx942",), ("gfx950",)
_OLD_32, _OLD_64 = (f"MLA_A16W16_1TG_4W_{m}mx1_16nx1_Coex0_Msk1_QH16" for m in (32, 64))
_NEW_32 = "MLA_A16W16_1TG_4W_16mx4_32nx1_Coex0_Msk1_QH16"

KERNELS: tuple[Kernel, ...] = (
    Kernel("mla_dec_stage1_bf16_a16w16_subQ16_mqa16", "bf16", "bf16", 16, 1, 16, 64),
    Kernel("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1", "bf16", "bf16", 16, 4, 128, 16),
    Kernel("mla_a16w16_qh16_m32x4_n16x1_coex0_mask1", "bf16", "bf16", 16, 8, 128, 16),
    Kernel("mla_a16w16_qh8_qseqlen1_gqaratio8_v3", "bf16", "bf16", 8, 1, 8, 64),
    Kernel(
        "mla_a16w16_qh8_qseqlen2_gqaratio8_causal", "bf16", "bf16", 8, 2, 16, 64, told_heads=True, chips=_950
    ),
    Kernel(_OLD_32, "bf16", "bf16", 32, 1, 64, 16),
    Kernel(_NEW_32, "bf16", "bf16", 32, 1, 64, 16, chips=_950),
    Kernel(_OLD_64, "bf16", "bf16", 64, 1, 64, 16, chips=_942),
    Kernel(_OLD_64, "bf16", "bf16", 64, 2, 64, 16, chips=_950),
    Kernel("mla_a16w16_qh64_qseqlen1_gqaratio64_v3", "bf16", "bf16", 64, 1, 64, 32, chips=_950),
    Kernel("mla_a16w16_qh64_qseqlen1_gqaratio64_lse_v3", "bf16", "bf16", 64, 1, 64, 32, chips=_950),
    Kernel("mla_dec_stage1_bf16_a16w16_subQ128_mqa128", "bf16", "bf16", 128, 1, 128, 16),
    Kernel("mla_a8w8_qh8_qseqlen1_gqaratio8_v1", "fp8", "fp8", 8, 1, 8, 64, chips=_942),
    Kernel("mla_a8w8_qh8_qseqlen1_gqaratio8_v3", "fp8", "fp8", 8, 1, 8, 64, chips=_950),
    Kernel("mla_a8w8_qh16_qseqlen1_gqaratio16", "fp8", "fp8", 16, 1, 128, 64),
    Kernel("mla_a8w8_qh16_qseqlen2_gqaratio16", "fp8", "fp8", 16, 2, 128, 16),
    Kernel("mla_a8w8_qh64_qseqlen4_gqaratio16", "fp8", "fp8", 16, 4, 64, 16),
    Kernel("mla_a8w8_qh128_m32x4_n16x2_msk1", "fp8", "fp8", 128, 1, 128, 32),
    Kernel("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", "bf16", "bf16", 16, 1),
    Kernel("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", "bf16", "bf16", 16, 4),
    Kernel("mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_lse_ps", "bf16", "bf16", 16, 1, chips=_950),
    Kernel("mla_dec_stage1_bf16_a16w16_subQ16_mqa16_ps", "bf16", "bf16", 8, 2, chips=_942),
    *(
        Kernel(f"mla_a16w16_{shape}{lse}{end}", "bf16", "bf16", heads, q_len, told_heads=True, chips=_950)
        for shape, end, heads, q_len in (
            ("qh64_qseqlen1_gqaratio64", "_v3_ps", 64, 1),
            ("qh64_qseqlen1_gqaratio64", "_v3_ps", 32, 1),
            ("qh32_qseqlen4_gqaratio32", "_ps", 32, 4),
            ("qh32_qseqlen4_gqaratio32", "_ps", 128, 1),
        )
        for lse in ("", "_lse")
    ),
    Kernel("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps", "bf16", "fp8", 16, 1),
    Kernel("mla_a8w8_qh16_qseqlen1_gqaratio16_ps", "fp8", "fp8", 16, 1),
    Kernel("mla_a8w8_qh16_qseqlen1_gqaratio16_lse_ps", "fp8", "fp8", 16, 1, chips=_950),
    Kernel("mla_a8w8_qh16_qseqlen2_gqaratio16_ps", "fp8", "fp8", 16, 2),
    Kernel("mla_a8w8_qh64_qseqlen4_gqaratio16_ps", "fp8", "fp8", 16, 4, chips=_942),
    Kernel("mla_a8w8_qh64_qseqlen1_gqaratio64_v3_ps", "fp8", "fp8", 64, 1, chips=_942),
    Kernel("mla_a8w8_qh64_qseqlen1_gqaratio64_lse_v3_ps", "fp8", "fp8", 64, 1, chips=_942),
    Kernel("mla_a8w8_qh128_m32x4_n16x2_msk0_ps", "fp8", "fp8", 128, 1, chips=_942),
    Kernel("mla_a8w8_qh128_m32x4_n16x2_msk0_lse_ps", "fp8", "fp8", 128, 1, chips=_950),
    *(
        Kernel(f"mla_a8w8_{shape}{lse}{end}", "fp8", "fp8", heads, q_len, told_heads=alone, chips=_950)
        for shape, end, heads, q_len, alone in (
            ("qh16_qseqlen4_gqaratio16", "_v3_ps", 16, 4, True),
            ("qh32_qseqlen1_gqaratio32", "_ps", 32, 1, False),
            ("qh32_qseqlen4_gqaratio32", "_ps", 32, 4, True),
            ("qh32_qseqlen4_gqaratio8", "_ps", 8, 4, False),
            ("qh32_qseqlen2_gqaratio32", "_v3_ps", 32, 2, False),
            ("qh64_qseqlen1_gqaratio64", "_v3_ps", 64, 1, False),
            ("qh64_qseqlen4_gqaratio16", "_ps", 16, 4, False),
        )
        for lse in ("", "_lse")
    ),
)
"""Source: AITER at e4048607 and before, asm_mla.cu (rows of a workgroup) and mla.py (keys of a split)."""

NOT_TRIED = {
    "_pfl_": "a prefill kernel",
    "_msk0": "it masks no key, and another runs calls of one token",
    "_cprr": "it is for context parallel ranks in turn",
    "_page": "it reads pages of several tokens",
    "_ds32": "it reads rows of another format",
    "_v40": "it is of another model",
}
"""Parts of the names of code objects that are not run, and why."""


def why_not(name: str, chip: str) -> str:
    """Why a code object is not run; "" for one that has a row."""
    if any(kernel.name == name and chip in kernel.chips for kernel in KERNELS):
        return ""
    return next((why for part, why in NOT_TRIED.items() if part in name), "it has no row in KERNELS")
