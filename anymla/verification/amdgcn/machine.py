"""The machine: registers, LDS and waves as arrays, and the loop that executes a decoded program.

Waves that agree on the next instruction are executed together, whichever workgroups they belong to. An order
says which waves go first where they need not agree, so that a result that depends on it is found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.verification.amdgcn.checks import ALL, Access, BadAccess, Definedness, Fault, Journal
from anymla.verification.amdgcn.memory import GARBAGE, Memory, SharedMemory
from anymla.verification.amdgcn.parse import Instruction

Array = NDArray[Any]
U8, U32, U64, I64 = np.uint8, np.uint32, np.uint64, np.int64

VCC, M0, EXEC, SCC = 106, 124, 126, 253
SCALARS = 256
"""Register numbers below are scalar, those above vector registers, accumulation registers last."""

ORDERS = ("lockstep", "forward", "reverse", "clock")
"""lockstep: all waves together. forward, reverse: wave by wave of a workgroup, each up to its next barrier.
clock: by a crude clock, for hand-written code that reuses LDS without a barrier because the readers are long
done, or a register because its load is; that is then a note, since what depends on the clock is undecided.
What was never written starts as NaN there too, but is not followed: such code lets lanes compute that nobody
reads."""

MOST_STEPS = 20_000_000
"""Steps of groups of waves after which a kernel is said not to end: minutes."""

Run = Callable[["Machine"], None]
Landing = Callable[["Machine", Array], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A decoded instruction.

    Attributes:
        run: Executes it for the waves of the current group.
        instruction: As it was written.
        reads, writes: Register numbers.
        trusts: Registers that decide something: an address, a stored value, a branch, the execution mask.
        spread: How an undefined source spreads: "lanes" to the same lane, "all" to every lane, "choice" of
            the first two where a mask chooses them, "upward" not from an upper half of a pair to a lower
            one, "" not at all or by itself.
        lower: Of "upward", the sources of the first register written.
        halves: Of a dual instruction.
        counter: Of a load whose data come back in the order in which they were asked for.
        flow: "" for one that goes on behind itself, else "branch", "barrier", its halves "signal" and "wait",
            or "end".
        target: Of a branch.
        ticks: Of the crude clock.
        touches: All registers named above.
    """

    run: Run
    instruction: Instruction
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    trusts: tuple[int, ...] = ()
    spread: str = "lanes"
    flow: str = ""
    target: int = -1
    ticks: int = 4
    touches: frozenset[int] = field(default_factory=frozenset)
    lower: tuple[int, ...] = ()
    halves: "tuple[Step, ...]" = ()
    counter: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Flight:
    """One access that is under way.

    Attributes:
        counter: Which counter waits for it.
        registers: What it loads.
        land: Puts data into LDS once it is waited for; None for none.
        accesses: To LDS. A barrier does not end them: they meet what other waves do behind it.
    """

    counter: str
    registers: tuple[int, ...]
    land: Landing | None = None
    accesses: tuple[Access, ...] = ()

    @property
    def matters(self) -> bool:
        """Whether anything depends on when it lands."""
        return bool(self.registers or self.land or self.accesses)


class Group:
    """Waves that execute the same instruction; `signalled`: they are between the halves of a barrier."""

    __slots__ = ("at", "clock", "flights", "in_flight", "party", "pc", "signalled", "waves")

    def __init__(
        self,
        waves: Array,
        pc: int,
        party: int,
        clock: int = 0,
        flights: tuple[Flight, ...] = (),
        signalled: bool = False,
    ) -> None:
        self.waves, self.pc, self.party, self.clock, self.signalled = waves, pc, party, clock, signalled
        first, last = int(waves[0]), int(waves[-1])
        self.at: Any = slice(first, last + 1) if last - first + 1 == len(waves) else waves
        self.flights: tuple[Flight, ...] = ()
        self.in_flight: set[int] = set()
        self.set_flights(flights)

    def add(self, flight: Flight) -> None:
        """One access more is under way."""
        if self.flights or flight.matters:
            self.flights = (*self.flights, flight)
            self.in_flight.update(flight.registers)

    def set_flights(self, flights: tuple[Flight, ...]) -> None:
        """What is under way; what loads nothing matters only behind something that does."""
        first = next((i for i, f in enumerate(flights) if f.matters), len(flights))
        self.flights = flights[first:]
        self.in_flight = {register for flight in self.flights for register in flight.registers}


class _Gathered:
    """Registers of waves that do not lie side by side; a register that is read is a copy."""

    __slots__ = ("array", "at")

    def __init__(self, array: Array, at: Array) -> None:
        self.array, self.at = array, at

    def __getitem__(self, register: int) -> Array:
        found: Array = self.array[register][self.at]
        return found


@dataclass(frozen=True)
class Launch:
    """What the machine needs to know of a kernel beside its steps.

    Attributes:
        name: Of the kernel.
        steps: The program.
        leaders: Indices that branches lead to.
        vectors: Vector registers, accumulation registers included.
        lanes: Of a wave.
        scratch: Bytes a lane.
        limits: What each counter of accesses under way can count to.
    """

    name: str
    steps: Sequence[Step]
    leaders: frozenset[int]
    vectors: int
    lanes: int
    scratch: int
    limits: Mapping[str, int]


class Machine:
    """A batch of workgroups and the group of waves that is executing.

    Attributes:
        v, s: Vector and scalar registers of the current group, by number.
        mask: [waves, lanes] of the current group: which lanes execute.
        full: Whether all do.
        waves: Of the current group, in the batch.
        lanes: Of a wave.
        memory, shared: Global memory and LDS.
        aligned: Whether a lane's access that is not aligned is refused, though the chip takes it.
        counts: How often each step was executed, by any wave.
        total: Steps of groups so far.
        notes: What is undecided.
        taken: Whether each wave of the group takes the branch that was just executed.
        has_source: In a DPP instruction, the lanes whose source is there.
    """

    mask: Array
    full: bool
    taken: Any
    has_source: Array

    def __init__(
        self,
        launch: Launch,
        memory: Memory,
        workgroups: Array,
        waves_a_workgroup: int,
        shared_bytes: int,
        order: str = "lockstep",
    ) -> None:
        self.launch, self.memory, self.workgroups, self.order = launch, memory, workgroups, order
        self.lanes = launch.lanes
        self.num_waves = len(workgroups) * waves_a_workgroup
        # The first waves of all workgroups lie side by side, then the second ones.
        self.wave_of = np.repeat(np.arange(waves_a_workgroup), len(workgroups))
        self.workgroup_of = np.tile(np.arange(len(workgroups)), waves_a_workgroup)
        self.vectors = np.full((launch.vectors, self.num_waves, self.lanes), GARBAGE, U32)
        self.scalars = np.full((128, self.num_waves), GARBAGE, U32)
        self.scc_of = np.zeros(self.num_waves, bool)
        self.mode = np.zeros(self.num_waves, U32)
        self.defined = Definedness(SCALARS + launch.vectors, self.num_waves, self.lanes, order != "clock")
        # Hand-written code loads ahead from where nothing has put an address yet, and drops what comes.
        self.aligned = order != "clock"
        self.shared = SharedMemory(len(workgroups), shared_bytes, self.aligned)
        self.scratch = np.full((self.num_waves, self.lanes, launch.scratch // 4), GARBAGE, U32)
        self.journal = Journal(self.shared.num_bytes, self.wave_of)
        self.counts = [0] * len(launch.steps)
        self.total = 0
        self.notes: set[str] = set()
        self._waiting: list[Group] = []
        self._carried: list[Access] = []
        self.set_scalar(EXEC, 0xFFFFFFFF)
        self.set_scalar(EXEC + 1, 0xFFFFFFFF if self.lanes == 64 else 0)

    # Registers before the first instruction.

    def set_scalar(self, register: int, values: Any) -> None:
        """Give a scalar register a value for each wave of the batch."""
        self.scalars[register] = values
        self.defined.write(register, slice(None), self.defined.all)  # type: ignore[arg-type]

    def set_vector(self, register: int, values: Any) -> None:
        """Give a vector register, counted from 0, values [waves, lanes]."""
        self.vectors[register] = values
        self.defined.write(SCALARS + register, slice(None), self.defined.all)  # type: ignore[arg-type]

    # What steps use.

    @property
    def scc(self) -> Array:
        """The condition code of each wave of the group."""
        found: Array = self.scc_of[self.at]
        return found

    @scc.setter
    def scc(self, values: Any) -> None:
        self.scc_of[self.at] = values

    def put(self, register: int, values: Any) -> None:
        """Write a vector register of the lanes that execute; uint32 that broadcasts to [waves, lanes]."""
        row = self.vectors[register]
        if self.full:
            row[self.at] = values
        elif isinstance(self.at, slice):
            np.copyto(row[self.at], values, where=self.mask)
        else:
            row[self.at] = np.where(self.mask, values, row[self.at])

    def put_all(self, register: int, values: Array) -> None:
        """Write vector registers from one on, whatever lanes execute; [registers, waves, lanes]."""
        self.vectors[register : register + len(values), self.at] = values

    def put_scalar(self, register: int, values: Any) -> None:
        """Write a scalar register; uint32 that broadcasts to [waves]."""
        self.scalars[register, self.at] = values
        if register >= EXEC:
            self._look_at_mask()

    def bits(self, register: int) -> Array:
        """A lane mask in scalar registers as [waves] uint64."""
        low: Array = self.s[register].astype(U64)
        return low if self.lanes == 32 else low | self.s[register + 1].astype(U64) << U64(32)

    def put_bits(self, register: int, bits: Array) -> None:
        """Write a lane mask [waves] uint64 into scalar registers."""
        self.put_scalar(register, (bits & U64(0xFFFFFFFF)).astype(U32))
        if self.lanes == 64:
            self.put_scalar(register + 1, (bits >> U64(32)).astype(U32))

    def unpack(self, bits: Array) -> Array:
        """[waves] uint64 to [waves, lanes] bool."""
        raw = np.ascontiguousarray(bits).view(U8).reshape(-1, 8)[:, : self.lanes // 8]
        return np.unpackbits(raw, axis=1, bitorder="little").view(bool)

    def pack(self, lanes: Array) -> Array:
        """[waves, lanes] bool to [waves] uint64."""
        packed = np.zeros((len(self.waves), 8), U8)
        packed[:, : self.lanes // 8] = np.packbits(
            np.broadcast_to(lanes, self.mask.shape), axis=1, bitorder="little"
        )
        return packed.view(U64)[:, 0]

    @property
    def executing(self) -> Array | None:
        """The mask as memory takes it: None if all lanes execute."""
        return None if self.full else self.mask

    def execute(self, step: Step, waves: Array) -> None:
        """Execute a step in the place of the current one, for some waves [waves] bool of the group."""
        executing, full = self.mask, self.full
        self.mask, self.full = executing & waves[:, None], full and bool(waves.all())
        self._look_before(step)
        step.run(self)
        self.mask, self.full = executing, full

    def fly(
        self,
        counter: str,
        registers: Sequence[int] = (),
        land: Landing | None = None,
        accesses: Sequence[Access] = (),
    ) -> None:
        """Note an access that is under way until a counter is waited for."""
        self.group.add(Flight(counter, tuple(registers), land, tuple(accesses)))
        # A counter that is full holds the next access up until the oldest has landed.
        self.wait(counter, self.launch.limits[counter])

    def wait(self, counter: str, most: int) -> None:
        """Let accesses of a counter land until at most so many are under way."""
        flights = self.group.flights
        counted = [flight for flight in flights if flight.counter == counter]
        if len(counted) <= most:
            return
        # Scalar loads come back in any order, so that only waiting for all of them says something.
        if (
            most
            and counter in ("lgkmcnt", "kmcnt")
            and any(flight.registers and flight.registers[0] < SCALARS for flight in counted)
        ):
            return
        landed = set(counted[: len(counted) - most])
        for flight in counted:
            if flight in landed and flight.land is not None:
                flight.land(self, self.waves)
        self.group.set_flights(tuple(flight for flight in flights if flight not in landed))

    def note_shared(self, places: Array, size: int, owners: Array, words: Array | None = None) -> Access:
        """Enter an access to LDS into the journal, and return it.

        Args:
            places: [n], from `SharedMemory.places`.
            size: Bytes.
            owners: [n], the wave of the batch that each is of.
            words: What is written, [n, words]; None for a read.
        """
        access = Access(owners, places, size, self.step.instruction, self.group.clock, words)
        self.journal.entries.append(access)
        if self.group.signalled:
            # Between the halves of a barrier, it may meet what others do before and behind it.
            self._carried.append(access)
        return access

    def owners(self, mask: Array | None) -> Array:
        """The wave of the batch of each lane of a mask, flat."""
        return np.repeat(self.waves, self.lanes) if mask is None else self.waves[np.nonzero(mask)[0]]

    def fault(self, what: str, wave: int, lane: int = -1, address: int = -1) -> Fault:
        """A fault of the current instruction; `wave` counts in the batch."""
        workgroup = self.workgroups[self.workgroup_of[wave]].tolist()
        instruction = self.step.instruction
        return Fault(self.launch.name, instruction, workgroup, int(self.wave_of[wave]), lane, address, what)

    # The loop.

    def run(self, most: int = MOST_STEPS) -> None:
        """Execute every wave to its end.

        Args:
            most: Steps of groups after which a kernel is said not to end.

        Raises:
            Fault: the kernel did what it must not do.
        """
        waiting, groups = self._waiting, self._parties()
        with np.errstate(all="ignore"):
            while groups or waiting:
                if not groups:
                    self._end_of_epoch()
                    groups = self._merged(list(waiting))
                    waiting.clear()
                groups = self._merged(groups)
                index = min(range(len(groups)), key=lambda i: self._priority(groups[i]))
                group = groups.pop(index)
                if self.total > most:
                    raise self.fault(f"it does not end within {most} steps", int(group.waves[0]))
                groups += self._advance(group, min((g.clock for g in groups), default=None))
            self._end_of_epoch()

    def _parties(self) -> list[Group]:
        """Waves that may be executed together."""
        everyone = np.arange(self.num_waves)
        if self.order in ("lockstep", "clock"):
            return [Group(everyone, 0, 0)]
        sign = 1 if self.order == "forward" else -1
        numbers = range(int(self.wave_of.max()) + 1)
        return [Group(everyone[self.wave_of == number], 0, sign * number) for number in numbers]

    def _priority(self, group: Group) -> tuple[int, int]:
        return (group.clock if self.order == "clock" else group.party), group.pc

    def _merged(self, groups: list[Group]) -> list[Group]:
        if len(groups) == 1:
            return groups
        alike: dict[Any, list[Group]] = {}
        for group in groups:
            clock = group.clock if self.order == "clock" else 0
            key = group.pc, group.party, clock, group.flights, group.signalled
            alike.setdefault(key, []).append(group)
        merged = []
        for (pc, party, _, flights, signalled), same in alike.items():
            waves = np.sort(np.concatenate([group.waves for group in same])) if same[1:] else same[0].waves
            merged.append(Group(waves, pc, party, max(group.clock for group in same), flights, signalled))
        return merged

    def _end_of_epoch(self) -> None:
        """All waves are at a barrier, or done."""
        latest = max((group.clock for group in self._waiting), default=0)
        for group in self._waiting:
            group.clock = latest
        race = self.journal.conflicts()
        self.journal.entries += self._carried
        self._carried = []
        if race is None:
            return
        earlier, later, place, wave = race
        verbs = ["reads", "writes"]
        what = (
            f"LDS race: it {verbs[later.writes]} what line {earlier.instruction.line} "
            f"`{earlier.instruction.text}` of another wave {verbs[earlier.writes]}, with no barrier between"
        )
        self.step = Step(_nothing, later.instruction)
        fault = self.fault(what, wave, -1, place % self.shared.stride)
        if self.order != "clock":
            raise fault
        self.notes.add(f"undecided after {abs(later.clock - earlier.clock)} ticks: {fault}")

    def _enter(self, group: Group) -> None:
        self.group, self.at, self.waves = group, group.at, group.waves
        if isinstance(group.at, slice):
            self.v: Any = self.vectors[:, group.at]
            self.s: Any = self.scalars[:, group.at]
        else:
            self.v, self.s = _Gathered(self.vectors, group.at), _Gathered(self.scalars, group.at)
        self._look_at_mask()

    def _look_at_mask(self) -> None:
        self.exec = self.bits(EXEC)
        self.mask = self.unpack(self.exec)
        self.full = bool((self.exec == self.defined.all).all())

    def _advance(self, group: Group, others_clock: int | None) -> list[Group]:
        """Execute a group up to where it parts, waits, ends, or meets a place that branches lead to."""
        self._enter(group)
        steps, leaders, counts, partial = (
            self.launch.steps,
            self.launch.leaders,
            self.counts,
            self.defined.partial,
        )
        limit = others_clock if self.order == "clock" else None
        pc, size = group.pc, len(group.waves)
        while True:
            step = self.step = steps[pc]
            if group.in_flight and not step.touches.isdisjoint(group.in_flight):
                self._check_flights(step)
            if not partial.isdisjoint(step.touches):
                for part in step.halves or (step,):
                    self._watch(part)
            counts[pc] += size
            group.clock += step.ticks
            pc += 1
            if step.flow:
                break
            try:
                step.run(self)
            except BadAccess as bad:
                wave, lane = bad.place
                raise self.fault(bad.what, self.waves[wave], lane, bad.address) from None
            if pc in leaders or (limit is not None and group.clock > limit):
                break
        self.total += pc - group.pc
        group.pc = pc
        if step.flow == "end":
            return []
        if step.flow in ("barrier", "signal"):
            self._signal(group)
        if step.flow in ("barrier", "wait"):
            if not group.signalled:
                raise self.fault("it waits for a barrier that it has not signalled", int(group.waves[0]))
            group.signalled = False
            self._waiting.append(group)
            return []
        return self._branch(group, step) if step.flow == "branch" else [group]

    def _signal(self, group: Group) -> None:
        """Others need not wait for these waves from here on; what they have under way may land behind."""
        if group.signalled:
            raise self.fault("it signals a barrier that it has not waited for", int(group.waves[0]))
        group.signalled = True
        self._carried += [access for flight in group.flights for access in flight.accesses]

    def _branch(self, group: Group, step: Step) -> list[Group]:
        step.run(self)
        taken = self.taken
        if taken is True or taken.all():
            group.pc = step.target
            return [group]
        if not taken.any():
            return [group]
        stays, goes = group.waves[~taken], group.waves[taken]
        return [
            Group(stays, group.pc, group.party, group.clock, group.flights, group.signalled),
            Group(goes, step.target, group.party, group.clock, group.flights, group.signalled),
        ]

    def _look_before(self, step: Step) -> None:
        """What is looked at before a step is executed."""
        if not step.touches.isdisjoint(self.group.in_flight):
            self._check_flights(step)
        if not step.touches.isdisjoint(self.defined.partial):
            self._watch(step)

    def _check_flights(self, step: Step) -> None:
        """A step may touch no register in flight, but a load may follow one into the same register."""
        for flight in self.group.flights:
            early = step.touches.intersection(flight.registers)
            if step.counter and step.counter == flight.counter:
                early -= set(step.writes).difference(step.reads, step.trusts)
            if early:
                what = f"{self._named(min(early))} is used before its load was waited for"
                if self.order != "clock":
                    raise self.fault(what, int(self.waves[0]))
                self.notes.add(f"undecided: line {step.instruction.line} `{step.instruction.text}`: {what}")

    def _watch(self, step: Step) -> None:
        """Follow what is not defined through one step, before it is executed."""
        defined, at = self.defined, self.at
        bad = defined.undefined(step.trusts, at)
        if bad is not None and (bad & self.exec).any():
            wave = int(np.argmax((bad & self.exec) != 0))
            lane = int(np.argmax(self.unpack(bad & self.exec)[wave]))
            names = ", ".join(self._named(r) for r in step.trusts if r in defined.partial)
            raise self.fault(f"{names} decides something but was never written", int(self.waves[wave]), lane)
        undefined = None
        if step.spread == "choice":
            undefined = self._undefined_choice(step)
        elif step.spread:
            undefined = defined.undefined(step.reads, at)
        if undefined is not None:
            undefined = undefined & self.exec
            if step.spread == "all":
                undefined = np.where(undefined != 0, ALL, U64(0))
        lower = undefined
        if step.spread == "upward" and undefined is not None:
            lower = defined.undefined(step.lower, at)
        whole = np.full(len(self.waves), defined.all)
        for register in step.writes:
            bad = lower if register == step.writes[0] else undefined
            if register < SCALARS:
                defined.write(register, at, whole, None if bad is None else np.where(bad != 0, ALL, U64(0)))
            else:
                defined.write(register, at, whole if step.spread == "all" else self.exec, bad)

    def _undefined_choice(self, step: Step) -> Array | None:
        """Of a choice between two sources, only what is chosen counts."""
        first, second, *mask = step.reads
        if self.defined.undefined(mask, self.at) is not None:
            return np.full(len(self.waves), ALL)
        chosen, nothing = self.bits(mask[0]), np.zeros(len(self.waves), U64)
        one, other = (self.defined.undefined([register], self.at) for register in (first, second))
        return (nothing if one is None else one & ~chosen) | (nothing if other is None else other & chosen)

    def _named(self, register: int) -> str:
        return f"s{register}" if register < SCALARS else f"vector register {register - SCALARS}"


def _nothing(machine: Machine) -> None:
    """A step that does nothing."""
