"""The torch custom ops: schemas, fakes and mutation are as declared, and a compiled graph has no break."""

from shutil import which

import pytest
import torch

import anymla
import anymla.ops  # registers torch.ops.anymla


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages() -> dict[str, torch.Tensor]:
    table = torch.tensor([[1, 0], [2, -7]], dtype=torch.int32)
    return {"block_table": table, "seq_lens": ints(5, 3)}


def calls(dtype: torch.dtype = torch.float32):
    """One right call of every functional op: (name, args, kwargs)."""
    g = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    q = new(3, 2, 8), new(3, 2, 4)
    verify = {"qo_indptr": ints(0, 2, 3), "sm_scale": 0.3, "sinks": torch.zeros(2), "max_q_len": 2}
    tokens = new(3, 2, 6), new(3, 2, 4), new(3, 8), new(3, 4), new(2, 6, 8), new(2, 8, 5)
    context = {"kv_cache": new(3, 4, 12), **pages()}
    return [
        ("decode", (*q, new(3, 4, 12)), {**pages(), **verify}),
        (
            "sparse_decode",
            (*q, new(3, 4, 12)),
            {"indices": ints(0, -1, 5, 2, -1, -1).view(3, 2), "sm_scale": 0.3},
        ),
        ("prefill", tokens, {"qo_indptr": ints(0, 2, 3), "sm_scale": 0.3, **context}),
        (
            "index_topk",
            (q[0], torch.ones(3, 2), new(3, 4, 8)),
            {**pages(), "topk": 4, "qo_indptr": ints(0, 2, 3)},
        ),
    ]


NAMES = [name for name, _, _ in calls()]


def call_named(name: str, dtype: torch.dtype = torch.float32):
    return next(call[1:] for call in calls(dtype) if call[0] == name)


def new_outputs(name: str, args, kwargs):
    got = getattr(torch.ops.anymla, name)(*args, **kwargs)
    outputs = got if isinstance(got, tuple) else (got,)
    return dict(zip(("out", "lse"), (torch.empty_like(t) for t in outputs), strict=False)), outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_functional_op_is_what_its_schema_says(name: str, dtype: torch.dtype) -> None:
    args, kwargs = call_named(name, dtype)
    torch.library.opcheck(getattr(torch.ops.anymla, name).default, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_the_in_place_op_is_what_its_schema_says(name: str) -> None:
    args, kwargs = call_named(name)
    outputs, _ = new_outputs(name, args, kwargs)
    torch.library.opcheck(getattr(torch.ops.anymla, f"{name}_out").default, args, kwargs | outputs)


@pytest.mark.parametrize("name", ["decode", "sparse_decode"])
def test_queries_in_fp8_come_with_a_scale_and_give_bf16(name: str) -> None:
    args, kwargs = call_named(name)
    fp8 = [t.to(torch.float8_e4m3fn) for t in args]
    scales = {"q_scale": torch.tensor([0.7]), "k_scale": torch.tensor([1.3])}
    # To compare memory before and after, test_schema multiplies it, which torch does not in fp8.
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.anymla, name).default, fp8, kwargs | scales, test_utils=tests)
    outputs, functional = new_outputs(name, fp8, kwargs | scales)
    assert functional[0].dtype == torch.bfloat16
    in_place = getattr(torch.ops.anymla, f"{name}_out")
    into = kwargs | scales | {"out": torch.empty_like(outputs["out"])}
    torch.library.opcheck(in_place.default, fp8, into, test_utils=tests)
    in_place(*fp8, **kwargs, **scales, **outputs)
    assert torch.equal(outputs["out"], functional[0])
    direct = getattr(anymla, name)(*fp8, **kwargs, **scales, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(functional, direct, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "index_topk"])
def test_in_place_and_without_an_lse_it_is_the_plain_attention(name: str) -> None:
    args, kwargs = call_named(name)
    outputs, functional = new_outputs(name, args, kwargs)
    op, out = getattr(torch.ops.anymla, f"{name}_out"), outputs["out"]
    torch.library.opcheck(op.default, args, kwargs | {"out": torch.empty_like(out)})
    op(*args, **kwargs, out=out)
    assert torch.equal(out, functional[0])


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_and_the_api_are_one(name: str) -> None:
    args, kwargs = call_named(name)
    outputs, functional = new_outputs(name, args, kwargs)
    getattr(torch.ops.anymla, f"{name}_out")(*args, **kwargs, **outputs)
    direct = getattr(anymla, name)(*args, **kwargs, **({} if name == "index_topk" else {"return_lse": True}))
    direct = direct if isinstance(direct, tuple) else (direct,)
    for a, b, c in zip(functional, outputs.values(), direct, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_write_cache_is_what_its_schema_says() -> None:
    args = (torch.randn(3, 8), torch.randn(3, 4), torch.zeros(3, 4, 12), torch.tensor([4, -1, 0]))
    torch.library.opcheck(torch.ops.anymla.write_cache.default, args)
    torch.ops.anymla.write_cache(*args)
    assert torch.equal(args[2].view(12, 12)[4], torch.cat([args[0][0], args[1][0]]))


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(which("g++") is None, reason="inductor needs g++ here")
    ),
]


# inductor's own imports warn of torch.jit.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_graph_has_no_break(name: str, compiler: str) -> None:
    args, kwargs = call_named(name)

    def layer(*args, **kwargs):
        result = getattr(torch.ops.anymla, name)(*args, **kwargs)
        return result[0] * 2 if isinstance(result, tuple) else result + 1

    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    assert torch.equal(compiled(*args, **kwargs), layer(*args, **kwargs))


def test_a_write_and_a_decode_keep_their_order_in_a_compiled_graph() -> None:
    (ql_nope, q_pe, cache), kwargs = call_named("decode")

    def layer(cache):
        torch.ops.anymla.write_cache(torch.ones(1, 8), torch.ones(1, 4), cache, torch.tensor([4]))
        return torch.ops.anymla.decode(ql_nope, q_pe, cache, **kwargs)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(cache.clone()), layer(cache.clone()))
