"""Other libraries beside ours, each a double here that computes from the very arguments it is given."""

import json
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from anymla import reference
from anymla.benchmarking import peers
from anymla.benchmarking.peers import NotTaken, called, splits_of_vllm
from anymla.benchmarking.suite import Row
from anymla.kv_cache import KV_FORMATS, KVCache
from benchmarks import compare

CPU = torch.device("cpu")


def cache_of(k_cache, kv_format="bf16", scale=None):
    """The cache behind pages [blocks, size, 1, row]."""
    row = KV_FORMATS[kv_format]
    return KVCache(k_cache.squeeze(2).view(row.dtype), row, 512, 64, scale)


def exact(q, cache, table, lens, q_len, sm_scale):
    """[T, H, L] in the dtype of the queries."""
    ends = torch.arange(len(lens) + 1, dtype=torch.int32) * q_len
    return reference.decode(
        q[..., :512], q[..., 512:], cache, block_table=table, seq_lens=lens, qo_indptr=ends, sm_scale=sm_scale
    ).out.to(q.dtype)


def flash_mla(module_name="flash_mla"):
    """FlashMLA of early 2025: dense only, metadata from lengths and heads."""
    module = ModuleType(module_name)

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
        return ("plan", num_heads_per_head_k, num_heads_k), "splits"

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=None,
        causal=False,
    ):
        batch, q_len, heads, _ = q.shape
        assert tile_scheduler_metadata == ("plan", q_len * heads, 1) and num_splits == "splits" and causal
        assert int(block_table.min()) >= 0 and int(block_table.max()) < len(k_cache) and head_dim_v == 512
        flat, cache = q.flatten(0, 1), cache_of(k_cache)
        out = exact(flat, cache, block_table, cache_seqlens, q_len, softmax_scale)
        return out.view(batch, q_len, heads, 512), None

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    return module


def newer_flash_mla():
    """FlashMLA of 2026: metadata without arguments, sparse decode and sparse prefill."""
    module = ModuleType("flash_mla")

    def get_mla_metadata(*args, **kwargs):
        assert not args and not kwargs
        return "plan", None

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
    ):
        assert is_fp8_kvcache and not causal and num_splits is None
        batch, q_len, heads, _ = q.shape
        flat, cache = q.flatten(0, 1), cache_of(k_cache.view(torch.uint8), "fp8_ds_mla")
        rows = {"indices": indices.flatten(0, 1), "sm_scale": softmax_scale}
        out = reference.sparse_decode(flat[..., :512], flat[..., 512:], cache, **rows).out
        return out.to(q.dtype).view(batch, q_len, heads, 512), None

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        cache = cache_of(kv.unsqueeze(1))
        rows = {"indices": indices.squeeze(1), "sm_scale": sm_scale}
        return reference.sparse_decode(q[..., :d_v], q[..., d_v:], cache, **rows).out.to(q.dtype), None, None

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    return module


class Wrapper:
    """FlashInfer's wrapper as most versions have it."""

    def __init__(self, float_workspace_buffer):
        assert float_workspace_buffer.numel() > 0

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        self.sm_scale, self.lens = sm_scale, kv_len_arr
        self.q_len = int(qo_indptr[1])
        pages = [kv_indices[a:b] for a, b in pairwise(kv_indptr)]
        self.table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
        assert (head_dim_ckv, head_dim_kpe, q_data_type, causal) == (512, 64, torch.bfloat16, True)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, return_lse=False):
        cache = cache_of(torch.cat((ckv_cache, kpe_cache), -1).unsqueeze(2))
        q = torch.cat((q_nope, q_pe), -1)
        return out.copy_(exact(q, cache, self.table, self.lens, self.q_len, self.sm_scale))


class NewerWrapper(Wrapper):
    """FlashInfer of 2026: backends, one object of metadata beside the flat arguments, fp8 with a scale."""

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        super().__init__(float_workspace_buffer)
        if backend == "fa2":
            raise RuntimeError("no compiler")

    def plan(self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None,
             head_dim_ckv=None, head_dim_kpe=None, page_size=None, causal=None, sm_scale=None,
             q_data_type=None, kv_data_type=None, *, metadata=None, query_layout=None, kv_cache_layout=None,
             scale_mode="default"):  # fmt: skip
        assert qo_indptr is None and query_layout == kv_cache_layout == "split"
        assert (scale_mode == "kv-per-tensor") == (kv_data_type == torch.float8_e4m3fn)
        widths = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        super().plan(*metadata, *widths, causal, sm_scale, q_data_type, kv_data_type)

    def run(self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, return_lse=False, *,
            query=None, kv_cache=None, ckv_scale=None, kpe_scale=None):  # fmt: skip
        assert q_nope is None and ckv_scale == kpe_scale
        keys = torch.cat(kv_cache, -1).unsqueeze(2)
        scale = None if ckv_scale is None else torch.tensor([ckv_scale])
        cache = cache_of(keys, "bf16" if scale is None else "fp8_e4m3fn", scale)
        q = torch.cat(query, -1)
        return out.copy_(exact(q, cache, self.table, self.lens, self.q_len, self.sm_scale))


def csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr):
    return qo_indptr, kv_indptr, kv_indices, kv_len_arr


def flashinfer(wrapper):
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = wrapper
    if wrapper is NewerWrapper:
        module.MLAPlanMetadata = SimpleNamespace(csr=csr)
    return module


def vllm(has_scale=True):
    """vLLM's Triton kernel, with and without a scale."""
    module = ModuleType("vllm.v1.attention.ops.triton_decode_attention")

    def attend(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
               page_size, scale):  # fmt: skip
        assert attn_logits.shape == (*q.shape[:2], num_kv_splits, 513) and v_buffer.shape[-1] == 512
        kv_format = "bf16" if scale is None else "fp8_e4m3fn"
        cache = cache_of(k_buffer, kv_format, scale)
        o.copy_(exact(q, cache, req_to_token, b_seq_len, 1, sm_scale))

    def scaled(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
               page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False):  # fmt: skip
        # Else it would read keys twice, and make a scale in every call.
        assert is_mla and k_scale is not None and v_scale is not None
        scale = k_scale if k_buffer.dtype == torch.float8_e4m3fn else None
        attend(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
               page_size, scale)  # fmt: skip

    def plain(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
              page_size):  # fmt: skip
        attend(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
               page_size, None)  # fmt: skip

    module.decode_attention_fwd = scaled if has_scale else plain
    return module


CALLS = {
    "decode": ("decode", {}),
    "verify block": ("decode", {"q_len": 3}),
    "fp8": ("decode", {"kv_format": "fp8_e4m3fn"}),
    "sparse 656": ("sparse_decode", {"topk": 33, "kv_format": "fp8_ds_mla"}),
    "sparse prefill": ("sparse_decode", {"topk": 33, "batch": 1, "q_len": 4}),
}


@pytest.fixture
def compared(small):
    """One small case of a kind beside one peer."""

    def run(kind, name, module):
        op, facts = CALLS[kind]
        row = Row(kind, small(op, **{"batch": 2, "context": 70, "block_size": 64, **facts}))
        return compare.compared(row, {name: module}, CPU, 1)

    return run


@pytest.mark.parametrize(
    ("kind", "name", "module"),
    [
        ("decode", "FlashMLA", flash_mla()),
        ("verify block", "FlashMLA", flash_mla()),
        ("sparse 656", "FlashMLA", newer_flash_mla()),
        ("sparse prefill", "FlashMLA", newer_flash_mla()),
        ("decode", "FlashInfer", flashinfer(Wrapper)),
        ("verify block", "FlashInfer", flashinfer(Wrapper)),
        ("verify block", "FlashInfer", flashinfer(NewerWrapper)),
        ("fp8", "FlashInfer", flashinfer(NewerWrapper)),
        ("decode", "vLLM Triton", vllm()),
        ("verify block", "vLLM Triton", vllm(has_scale=False)),
        ("fp8", "vLLM Triton", vllm()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_library_is_called_as_its_signature_says_and_judged_like_ours(compared, kind, name, module):
    found = compared(kind, name, module)
    for library in ("anymla", name):
        assert found[library].get("median_us", 0) > 0, found[library]
        assert found[library]["share_of_ceiling"] > 0


@pytest.mark.parametrize(
    ("kind", "name", "module", "reason"),
    [
        ("fp8", "FlashMLA", flash_mla(), "no dense decode from fp8_e4m3fn"),
        ("sparse prefill", "FlashMLA", flash_mla(), "no sparse prefill"),
        ("sparse 656", "FlashMLA", flash_mla(), "has no indices"),
        ("fp8", "FlashInfer", flashinfer(Wrapper), "has no scale_mode"),
        ("sparse 656", "FlashInfer", flashinfer(NewerWrapper), "no sparse_decode from fp8_ds_mla"),
        ("sparse 656", "vLLM Triton", vllm(), "no sparse_decode from fp8_ds_mla"),
        ("fp8", "vLLM Triton", vllm(has_scale=False), "has no k_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_library_that_does_not_take_a_case_says_why(compared, kind, name, module, reason):
    found = compared(kind, name, module)
    assert reason in found[name]["reason"]
    assert found["anymla"]["median_us"] > 0
    assert reason in compare.line(found)


def test_a_library_that_is_wrong_has_no_time(compared):
    module = flash_mla()
    right = module.flash_mla_with_kvcache

    def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
                               num_splits, softmax_scale=None, causal=False):  # fmt: skip
        return right(q, k_cache, block_table, cache_seqlens - 1, head_dim_v, tile_scheduler_metadata,
                     num_splits, softmax_scale, causal)  # fmt: skip

    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    found = compared("decode", "FlashMLA", module)
    assert "error of" in found["FlashMLA"]["reason"] and "median_us" not in found["FlashMLA"]


def test_a_way_to_run_that_fails_does_not_cost_a_library_the_others(compared):
    found = compared("decode", "FlashInfer", flashinfer(NewerWrapper))["FlashInfer"]
    assert found["variant"] == "auto" and list(found["variants_us"]) == ["auto"]
    assert found["reason"] == "fa2: RuntimeError: no compiler"


@pytest.mark.parametrize(
    ("longest", "splits"), [(70, [1]), (4096, [1, 2, 8]), (8448, [1, 4, 16]), (65536, [1, 32, 128])]
)
def test_vllm_runs_with_the_splits_that_it_would_choose_and_fewer(longest, splits):
    assert splits_of_vllm(longest) == splits


def test_a_device_left_unusable_costs_one_case_and_the_record_keeps_those_before(
    small, monkeypatch, tmp_path, capsys
):
    rows = [Row(name, small("decode")) for name in ("first", "second")]
    one = compare.compared

    def compared(row, *rest):
        if row.name == "second":
            raise RuntimeError("illegal memory access")
        return one(row, *rest)

    monkeypatch.setattr(compare, "rows_of", lambda *args: rows)
    monkeypatch.setattr(compare, "compared", compared)
    monkeypatch.setattr(peers, "import_module", lambda path: flash_mla())
    given = ["--device", "cpu", "--repeats", "1", "--record", str(tmp_path), "--libraries", "FlashMLA"]
    assert compare.main(given) == 1
    first, second = json.loads((tmp_path / "cpu" / "compare.json").read_text())["cases"]
    assert first["anymla"]["median_us"] > 0
    assert second["anymla"]["reason"] == "RuntimeError: illegal memory access"
    assert capsys.readouterr().out.rstrip().endswith("| second | - | - |")


def test_a_parameter_that_nobody_knows_is_named():
    def decode(q, schedule, *, sm_scale=1.0): ...

    with pytest.raises(NotTaken, match=r"decode asks for schedule, which is not known here"):
        called(decode, {"q": 1, "sm_scale": 2.0})
    with pytest.raises(NotTaken, match=r"decode has no indices"):
        called(decode, {"q": 1, "schedule": 0}, needed=("indices",))


def test_what_cannot_be_imported_is_named_with_what_to_install_and_is_no_error(
    small, monkeypatch, tmp_path, capsys
):
    rows = [Row("tiny", small("decode"))]
    monkeypatch.setattr(compare, "rows_of", lambda *args: rows)
    monkeypatch.setattr(peers, "import_module", lambda path: (_ for _ in ()).throw(ImportError("not here")))
    assert compare.main(["--device", "cpu", "--repeats", "1", "--record", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "FlashInfer is not here" in said and "pip install flashinfer-python" in said
    record = json.loads((tmp_path / "cpu" / "compare.json").read_text())
    assert set(record["missing"]) == {"FlashMLA", "FlashInfer", "vLLM Triton"}
    assert record["cases"][0]["anymla"]["median_us"] > 0


def test_the_second_place_of_a_library_is_tried_and_its_version_recorded(monkeypatch):
    second = flash_mla("vllm.v1.attention.ops.flashmla")

    def found(path):
        if path != second.__name__:
            raise OSError("libcuda.so.1")
        return second

    monkeypatch.setattr(peers, "import_module", found)
    here, missing = peers.imported(peers.PEERS)
    assert here == {"FlashMLA": second} and "OSError: libcuda.so.1" in missing["vLLM Triton"]
    assert peers.versions(here) == {"FlashMLA": "vllm.v1.attention.ops.flashmla unknown"}
