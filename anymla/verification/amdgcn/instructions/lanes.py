"""Between lanes: DPP, permutations, single lanes, counts of lanes below."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions.rows import (
    U32,
    U64,
    Array,
    Context,
    Fetch,
    Row,
    dword,
    numbers_of,
    step,
)
from anymla.verification.amdgcn.machine import SCALARS, Machine, Run, Step
from anymla.verification.amdgcn.parse import Unknown

ROW = 16
"""Lanes of a row, within which most DPP moves stay."""


def _within_row(lane: Array, found: Array) -> Array:
    return np.where(found // ROW == lane // ROW, found, -1)


def _row_bcast(lane: Array, amount: int) -> Array:
    """Lane 15 of each row into the row behind it; lane 31 into the last two rows."""
    if amount == 15:
        return np.where(lane >= ROW, lane // ROW * ROW - 1, -1)
    return np.where(lane >= 2 * ROW, 2 * ROW - 1, -1)


MOVES: dict[str, Callable[[Array, str], Array]] = {
    "quad_perm": lambda lane, value: (
        lane // 4 * 4 + np.array([int(n) for n in value.strip("[]").split(",")])[lane % 4]
    ),
    "row_shl": lambda lane, n: _within_row(lane, lane + int(n)),
    "row_shr": lambda lane, n: _within_row(lane, lane - int(n)),
    "row_ror": lambda lane, n: lane // ROW * ROW + (lane - int(n)) % ROW,
    "row_mirror": lambda lane, _: lane ^ (ROW - 1),
    "row_half_mirror": lambda lane, _: lane ^ (ROW // 2 - 1),
    "row_bcast": lambda lane, n: _row_bcast(lane, int(n)),
    "row_newbcast": lambda lane, n: lane // ROW * ROW + int(n),
    "row_share": lambda lane, n: lane // ROW * ROW + int(n),
    "row_xmask": lambda lane, n: lane ^ int(n),
    "wave_shr": lambda lane, _: lane - 1,
    "wave_ror": lambda lane, _: (lane - 1) % len(lane),
    "wave_shl": lambda lane, _: np.where(lane + 1 < len(lane), lane + 1, -1),
    "wave_rol": lambda lane, _: (lane + 1) % len(lane),
}
"""From which lane each lane takes its first source, -1 for none."""


def _move(context: Context) -> Array:
    """The lanes of the DPP move of an instruction, which stays to be taken by `enabled`."""
    for name, move in MOVES.items():
        if name in context.instruction.modifiers:
            return move(np.arange(context.lanes), context.instruction.modifiers[name])
    raise Unknown(f"DPP of `{context.instruction.text}` got no known move")


def moved(raw: Fetch, context: Context) -> Fetch:
    """A DPP source: the bits of another lane; 0 where there is none or it does not execute."""
    lane = np.maximum(_move(context), 0)

    def fetch(m: Machine) -> Array:
        values = np.broadcast_to(raw(m), m.has_source.shape)
        return np.where(m.has_source, values[:, lane], U32(0))

    return fetch


def keeps(context: Context) -> bool:
    """Whether some lane that executes keeps its old value even where all execute."""
    masks = (context.instruction.modifiers.get(name, "0xf") for name in ("row_mask", "bank_mask"))
    return bool((_move(context) < 0).any()) or any(int(mask, 0) != 15 for mask in masks)


def enabled(run: Run, context: Context) -> Run:
    """A DPP instruction: lanes whose source is missing, or whose row or bank is masked, keep their value."""
    lane = _move(context)
    for name in MOVES:
        context.taken(name)
    there, lane = lane >= 0, np.maximum(lane, 0)
    rows, banks = context.number("row_mask", 15), context.number("bank_mask", 15)
    number = np.arange(context.lanes)
    chosen = (rows >> number // ROW & 1).astype(bool) & (banks >> number % ROW // 4 & 1).astype(bool)
    bound = context.flag("bound_ctrl")
    inactive = context.flag("fi")

    def masked(m: Machine) -> None:
        mask, full = m.mask, m.full
        m.has_source = there & (mask[:, lane] | inactive)
        m.mask = mask & chosen & (bound | m.has_source)
        m.full = bool(m.mask.all())
        run(m)
        m.mask, m.full = mask, full

    return masked


@dataclass(frozen=True)
class Lanes(Row):
    """Semantics of whole waves: a function of the machine and its fetched sources [waves, lanes].

    Attributes:
        sources: Vector sources behind the destination.
        exchanges: Whether the two operands are both sources and destinations.
    """

    semantics: Callable[..., Any]
    sources: int
    exchanges: bool = False

    def decode(self, context: Context) -> Step:
        operands = context.instruction.operands
        if len(operands) != self.sources + (0 if self.exchanges else 1):
            raise Unknown(f"`{context.instruction.text}` got {len(operands)} operands")
        sources = operands if self.exchanges else operands[1:]
        destinations = operands if self.exchanges else operands[:1]
        fetches = [dword(operand, context) for operand in sources]
        numbers = [context.register(operand) - SCALARS for operand in destinations]
        if self.mnemonic.startswith("v_permlane"):
            # Whether lanes that do not execute may be sources: all execute where compilers use it.
            context.taken("op_sel")
        semantics = self.semantics(context) if self.mnemonic == "ds_swizzle_b32" else self.semantics
        extra = (context.number("offset"),) if self.mnemonic in ("ds_bpermute_b32", "ds_permute_b32") else ()
        counter = "lgkmcnt" if self.mnemonic.startswith("ds_") else ""
        writes = numbers_of(context, destinations)

        def run(m: Machine) -> None:
            values = [np.broadcast_to(fetch(m), m.mask.shape) for fetch in fetches]
            results = semantics(m, *values, *extra)
            for number, result in zip(numbers, results if self.exchanges else [results], strict=True):
                m.put(number, result)
            if counter:
                m.fly(counter, writes)

        return step(run, context, numbers_of(context, sources), writes, spread="all")


def _swizzle(context: Context) -> Callable[..., Any]:
    lane = np.arange(context.lanes)
    taken = _swizzled(str(context.taken("offset", "0")), lane)
    return lambda m, values: np.where(m.mask[:, taken], values[:, taken], U32(0))


def _swizzled(pattern: str, lane: Array) -> Array:
    """From which lane each lane takes its value, by an offset or its name."""
    named = re.match(r"swizzle\((\w+),\s*(.*)\)", pattern)
    if named is None:
        bits = int(pattern, 0)
        if bits & 0x8000:
            within: Array = np.array([bits >> 2 * i & 3 for i in range(4)])[lane % 4]
            return lane // 4 * 4 + within
        return ((lane & bits & 31) | (bits >> 5 & 31)) ^ (bits >> 10 & 31) | lane & 32
    name, arguments = named[1], named[2]
    if name == "BITMASK_PERM":
        found = lane & 32
        for bit, what in enumerate(reversed(arguments.strip('"'))):
            one = {"0": lane * 0, "1": lane * 0 + 1, "p": lane >> bit & 1, "i": ~lane >> bit & 1}[what]
            found = found | one << bit
        return found
    numbers = [int(number) for number in arguments.split(",")]
    if name == "QUAD_PERM":
        named_within: Array = np.array(numbers)[lane % 4]
        return lane // 4 * 4 + named_within
    if name == "SWAP":
        return lane ^ numbers[0]
    if name == "REVERSE":
        return lane ^ (numbers[0] - 1)
    if name == "BROADCAST":
        return lane // numbers[0] * numbers[0] + numbers[1]
    raise Unknown(f"swizzle {pattern!r} got no meaning here")


def _bpermute(m: Machine, address: Array, values: Array, offset: int) -> Array:
    taken = ((address + U32(offset)) // U32(4) % U32(m.lanes)).astype(np.intp)
    found: Array = np.take_along_axis(np.where(m.mask, values, U32(0)), taken, 1)
    return found


def _permute(m: Machine, address: Array, values: Array, offset: int) -> Array:
    target = ((address + U32(offset)) // U32(4) % U32(m.lanes)).astype(np.intp)
    found = np.zeros_like(values)
    wave, lane = np.nonzero(m.mask)
    found[wave, target[wave, lane]] = values[wave, lane]
    return found


def _swap_rows(size: int) -> Callable[..., Any]:
    """The odd rows of the first operand and the even rows of the second change places."""

    def swap(m: Machine, a: Array, b: Array) -> Any:
        one, other = a.copy(), b.copy()
        for first in range(0, m.lanes, 2 * size):
            one[:, first + size : first + 2 * size] = b[:, first : first + size]
            other[:, first : first + size] = a[:, first + size : first + 2 * size]
        return one, other

    return swap


def _permlanex16(m: Machine, values: Array, low: Array, high: Array) -> Array:
    """Of the other row of a pair, the lanes that two scalar operands select, four bits a lane."""
    return _from_row(m, values, low, high, other=True)


def _permlane16(m: Machine, values: Array, low: Array, high: Array) -> Array:
    return _from_row(m, values, low, high, other=False)


def _from_row(m: Machine, values: Array, low: Array, high: Array, other: bool) -> Array:
    lane = np.arange(m.lanes)
    select = low[:, :1].astype(U64) | high[:, :1].astype(U64) << U64(32)
    chosen = (select >> (lane % ROW * 4).astype(U64) & U64(15)).astype(np.intp)
    rows = lane // ROW * ROW
    found: Array = np.take_along_axis(values, (rows ^ ROW if other else rows) + chosen, 1)
    return found


def _count_below(high: bool) -> Callable[..., Any]:
    """How many bits of a mask stand for lanes below, in the lower or upper 32 lanes, plus a number."""

    def count(m: Machine, mask: Array, plus: Array) -> Array:
        below = np.clip(np.arange(m.lanes) - (32 if high else 0), 0, 32).astype(U64)
        lanes = ((U64(1) << below) - U64(1)).astype(U32)
        total: Array = np.bitwise_count(mask & lanes).astype(U32) + plus
        return total

    return count


@dataclass(frozen=True)
class OneLane(Row):
    """Between one lane and a scalar register; executes whatever the mask is."""

    action: Callable[[Context], tuple[Run, list[int], list[int]]]
    spread: str = ""

    def decode(self, context: Context) -> Step:
        run, reads, writes = self.action(context)
        return step(run, context, reads, writes, spread=self.spread)


def _first_lane(context: Context) -> tuple[Run, list[int], list[int]]:
    target, origin = context.instruction.operands
    fetch, register = dword(origin, context), context.register(target)

    def run(m: Machine) -> None:
        values = np.broadcast_to(fetch(m), m.mask.shape)
        m.put_scalar(register, values[np.arange(len(values)), m.mask.argmax(1)])

    return run, numbers_of(context, [origin]), [register]


def _read_lane(context: Context) -> tuple[Run, list[int], list[int]]:
    target, origin, lane = context.instruction.operands
    fetch, register, number = (
        dword(origin, context),
        context.register(target),
        dword(lane, context, vector=False),
    )

    def run(m: Machine) -> None:
        values = np.broadcast_to(fetch(m), m.mask.shape)
        chosen = np.broadcast_to(number(m) % U32(m.lanes), len(values)).astype(np.intp)
        m.put_scalar(register, values[np.arange(len(values)), chosen])

    # A spill keeps scalar registers in lanes of a vector register, the others of which are never written.
    return run, numbers_of(context, [origin]), [register]


def _write_lane(context: Context) -> tuple[Run, list[int], list[int]]:
    target, origin, lane = context.instruction.operands
    fetch, number = dword(origin, context, vector=False), dword(lane, context, vector=False)
    register = context.register(target)

    def run(m: Machine) -> None:
        chosen = np.broadcast_to(number(m) % U32(m.lanes), len(m.waves)).astype(np.intp)
        m.vectors[register - SCALARS][m.waves, chosen] = fetch(m)
        m.defined.write(register, m.at, U64(1) << chosen.astype(U64))

    return run, [register], []


ROWS: tuple[Row, ...] = (
    OneLane("v_readfirstlane_b32", _first_lane, "all"),
    OneLane("v_readlane_b32", _read_lane),
    OneLane("v_writelane_b32", _write_lane),
    Lanes("v_mbcnt_lo_u32_b32", _count_below(False), 2),
    Lanes("v_mbcnt_hi_u32_b32", _count_below(True), 2),
    Lanes("v_permlane32_swap_b32", _swap_rows(32), 2, exchanges=True),
    Lanes("v_permlane16_swap_b32", _swap_rows(16), 2, exchanges=True),
    Lanes("v_permlane16_b32", _permlane16, 3),
    Lanes("v_permlanex16_b32", _permlanex16, 3),
    Lanes("v_swap_b32", lambda m, a, b: (b.copy(), a.copy()), 2, exchanges=True),
    Lanes("ds_bpermute_b32", _bpermute, 2),
    Lanes("ds_permute_b32", _permute, 2),
    Lanes("ds_swizzle_b32", _swizzle, 1),
)
