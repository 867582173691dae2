"""Branches, barriers, waits, the mode register, and what does nothing here."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions.rows import U32, Context, Row, step
from anymla.verification.amdgcn.machine import EXEC, SCC, VCC, Machine, Step
from anymla.verification.amdgcn.parse import Unknown

Condition = Callable[[Machine], Any]


def _any_bit(register: int) -> Condition:
    return lambda m: m.bits(register) != 0


@dataclass(frozen=True)
class Branch(Row):
    """To a label, for the waves in which a condition holds."""

    condition: Condition | None = None
    register: int = -1
    wanted: bool = True

    def decode(self, context: Context) -> Step:
        label = context.instruction.operands[0].text
        if label not in context.labels:
            raise Unknown(f"label {label!r} of `{context.instruction.text}` got no place")
        condition, wanted = self.condition, self.wanted

        def run(m: Machine) -> None:
            m.taken = True if condition is None else condition(m) == wanted

        trusts = [self.register] if condition is not None else []
        return step(run, context, trusts=trusts, spread="", flow="branch", target=context.labels[label])


@dataclass(frozen=True)
class Flow(Row):
    """What the loop of the machine does by itself."""

    flow: str

    def decode(self, context: Context) -> Step:
        if any(named.value not in (-1, 0xFFFF) for named in context.instruction.operands):
            raise Unknown(f"`{context.instruction.text}` got another barrier than that of the workgroup")
        return step(_nothing, context, spread="", flow=self.flow)


@dataclass(frozen=True)
class Wait(Row):
    """Until at most so many accesses are under way, counter by counter.

    Attributes:
        counters: What the operand is the limit of; None where the text names each counter.
    """

    counters: tuple[str, ...] | None = None

    def decode(self, context: Context) -> Step:
        instruction = context.instruction
        named = self.counters
        if named is not None:
            value = int(instruction.operands[-1].value)
            # Of two counters, the first is in the upper byte.
            limits = dict(zip(named, [value] if len(named) == 1 else [value >> 8, value & 0xFF], strict=True))
        else:
            found = re.findall(r"(\w+)\((\d+)\)", instruction.text)
            limits = {counter: int(limit) for counter, limit in found}
            context.left.clear()
            if not found and instruction.operands and instruction.operands[0].kind == "int":
                if instruction.operands[0].value:
                    raise Unknown(f"`{instruction.text}` got limits as a number; needs their names")
                limits = {"vmcnt": 0, "lgkmcnt": 0}

        def run(m: Machine) -> None:
            for counter, limit in limits.items():
                m.wait(counter, limit)

        return step(run, context, spread="")


@dataclass(frozen=True)
class Ignored(Row):
    """Concerns what is not modelled: time, caches, priorities, and traps that are never met."""

    def decode(self, context: Context) -> Step:
        context.left.clear()
        ticks = 4
        if self.mnemonic == "s_nop" and context.instruction.operands:
            ticks += 4 * int(context.instruction.operands[0].value)
        return step(_nothing, context, spread="", ticks=ticks)


@dataclass(frozen=True)
class SetMode(Row):
    """A field of the mode register; only saturation of fp8 conversions is modelled."""

    def decode(self, context: Context) -> Step:
        register, value = context.instruction.operands
        field = re.match(r"hwreg\((\w+),\s*(\d+),\s*(\d+)\)", register.text)
        if field is None or field[1] != "HW_REG_MODE" or field[2] != "23" or field[3] != "1":
            raise Unknown(f"`{context.instruction.text}` got a field that is not modelled")
        bit = np.uint32(int(value.value) & 1)

        def run(m: Machine) -> None:
            m.mode[m.at] = m.mode[m.at] & ~(U32(1) << U32(23)) | bit << U32(23)

        return step(run, context, spread="")


def _nothing(m: Machine) -> None:
    """What is not modelled."""


IGNORED = (
    "s_nop", "s_sleep", "s_setprio", "s_sethalt", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_trap",
    "s_inst_prefetch", "s_set_inst_prefetch_distance", "s_clause", "s_delay_alu", "s_code_end",
    "s_sendmsg", "s_waitcnt_depctr", "s_wait_alu", "s_sched_barrier", "s_ttracedata", "s_incperflevel",
    "s_decperflevel", "s_version", "v_nop", "buffer_wbl2", "buffer_inv", "buffer_gl0_inv", "buffer_gl1_inv",
    "global_inv", "global_wb", "global_wbinv",
)  # fmt: skip

_SCC: Condition = lambda m: m.scc  # noqa: E731

ROWS: tuple[Row, ...] = (
    Branch("s_branch"),
    Branch("s_cbranch_scc0", _SCC, SCC, False),
    Branch("s_cbranch_scc1", _SCC, SCC, True),
    Branch("s_cbranch_vccz", _any_bit(VCC), VCC, False),
    Branch("s_cbranch_vccnz", _any_bit(VCC), VCC, True),
    Branch("s_cbranch_execz", _any_bit(EXEC), EXEC, False),
    Branch("s_cbranch_execnz", _any_bit(EXEC), EXEC, True),
    Flow("s_endpgm", "end"),
    Flow("s_barrier", "barrier"),
    Flow("s_barrier_signal", "signal"),
    Flow("s_barrier_wait", "wait"),
    Wait("s_waitcnt"),
    Wait("s_waitcnt_vscnt", ("vscnt",)),
    Wait("s_wait_loadcnt", ("vmcnt",)),
    Wait("s_wait_storecnt", ("vscnt",)),
    Wait("s_wait_dscnt", ("lgkmcnt",)),
    Wait("s_wait_kmcnt", ("kmcnt",)),
    Wait("s_wait_loadcnt_dscnt", ("vmcnt", "lgkmcnt")),
    Wait("s_wait_storecnt_dscnt", ("vscnt", "lgkmcnt")),
    SetMode("s_setreg_imm32_b32"),
    *(Ignored(name) for name in IGNORED),
)
