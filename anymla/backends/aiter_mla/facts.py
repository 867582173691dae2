"""What AITER's releases have, as recorded beside this file: parameters, kernel tables, and what they look up.

Code objects keep their names while their bytes change, so each is known by a digest, a part of its git blob
id, and `executed.json` has those that were run on the emulator; `scripts/record_aiter` writes all of it.

AITER's dispatch code turns a call into the key of a row of its kernel table, and ends the process where there
is no such row. That code differs between releases in ways that no parameter shows, so a dispatch is known by
the contents of its three files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_FOLDER = Path(__file__).parent / "facts"
DIGITS = 12
"""Of a digest."""
_PAGES_OF_STAGE1 = "KVBlockSize=block_size"
"""What AITER's indexer says where it takes logits of each head from pages of several tokens."""


class Kernel(NamedTuple):
    """One row of a kernel table. Every field but the last is part of the key."""

    q: str
    kv: str
    heads: int
    persistent: int
    q_len: int
    prefill: int
    causal: int
    lse: int
    round_robin: int
    code_object: str


class Lookup(NamedTuple):
    """What head count, query tokens and mode decide.

    Attributes:
        heads, persistent, q_len: Of the key.
        told_heads: Whether the kernel is told how many heads there are, where others are told how many rows.
        step: Keys that the second stage takes for the least of a split; 0 where there is none.
        fold: Groups of heads that become rows of their own.
    """

    heads: int
    persistent: int
    q_len: int
    told_heads: bool
    step: int
    fold: int


@dataclass(frozen=True, eq=False)
class Dispatch:
    """How one version of AITER's dispatch code chooses kernels.

    Attributes:
        causal_rows: Whether a causal decode looks for rows of causal 1; else decode rows have 0.
        lse_from: For modes "rows" and "persistent", where an lse comes from: "garbage" (memory that nothing
            wrote), "keyed" (a row of its own) or "merged" (AITER's second stage).
        tokens_fold_in_order: Whether heads folded into rows keep the order of several query tokens.
        whole_tails: Whether a plan never cuts off fewer keys than there are query tokens.
    """

    causal_rows: bool
    lse_from: Mapping[str, str]
    tokens_fold_in_order: bool
    whole_tails: bool
    lookups: Mapping[str, Mapping[str, str]]

    def look_up(
        self, arch: str, q: str, kv: str, *, persistent: bool, heads: int, q_len: int
    ) -> Lookup | None:
        """What a call looks up, or None where the code refuses it, folds it otherwise, or is not known."""
        rows = self.lookups.get(f"{arch} {q} {kv} {mode(persistent)}", {}).get(str(heads), "").split()
        cell = rows[q_len - 1] if 1 <= q_len <= len(rows) else "-"
        if cell == "-":
            return None
        key, _, fold = cell.partition("/")
        row_heads, row_persistent, row_q_len, told_heads, step = map(int, key.split("."))
        return Lookup(row_heads, row_persistent, row_q_len, bool(told_heads), step, int(fold or 1))


def mode(persistent: bool) -> str:
    """What tables call the two ways to run: "persistent" workgroups or one for each row of a batch."""
    return "persistent" if persistent else "rows"


def canonical_release(name: str) -> str:
    """A release as its package calls it: 0.1.16.post2 for v0.1.16.post2 and for 0.1.16.post2+rocm7."""
    return name.partition("+")[0].removeprefix("v").replace("-", "")


@lru_cache(maxsize=1)
def releases() -> tuple[str, ...]:
    """Every recorded release, oldest first; the last is the commit called HEAD."""
    return tuple(canonical_release(name) for name in _read("signatures.json")["releases"])


def newest_release() -> str:
    """The newest recorded release that has a tag."""
    return releases()[-2]


def recorded_parameters(function: str, release: str) -> str | None:
    """Parameters of a function as Python writes them, or None where the release has no such function."""
    order, at = releases(), releases().index(release)
    for first, last, text in _read("signatures.json")["functions"][function]:
        if order.index(canonical_release(first)) <= at <= order.index(canonical_release(last)):
            return str(text)
    return None


def recorded_kernels(release: str, arch: str) -> tuple[Kernel, ...]:
    """The kernel table of a release for a chip; () where it has none."""
    return tuple(kernel_from(line.split()[:-1]) for line in _table(release, arch))


def recorded_digest(release: str, arch: str, code_object: str) -> str:
    """The digest of a code object in the kernel table of a release."""
    return next(digest for *_, name, digest in map(str.split, _table(release, arch)) if name == code_object)


def digest_of(path: Path) -> str:
    """The digest of a file; "" where there is none."""
    return blob_of(path)[:DIGITS]


def blob_of(path: Path) -> str:
    """A file's contents as git names them; "" where there is no file."""
    try:
        return git_blob(path.read_bytes())
    except OSError:
        return ""


def git_blob(text: bytes) -> str:
    """Contents as git names them."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()


def recorded_dispatch(release: str) -> Dispatch | None:
    """The dispatch of a release, or None for one before kernel tables."""
    row = _kernels()[1].get(release)
    return _dispatches()[row["dispatch"]] if row else None


def recorded_reducers(release: str, width: int) -> frozenset[int]:
    """Head counts of the reducer for outputs of 512 (decode) or 128 (prefill) columns."""
    row = _kernels()[1].get(release, {})
    return frozenset(row.get("reducer" if width == 512 else "prefill_reducer", ()))


def dispatch_with(blobs: Mapping[str, str]) -> Dispatch | None:
    """The dispatch whose files have these git blob ids, or None for code that was not recorded."""
    for recorded, dispatch in zip(_read("kernels.json")["dispatches"], _dispatches(), strict=True):
        if recorded["blobs"] == dict(blobs):
            return dispatch
    return None


def was_run(arch: str, digest: str) -> bool:
    """Whether a code object was run on the emulator, whatever came out; quirks say where that was wrong."""
    return digest in _read("executed.json")[arch]


def reaches_far(arch: str, digest: str) -> bool:
    """Whether a code object was seen to find keys beyond 4 GiB and 2 ** 24 slots."""
    return bool(_read("executed.json")[arch].get(digest, {}).get("far"))


def reads_index_pages(source: str) -> bool:
    """Whether the indexer of this source takes pages of several tokens."""
    return _PAGES_OF_STAGE1 in source


def recorded_index_pages(release: str) -> bool:
    """The same of a release; one before kernel tables has none."""
    return bool(_kernels()[1].get(release, {}).get("index_pages"))


def kernel_from(fields: list[str]) -> Kernel:
    """A row from its ten fields as text."""
    q, kv, *numbers, code_object = fields
    heads, persistent, q_len, prefill, causal, lse, round_robin = map(int, numbers)
    return Kernel(q, kv, heads, persistent, q_len, prefill, causal, lse, round_robin, code_object)


def _table(release: str, arch: str) -> list[str]:
    row = _kernels()[1].get(release)
    return list(_read("kernels.json")["tables"][row[arch]]) if row and arch in row else []


@lru_cache(maxsize=1)
def _dispatches() -> tuple[Dispatch, ...]:
    facts = _read("kernels.json")
    return tuple(
        Dispatch(
            causal_rows=one["causal"] == "asked",
            lse_from={"rows": one["lse_rows"], "persistent": one["lse_persistent"]},
            tokens_fold_in_order=one["tokens_fold_in_order"],
            whole_tails=one["whole_tails"],
            lookups={name: facts["lookups"][at] for name, at in one["lookups"].items()},
        )
        for one in facts["dispatches"]
    )


@lru_cache(maxsize=1)
def _kernels() -> tuple[str, dict[str, Any]]:
    facts = _read("kernels.json")
    return facts["source"], {canonical_release(name): row for name, row in facts["releases"].items()}


@lru_cache(maxsize=3)
def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((_FOLDER / name).read_text()))
