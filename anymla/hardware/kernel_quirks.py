"""KERNEL_QUIRKS: what single kernels of AITER get wrong. Each row refuses one or sets one knob, and cites."""

from typing import NamedTuple

from anymla.hardware.quirks import Quirk
from anymla.rules import ANY, Between, Rule, asks, one_of


class KernelCall(NamedTuple):
    """One way to run AITER's decode, as its quirks see it.

    Attributes:
        q: bf16 or fp8, the dtype of the queries.
        kv: bf16 or fp8, that of the cache.
        lanes: Heads that the kernel is given, padding included.
        fold: Groups of heads that become rows of their own; 1 where none do.
        q_len: Query tokens a sequence.
        persistent: Whether workgroups walk a plan; else each row of the batch has its own.
        lse: Whether an lse is needed, be it for sinks.
        lse_from: Where one comes from; see aiter_mla.facts.Dispatch.
        in_order: Whether folded heads keep the order of several query tokens.
        kernel: Name of the code object.
        digest: What its bytes are known by; see aiter_mla.facts.
        was_run: Whether these bytes were run by us, be it on the emulator.
        reaches_far: Whether they were seen to find keys beyond 4 GiB.
        told_heads: Whether the kernel is told the number of heads, where others are told that of rows.
        step: Keys that AITER's second stage takes for the least of a split; 0 where a plan says.
        whole_tails: Whether a plan never cuts off fewer keys than there are query tokens.
        switches: Environment variables of AITER that are set.
    """

    q: str
    kv: str
    lanes: int
    fold: int
    q_len: int
    persistent: bool
    lse: bool
    lse_from: str
    in_order: bool
    kernel: str
    digest: str
    was_run: bool
    reaches_far: bool
    told_heads: bool
    step: int
    whole_tails: bool
    switches: frozenset[str] = frozenset()


_CDNA = one_of("gfx942", "gfx950")
_ROWS, _PERSISTENT, _LSE, _BF16, _FP8 = (
    one_of(False),
    one_of(True),
    one_of(True),
    one_of("bf16"),
    one_of("fp8"),
)
_MANY, _FOLDED = Between(2, 8), Between(2, 8)
_EMULATED = "emulated: AITER's code objects at e4048607, run on a CDNA emulator"
_OLD = "emulated: AITER's code objects before 0.1.17, run on a CDNA emulator"
_VLLM = "vLLM 0.33, vllm/_aiter_ops.py, rocm_aiter_mla_decode_fwd_lse"
_OLD_64 = "MLA_A16W16_1TG_4W_64mx1_16nx1_Coex0_Msk1_QH16"
_OLD_32 = "MLA_A16W16_1TG_4W_32mx1_16nx1_Coex0_Msk1_QH16"
_NEW_32 = "MLA_A16W16_1TG_4W_16mx4_32nx1_Coex0_Msk1_QH16"
_RANDOM_NAN = one_of(
    "643938cae2fa", "63922638d549", "d5d5936458ee", "1da580e3e228", "793d0a352086", "1b5fb1eb9541"
)
_128 = "mla_dec_stage1_bf16_a16w16_subQ128_mqa128"
_FP8_SEVERAL = one_of("mla_a8w8_qh16_qseqlen2_gqaratio16", "mla_a8w8_qh128_m32x4_n16x2_msk1")


def _kernel(
    arch: Rule,
    source: str,
    *,
    refuse: str = "",
    knob: str = "",
    value: int = 0,
    **when: Rule,
) -> Quirk:
    """A row of KERNEL_QUIRKS."""
    return Quirk("aiter", arch, source, when, refuse, knob, value)


KERNEL_QUIRKS: tuple[Quirk, ...] = (
    _kernel(
        _CDNA,
        "AITER mla.py up to 0.1.12.post2 and asm_mla.cu up to 0.1.11.post1: no kernel is given the buffer",
        refuse="this AITER returns an lse that nothing wrote",
        lse=_LSE,
        lse_from=one_of("garbage"),
    ),
    _kernel(
        one_of("gfx942"),
        "AITER hsa/gfx942/mla at e4048607: one kernel, fp8 with 64 heads; #4363 reports that it faults",
        refuse="persistent kernels write no lse on gfx942",
        lse=_LSE,
        persistent=_PERSISTENT,
    ),
    _kernel(
        _CDNA,
        f"{_VLLM}, for gfx942; {_EMULATED}, both chips",
        knob="min_num_kv_splits",
        value=2,
        lse=_LSE,
        persistent=_ROWS,
        q=_FP8,
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: with one split the kernels of 16 (4 tokens), 64 and 128 heads write no lse",
        knob="min_num_kv_splits",
        value=2,
        lse=_LSE,
        persistent=_ROWS,
        q=_BF16,
        lanes=one_of(8, 16, 64, 128),
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: with one split the kernel writes fp32 into the bf16 output, past its end",
        knob="min_num_kv_splits",
        value=2,
        persistent=_ROWS,
        q=_BF16,
        lanes=one_of(8),
    ),
    _kernel(
        one_of("gfx942"),
        f"{_EMULATED}: with one split the kernel stores through a pointer that is null",
        knob="min_num_kv_splits",
        value=2,
        persistent=_ROWS,
        kernel=one_of(_OLD_32),
    ),
    _kernel(
        one_of("gfx950"),
        "github.com/ROCm/aiter #2983, fixed by another object in 0.1.15; emulated: a store through null",
        refuse="this AITER's kernel of 32 heads faults",
        persistent=_ROWS,
        kernel=one_of(_OLD_32),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_VLLM}: ragged tails are wrong; {_EMULATED}: tiles of 32 keys, merged as if of 16",
        knob="num_kv_splits",
        value=1,
        persistent=_ROWS,
        kernel=one_of(_NEW_32),
    ),
    _kernel(
        _CDNA,
        f"AITER op_tests/test_mla.py skips it: 'faults'; {_EMULATED}: a store through null, row 0 not masked",
        refuse="AITER's bf16 kernel of 64 heads faults",
        persistent=_ROWS,
        kernel=one_of(_OLD_64),
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: every query token sees all keys of its sequence, of tokens after it too",
        refuse="AITER's bf16 kernel of 128 heads is not causal between query tokens",
        kernel=one_of(_128),
        q_len=_MANY,
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: not causal between query tokens, and of 2 tokens it writes one",
        refuse="AITER's older bf16 kernel of 32 heads is wrong for several tokens",
        kernel=one_of(_OLD_32),
        q_len=_MANY,
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: where two tiles are masked, the address of the next keys is overwritten by the mask's",
        refuse="AITER's bf16 kernel of 32 heads is wrong for 3 tokens and more",
        kernel=one_of(_NEW_32),
        q_len=Between(3, 8),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: 16 rows share a mask, so heads of one token see keys as the next token does",
        refuse="AITER's bf16 kernel of 64 heads is wrong for 24 heads and several tokens",
        kernel=one_of(
            "mla_a16w16_qh64_qseqlen1_gqaratio64_v3_ps", "mla_a16w16_qh64_qseqlen1_gqaratio64_lse_v3_ps"
        ),
        lanes=one_of(24),
        q_len=_MANY,
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: splits are read of which a token has nothing, which AITER's own number avoids",
        knob="num_kv_splits",
        value=1,
        kernel=_FP8_SEVERAL,
        q_len=_MANY,
        lse=one_of(False),
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: splits are read of which a token has nothing, and one split gives no lse",
        refuse="AITER's fp8 kernel of several tokens gives no right lse",
        kernel=_FP8_SEVERAL,
        q_len=_MANY,
        lse=_LSE,
    ),
    _kernel(
        one_of("gfx942"),
        f"{_EMULATED}: the scale of the cache goes into the logits and not into the output",
        refuse="this kernel of AITER leaves the cache's scale out of its output",
        kernel=one_of("mla_a8w8_qh8_qseqlen1_gqaratio8_v1", "mla_a8w8_qh64_qseqlen4_gqaratio16_ps"),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: tiles of 128 keys, merged as if of 64, so splits are read that were never written",
        knob="num_kv_splits",
        value=1,
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(16),
        q_len=one_of(1),
        lse=one_of(False),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: two splits are merged wrongly, and with one the kernel writes no lse",
        refuse="AITER's fp8 kernel of 16 heads gives no right lse",
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(16),
        q_len=one_of(1),
        lse=_LSE,
    ),
    _kernel(
        one_of("gfx942"),
        f"{_EMULATED}: tiles of 32 keys, merged as if of 16, so splits are read that were never written",
        knob="num_kv_splits",
        value=1,
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(16),
        q_len=Between(3, 4),
        lse=one_of(False),
    ),
    _kernel(
        one_of("gfx942"),
        f"{_EMULATED}: two splits are merged wrongly, and with one the kernel writes no lse",
        refuse="AITER's fp8 kernel of 16 heads and 4 tokens gives no right lse",
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(16),
        q_len=Between(3, 4),
        lse=_LSE,
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: the split is missing from the address, and one split writes fp32 into the bf16 output",
        refuse="AITER's fp8 kernel of 16 heads and 4 tokens overwrites its own splits",
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(16),
        q_len=Between(3, 4),
    ),
    _kernel(
        _CDNA,
        "github.com/ROCm/aiter #2319, first in 0.1.12: tiles of 32 keys were merged as if of 16",
        knob="num_kv_splits",
        value=1,
        persistent=_ROWS,
        q=_FP8,
        lanes=one_of(128),
        step=one_of(16),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: the object for an lse is the one without, instruction for instruction",
        refuse="AITER's persistent fp8 kernel of 32 heads writes no lse of unsplit work",
        persistent=_PERSISTENT,
        lse=_LSE,
        kernel=one_of("mla_a8w8_qh32_qseqlen1_gqaratio32_lse_ps"),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_EMULATED}: from 192 keys a work item on it depends on wave timing whether it is right; undecided",
        refuse="AITER's persistent fp8 kernel of 16 heads and 4 tokens is not known to be right",
        persistent=_PERSISTENT,
        kernel=one_of(
            "mla_a8w8_qh16_qseqlen4_gqaratio16_v3_ps", "mla_a8w8_qh16_qseqlen4_gqaratio16_lse_v3_ps"
        ),
    ),
    _kernel(
        _CDNA,
        "AITER op_tests/test_mla.py: 'baseline only supports MTP up to 4'; #5679, #4752 for longer ones",
        refuse="AITER never runs more than 4 tokens in its own tests",
        q_len=Between(5, 8),
    ),
    _kernel(
        _CDNA,
        f"AITER asm_mla.cu gives several tokens to the kernel of one; {_EMULATED}: NaN after a tail of 1 key",
        refuse="AITER's kernels of 8 heads are wrong for several tokens",
        lanes=one_of(8),
        q_len=_MANY,
    ),
    _kernel(
        one_of("gfx942"),
        "github.com/ROCm/aiter #3128, first in 0.1.15: it asked for 160 KiB of LDS and never ran",
        refuse="AITER's kernel of 8 heads does not fit gfx942",
        digest=one_of("b7f4d5c7fe10"),
    ),
    _kernel(
        _CDNA,
        "github.com/ROCm/aiter #2164, first in 0.1.11.post1: heads and tokens came out permuted",
        refuse="this AITER permutes folded heads of several tokens",
        fold=_FOLDED,
        q_len=_MANY,
        in_order=one_of(False),
    ),
    _kernel(
        _CDNA,
        "github.com/ROCm/aiter #2720: every row was row 0 where q_len is no power of two",
        refuse="AITER's folded heads were wrong for 3 tokens",
        fold=_FOLDED,
        q_len=one_of(3),
    ),
    _kernel(
        _CDNA,
        "AITER mla.py from 0.1.11.post1: it re-points the output with set_; that of a caller stays permuted",
        knob="own_out",
        value=1,
        fold=_FOLDED,
        q_len=_MANY,
    ),
    _kernel(
        one_of("gfx950"),
        "github.com/ROCm/aiter #4144, from 0.1.17-longctx: 32 sequences drop it, unless splits are given",
        knob="keep_persistent",
        value=1,
        q=_BF16,
        kv=_BF16,
        lanes=one_of(16),
        q_len=one_of(1),
        persistent=_PERSISTENT,
    ),
    _kernel(
        _CDNA,
        "AITER mla.py, v1_2_device.cuh: other kernels and plans; #4706, from 0.1.20: calls hk_mla_decode_fwd",
        refuse="AITER_ENABLE_EXPERIMENTAL is set: plans change, from 0.1.20 it calls a function that is gone",
        persistent=_PERSISTENT,
        q=_FP8,
        switches=asks("AITER_ENABLE_EXPERIMENTAL"),
    ),
    _kernel(
        one_of("gfx950"),
        "AITER mla.py from 0.1.20, use_opus",
        refuse="AITER_MLA_USE_OPUS is set: it runs kernels that its tables do not list",
        persistent=_PERSISTENT,
        q=_FP8,
        switches=asks("AITER_MLA_USE_OPUS"),
    ),
    _kernel(
        _CDNA,
        "AITER mla.py from 0.1.20, _mla_decode_reduce_v1_dispatch",
        refuse="AITER_MLA_REDUCE_FLYDSL is set: it runs a reducer that its tables do not list",
        persistent=_PERSISTENT,
        switches=asks("AITER_MLA_REDUCE_FLYDSL"),
    ),
    _kernel(
        _CDNA,
        "AITER v1_2_device.cuh from 0.1.16.post4: its older planner beside the one that plans otherwise",
        refuse="AITER_MLA_META_USE_PARALLEL is 0: plans come from a planner that is not AITER's own choice",
        persistent=_PERSISTENT,
        switches=asks("AITER_MLA_META_USE_PARALLEL"),
    ),
    _kernel(
        _CDNA,
        "AITER chip_info.py from 0.1.16: sizes of a plan follow it; v1_2_device.cuh asks the device",
        refuse="CU_NUM is set: plans get buffers for so many compute units, but are those of the chip",
        persistent=_PERSISTENT,
        switches=asks("CU_NUM"),
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: offsets wrap; github.com/ROCm/aiter #3988, #4341, #4452: mended on gfx950",
        knob="max_cache_gib",
        value=4,
        reaches_far=one_of(False),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_OLD}: 9 to 13 times out of budget, with one query token and with several",
        refuse="this AITER's persistent fp8 kernel of 32 heads and 4 tokens is wrong",
        digest=one_of("3c386201516f", "178e06fe53da", "fed9b3e27f0b"),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_OLD}: 12 times out of budget",
        refuse="this AITER's persistent fp8 kernel of 32 heads is wrong",
        digest=one_of("3ff1ad2fbe7f"),
    ),
    _kernel(
        one_of("gfx950"),
        f"{_OLD}: the lse is wrong with 32 heads and 2 tokens",
        refuse="this AITER's persistent bf16 kernel of 64 heads gives a wrong lse of several tokens",
        digest=one_of("eeecc67d1b44"),
        q_len=_MANY,
    ),
    _kernel(
        one_of("gfx950"),
        "github.com/ROCm/aiter #3988, first in 0.1.17: 'random nan'; which of the older objects is not said",
        refuse="this AITER's persistent bf16 kernel of 32 heads and 4 tokens gives NaN at times",
        digest=_RANDOM_NAN,
    ),
    _kernel(
        _CDNA,
        "github.com/ROCm/aiter #2106, #2128, first in 0.1.11: parts of which a token sees no key gave NaN",
        refuse="this AITER cuts off tails of fewer keys than there are query tokens, which come out as NaN",
        persistent=_PERSISTENT,
        q_len=_MANY,
        whole_tails=one_of(False),
    ),
    _kernel(
        _CDNA,
        "names stay while bytes change: of one, those of 0.1.16 are 9 times out of budget, those since right",
        refuse="the bytes of AITER's kernel are none that were run; anymla verify --aiter runs them",
        was_run=one_of(False),
    ),
    _kernel(
        _CDNA,
        f"{_EMULATED}: lanes past a tail read slot 0, so what no sequence uses there must be finite",
        knob="finite_slot_0",
        value=1,
        kernel=ANY,
    ),
)
"""What is wrong with AITER's decode kernels; `when` names fields of a KernelCall."""
