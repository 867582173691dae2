"""Sinks everywhere: every operation, format and kind of sink, beside the lse, and through merges."""

import pytest
import torch

import anymla
from anymla import latent, reference
from anymla.contract import AttentionOutput
from anymla.distributed import combine
from anymla.kv_formats import KV_FORMATS
from anymla.verification import eager
from anymla.verification.inputs import Inputs, Widths, decode_inputs, prefill_inputs, sparse_inputs
from anymla.verification.judge import judge

WIDTHS = Widths(3, 128, 32, 32, 48)
FORMATS = [name for name in KV_FORMATS if not name.startswith("index_k")]
CALLS = {
    "decode": lambda **more: decode_inputs(WIDTHS, (70, 0, 33, 600), **more),
    "verify-blocks": lambda **more: decode_inputs(WIDTHS, (70, 0, 33, 9), (4, 0, 8, 1), **more),
    "not-causal": lambda **more: decode_inputs(WIDTHS, (70, 5), (4, 8), causal=False, **more),
    "sparse": lambda **more: sparse_inputs(WIDTHS, 90, 40, 5, **more),
    "prefill": lambda **more: prefill_inputs(WIDTHS, (40, 0, 600), (9, 3, 2), **more),
    "prefill-without-context": lambda **more: prefill_inputs(WIDTHS, None, (9, 0, 30), **more),
}


def run(call: Inputs, **changes: object) -> AttentionOutput:
    """The public function, with an lse."""
    options = {**call.options, **changes}
    if "cache" in options:
        options["kv_cache"] = options.pop("cache")
    return getattr(anymla, call.op)(*call.tensors, **options, return_lse=True)


def require_right(call: Inputs, got: AttentionOutput) -> None:
    """Hold a result, its lse included, against the fp64 definition."""
    right = getattr(reference, call.op)(*call.tensors, **call.options)
    judge(got, right, *getattr(eager, call.op)(*call.tensors, **call.options)).require_pass()


class TestEveryOperation:
    @pytest.mark.parametrize("sinks", ["near", "infinite"])
    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("name", CALLS)
    def test_a_sink_takes_its_share_of_every_row(self, name, kv_format, sinks):
        q_dtype = torch.float32 if kv_format == "fp32" else torch.bfloat16
        call = CALLS[name](kv_format=kv_format, sinks=sinks, q_dtype=q_dtype, block_size=16)
        require_right(call, run(call))

    @pytest.mark.parametrize("name", CALLS)
    def test_the_lse_does_not_know_of_it(self, name):
        call = CALLS[name](sinks="near")
        assert torch.equal(run(call).lse, run(call, sinks=None).lse)

    @pytest.mark.parametrize("name", CALLS)
    def test_a_sink_of_minus_infinity_changes_no_bit(self, name):
        call = CALLS[name](sinks="near")
        nothing = torch.full_like(call.options["sinks"], -torch.inf)
        assert torch.equal(run(call, sinks=nothing).out, run(call, sinks=None).out)

    @pytest.mark.parametrize("name", CALLS)
    def test_every_row_is_written_and_one_that_sees_nothing_is_zero(self, name):
        call = CALLS[name](sinks="infinite")
        out = torch.full(call.shape, torch.nan, dtype=call.tensors[0].dtype)
        got = run(call, out=out, lse=torch.full(call.shape[:2], torch.nan))
        assert not got.out.isnan().any() and not got.lse.isnan().any()
        assert not got.out[got.lse == -torch.inf].any()


def slots_of_rows(call: Inputs) -> torch.Tensor:
    """[T, K] int32 slots that each row of a dense decode sees, -1 after the last."""
    options, rows = call.options, call.num_rows
    lens, indptr = options["seq_lens"].tolist(), options["qo_indptr"].tolist()
    ids = torch.full((rows, max(lens)), -1, dtype=torch.int32)
    for length, first, last in zip(lens, indptr, indptr[1:], strict=False):
        for t in range(last - first):
            seen = max(0, length - (last - first) + 1 + t)
            ids[first + t, :seen] = torch.arange(seen, dtype=torch.int32)
    table = options["block_table"]
    return anymla.to_slots(ids, table, options["qo_indptr"], call.cache.block_size)


def parted(slots: torch.Tensor, parts: str) -> list[torch.Tensor]:
    """The same slots shared out to three ranks in turn, or cut into chunks, -1 in the place of the others."""
    column = torch.arange(slots.shape[1])
    shares = column % 3 if parts == "ranks" else column // 25
    return [torch.where(shares == part, slots, -1) for part in shares.unique()]


@pytest.mark.parametrize("parts", ["ranks", "chunks"])
class TestMerges:
    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("sinks", ["near", "infinite"])
    def test_parts_of_the_keys_of_verify_blocks_merge_before_the_sink_counts_once(
        self, sinks, kv_format, parts
    ):
        call = CALLS["verify-blocks"](kv_format=kv_format, sinks=sinks, q_dtype=torch.float32)
        results = [
            anymla.sparse_decode(
                *call.tensors, indices=slots, sm_scale=call.options["sm_scale"], return_lse=True
            )
            for slots in parted(slots_of_rows(call), parts)
        ]
        require_right(call, combine(results, call.options["sinks"]))

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_so_do_parts_of_the_chosen_keys(self, kv_format, parts):
        call = CALLS["sparse"](kv_format=kv_format, sinks="near", q_dtype=torch.float32)
        results = [run(call, indices=slots, sinks=None) for slots in parted(call.options["indices"], parts)]
        require_right(call, combine(results, call.options["sinks"]))

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_so_do_a_prompt_and_parts_of_its_context(self, kv_format, parts):
        call = prefill_inputs(WIDTHS, (70,), (9,), kv_format=kv_format, sinks="near", q_dtype=torch.float32)
        q_nope, q_pe, _, _, w_uk, w_uv = call.tensors
        options, cache = call.options, call.options["cache"]
        own = {name: options[name] for name in ("qo_indptr", "sm_scale")}
        results = [anymla.prefill(*call.tensors, **own, return_lse=True)]
        # The last row belongs to no sequence.
        ids = torch.arange(70, dtype=torch.int32).expand(9, -1)
        slots = anymla.to_slots(ids, options["block_table"], options["qo_indptr"], cache.block_size)
        slots = torch.cat((slots, torch.full((1, 70), -1, dtype=torch.int32)))
        for share in parted(slots, parts):
            part = anymla.sparse_decode(
                latent.absorb_q(q_nope, w_uk),
                q_pe,
                cache,
                indices=share,
                sm_scale=options["sm_scale"],
                return_lse=True,
            )
            results.append(AttentionOutput(latent.project_v(part.out, w_uv), part.lse))
        require_right(call, combine(results, options["sinks"]))
