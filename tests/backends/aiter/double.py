"""A double of AITER: a release's real signatures on a chip, the reference maths, and AITER's ways to fail.

What it looks up comes from the record of that release. What its kernels write, read and leave out is modelled
on its own, from AITER's sources and from its code objects on an emulator: an adapter that forgets one of its
quirks gives a wrong result here, or ends the process, which is `Aborted`.
"""

import ast
import inspect
import os
import sys
import types
from functools import lru_cache
from typing import Any

import double_planner as planner
import double_stages as stages
import pytest
import torch
from double_record import Record
from double_stages import Aborted, Step

from anymla.backends.aiter_mla import bindings

UNITS = {"gfx942": 304, "gfx950": 256}
FNUZ, FN = torch.float8_e4m3fnuz, torch.float8_e4m3fn


class AiterDouble:
    """One release on one chip.

    Attributes:
        record: All that it knows of the release.
        launched: Code objects, in order.
        plans: How often the planner ran.
    """

    def __init__(self, release: str, arch: str, units: int | None = None) -> None:
        self.arch, self.units = arch, units or UNITS[arch]
        self.record = Record(release, arch)
        self.launched: list[str] = []
        self.plans = 0
        self.planned: dict[int, tuple[object, ...]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "AiterDouble":
        """Stand in for the package `aiter` until the test ends."""
        modules = {
            name: types.ModuleType(name)
            for name in ("aiter", "aiter.mla", "aiter.ops", "aiter.ops.attention")
        }
        for name, ours, compiled in (
            ("mla_decode_fwd", self._decode, False),
            ("get_mla_metadata_info_v1", self._plan_sizes, False),
            ("get_mla_metadata_v1", self._plan, not self.record.since("0.1.17longctx")),
        ):
            setattr(modules[bindings.FUNCTIONS[name].modules[0]], name, self._signed(name, ours, compiled))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self

    def _signed(self, name: str, function: Any, compiled: bool) -> Any:
        """The function with its real parameters; a compiled one hides them behind a wrapper."""
        signature = _signature(self.record.parameters(name))

        def wrapper_custom(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            if not self.record.accepts(name, *sorted(given)):
                raise TypeError(f"{name}{signature} got {sorted(given)}")
            return function(**given)

        if not compiled:
            wrapper_custom.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper_custom

    def _decode(self, q: Any, kv_buffer: Any, o: Any, **given: Any) -> tuple[Any, Any]:
        work, heads = given.get("work_meta_data"), o.shape[1]
        rows, q_len = given["qo_indptr"].shape[0] - 1, given["max_seqlen_q"]
        _check(q, kv_buffer, o, given)
        kinds = _kind(q.dtype, self.arch), _kind(kv_buffer.dtype, self.arch)
        persistent = work is not None
        if (
            persistent
            and given["num_kv_splits"] is None
            and self._drops_persistent(kinds, heads, q_len, rows)
        ):
            persistent = False
            given["num_kv_splits"], given["num_kv_splits_indptr"] = 1, torch.arange(rows + 1).int()
        wants_lse = bool(given.get("return_lse"))
        found = self.record.look_up(*kinds, persistent, heads, q_len)
        lse_from = self.record.lse_from(persistent)
        keyed = int(wants_lse and lse_from == "keyed")
        if found is None:
            raise Aborted(f"no dispatch for {heads} heads, {q_len} tokens, persistent {persistent}")
        key = (
            *kinds,
            found.heads,
            found.persistent,
            found.q_len,
            0,
            int(self.record.causal_rows()),
            keyed,
            0,
        )
        names = self.record.code_objects(*key)
        if not names:
            raise Aborted(f"cannot get heuristic kernel: {key}")
        self.launched.append(names[0])
        step = Step(self, names[0], kinds, q, kv_buffer, o, given, found.fold, wants_lse, lse_from)
        if not persistent:
            return stages.rows(step)
        self._obey_switches(kinds, heads, found.fold, q_len)
        if not self.record.reduces(heads // found.fold):
            raise Aborted(f"the reducer has no {heads // found.fold} heads")
        if self.planned.get(work.data_ptr()) != (heads, q_len, rows, *kinds):
            raise Aborted("the plan is not one for this call")
        return stages.persistent(step, self.record.tokens_fold_in_order())

    def _obey_switches(self, kinds: tuple[str, str], heads: int, fold: int, q_len: int) -> None:
        """Run what an environment variable asks for instead, of which nothing here is known."""
        fp8, both = kinds == ("fp8", "fp8"), (64, 128) if self.arch == "gfx950" else (128,)
        # With it, heads of these products are not folded.
        if _is_set("AITER_ENABLE_EXPERIMENTAL") and fp8 and heads * q_len in both:
            if self.record.since("0.1.20"):
                raise AttributeError("module 'aiter' has no attribute 'hk_mla_decode_fwd'")
            raise Aborted("a kernel that no table lists")
        if _is_set("AITER_MLA_USE_OPUS") and fp8 and self.arch == "gfx950" and self.record.since("0.1.20"):
            raise Aborted("a kernel that no table lists")
        if _is_set("AITER_MLA_REDUCE_FLYDSL") and heads == 16 * fold and self.record.since("0.1.20"):
            raise Aborted("a reducer that no table lists")

    def _drops_persistent(self, kinds: tuple[str, str], heads: int, q_len: int, rows: int) -> bool:
        gated = self.arch == "gfx950" and kinds == ("bf16", "bf16") and heads == 16 and q_len == 1
        return gated and rows >= 32 and self.record.since("0.1.17longctx")

    def _plan_sizes(self, batch_size: int, max_seqlen_qo: int, num_head_qo: int, **given: Any) -> Any:
        assert num_head_qo % 8 == 0
        return planner.sizes(batch_size, max_seqlen_qo * num_head_qo, self.units)

    def _plan(self, **given: Any) -> None:
        info, indptr = given.get("work_info_set"), given.get("work_indptr")
        if "work_info" in given:
            # The stub names them the wrong way round; the code behind it takes them by place.
            info, indptr = given["work_indptr"], given["work_info"]
        kinds = tuple(
            "bf16" if given.get(name) is None else _kind(given[name], self.arch)
            for name in ("dtype_q", "dtype_kv")
        )
        heads, q_len = given["num_heads_per_head_k"], given["max_seqlen_qo"]
        found = self.record.look_up(*kinds, True, heads, q_len)
        if found is None:
            raise Aborted(f"the planner has no {heads} heads and {q_len} tokens")
        given.update(work_info_set=info, work_indptr=indptr)
        rows = given["seqlens_kv_indptr"].shape[0] - 1
        whole = self.record.whole_tails()
        planner.plan(given, fold=found.fold, units=self.units, whole_tails=whole)
        self.planned[given["work_metadata_ptrs"].data_ptr()] = (heads, q_len, rows, *kinds)
        self.plans += 1


def _is_set(switch: str) -> bool:
    return os.environ.get(switch, "0") != "0"


def _kind(dtype: torch.dtype, arch: str) -> str:
    """What kernel tables call a dtype; anything else ends the process."""
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == (FNUZ if arch == "gfx942" else FN):
        return "fp8"
    raise Aborted(f"unsupported dtype {dtype}")


def _check(q: Any, kv_buffer: Any, o: Any, given: dict[str, Any]) -> None:
    """What the C++ side checks, ending the process."""
    if not q.is_contiguous():
        raise Aborted("only support Q.is_contiguous() for now")
    if given.get("nhead_kv", 1) != 1 or kv_buffer.dim() != 4 or kv_buffer.shape[3] != q.shape[2]:
        raise Aborted("kv_buffer does not fit")
    assert given.get("page_size", 1) == 1, "bf16 kernels read one token a page"
    assert given.get("logit_cap", 0.0) <= 0
    if q.dtype in (FNUZ, FN) and (given.get("q_scale") is None or given.get("kv_scale") is None):
        raise Aborted("fp8 Q requires q_scale and kv_scale")
    o.view(o.shape[0], 1, *o.shape[1:])


@lru_cache(maxsize=512)
def _signature(text: str) -> inspect.Signature:
    """A signature from the text of its parameters."""
    arguments = bindings._arguments_in(text)
    kinds = inspect.Parameter
    found, first = [], len(arguments.args) - len(arguments.defaults)
    for at, one in enumerate(arguments.args):
        default = kinds.empty if at < first else _value(arguments.defaults[at - first])
        found.append(kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=default))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(
            kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else _value(default))
        )
    return inspect.Signature(found)


def _value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
