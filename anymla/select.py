"""Which backend takes a problem on a machine, and why the others do not: pure, cached, stdlib only."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from anymla.arguments import check_count, check_name, shown
from anymla.backends import BACKENDS, Backend
from anymla.errors import NoBackend, Reasons, UnknownBackend
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import NEWEST, PACKAGES, Machine
from anymla.hardware.quirks import QUIRKS, Quirk, Weighed
from anymla.problem import (
    COUNTS,
    DTYPE_NAMES,
    FORMAT_NAMES,
    KV_FORMAT_NAMES,
    OPS,
    Feature,
    Problem,
)
from anymla.rules import Rule, likeness, listed, one_of

P = ParamSpec("P")
T = TypeVar("T")
TPHeads = tuple[tuple[int, int], ...]
"""Pairs of a tensor parallel size and the local heads that it leaves."""


@dataclass(frozen=True)
class Verdict:
    """What one backend would do with a problem on a machine.

    Attributes:
        backend: The row that comes closest, of those with the backend's name.
        accepted: Whether it takes the call.
        reasons: Every reason why not.
        quirks: The quirks that apply to the call.
        knobs: What those quirks set for its plan.
        padding: Local heads and what they are padded to; None if it cannot take that many.
        nearest: The nearest change that would make a refused backend pass, "" if there is none.
    """

    backend: Backend
    accepted: bool
    reasons: tuple[str, ...]
    quirks: tuple[Quirk, ...]
    knobs: Mapping[str, int]
    padding: tuple[int, int] | None
    nearest: str

    @property
    def yields(self) -> bool:
        """Whether "auto" takes another backend that accepts before this one."""
        return any(quirk.yields for quirk in self.quirks)

    @property
    def price(self) -> float:
        """How many times the work of the real heads is done, because of padding."""
        return self.padding[1] / self.padding[0] if self.padding else 1.0

    def __str__(self) -> str:
        notes = (
            [] if self.price == 1 or self.padding is None else ["{} heads padded to {}".format(*self.padding)]
        )
        notes += map(str, self.quirks) if self.accepted else []
        return f"{self.backend.name}: " + "; ".join([*(self.reasons or ["accepts"]), *notes])


@dataclass(frozen=True)
class Choice:
    """The backend that takes a problem, with all that was weighed.

    Attributes:
        backend: The chosen row.
        problem: What was asked.
        machine: Where it runs.
        verdicts: One verdict a backend, in order of preference.
        knobs: What quirks set for the plan.
    """

    backend: Backend
    problem: Problem
    machine: Machine
    verdicts: tuple[Verdict, ...]
    knobs: Mapping[str, int]

    def __str__(self) -> str:
        words = self.problem.op.replace("_", " ")
        lines = [f"{self.backend.name} serves this {words} on {self.machine.arch}:"]
        return "\n  ".join(lines + [str(verdict) for verdict in self.verdicts])


class _Remembered(Generic[P, T]):
    """A question whose answers are kept, by what is asked and by what manifests read beside it."""

    def __init__(self, question: Callable[P, T]) -> None:
        @lru_cache(maxsize=4096)
        def answered(surroundings: object, *asked: P.args, **named: P.kwargs) -> T:
            return question(*asked, **named)

        self._answered: Callable[..., T] = answered
        self._question = question
        self.cache_clear = answered.cache_clear
        update_wrapper(self, question)

    def __call__(self, *asked: P.args, **named: P.kwargs) -> T:
        # A manifest that nobody imported yet has told nothing that could be out of date.
        imported = (sys.modules.get(manifest) for manifest in dict.fromkeys(row.manifest for row in BACKENDS))
        try:
            return self._answered(tuple(one.surroundings() for one in imported if one), *asked, **named)
        except TypeError:
            pass
        # What cannot be remembered is of no kind that may be asked about: the question itself says so.
        return self._question(*asked, **named)


@_Remembered
def explain(problem: Problem, machine: Machine, tp_heads: TPHeads = ()) -> tuple[Verdict, ...]:
    """Say what every backend would do with a problem on a machine.

    Args:
        problem: The facts of a call.
        machine: From `machine_named` or `this_machine`.
        tp_heads: Other tensor parallel sizes with their local heads; `Verdict.nearest` may suggest one.

    Returns:
        One verdict a backend, in order of preference, each with all of its reasons.

    Raises:
        InvalidInput: the problem has an unknown name, or a count that cannot be, or the machine is none.
    """
    check(problem, machine)
    return tuple(
        _verdict(name, problem, machine, tp_heads) for name in dict.fromkeys(b.name for b in BACKENDS)
    )


@_Remembered
def choose(problem: Problem, machine: Machine, backend: str = "auto") -> Choice:
    """Choose the preferred backend of those that take a problem, or the named one, without falling back.

    Args:
        problem: The facts of a call.
        machine: From `machine_named` or `this_machine`.
        backend: A name in BACKENDS, or "auto".

    Raises:
        InvalidInput: the problem has an unknown name, or a count that cannot be, or the machine is none.
        UnknownBackend: no row has that name.
        NoBackend: nothing, or not the named backend, takes it; the message gives every reason.
    """
    verdicts = explain(problem, machine)
    names = [verdict.backend.name for verdict in verdicts]
    if not isinstance(backend, str) or backend not in ("auto", *names):
        raise UnknownBackend(backend, names)
    asked = [verdict for verdict in verdicts if backend in ("auto", verdict.backend.name)]
    verdict = preferred(asked)
    if verdict is not None:
        return Choice(verdict.backend, problem, machine, verdicts, verdict.knobs)
    who = "no backend can" if backend == "auto" else f"backend {backend!r} cannot"
    lines = [f"{who} serve this {problem.op.replace('_', ' ')} on {machine.arch}:"]
    for verdict in asked:
        lines.append(f"  {verdict.backend.name}: {'; '.join(verdict.reasons)}")
        if verdict.nearest:
            lines.append(f"    {verdict.nearest}")
    raise NoBackend("\n".join(lines), asked)


def preferred(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The first that accepts and does not yield, else the first that accepts, else None."""
    return min((one for one in verdicts if one.accepted), key=lambda one: one.yields, default=None)


def library_report(machine: Machine) -> dict[str, dict[str, object]]:
    """What each manifest knows of its library on a machine, by the name of the backend that calls it."""
    return {name: manifest.report(machine) for name, manifest in _manifests(machine).items()}


def tried(machine: Machine) -> Machine:
    """The machine with what comes of importing its libraries in another process; a named one as it is."""
    if machine.assumed:
        return machine
    failures = [one for manifest in _manifests(machine).values() for one in manifest.tried(machine).items()]
    return replace(machine, failures=tuple(failures))


def _manifests(machine: Machine) -> dict[str, Any]:
    rows = (row for row in BACKENDS if row.manifest and row.arch.accepts(machine.arch))
    return {name: import_module(path) for name, path in {row.name: row.manifest for row in rows}.items()}


def check(problem: Problem, *machines: Machine) -> None:
    """Refuse what is no problem or machine, an unknown name or a count that cannot be, with every reason."""
    reasons = Reasons("problem")
    needs = "a Problem, such as Model.problem(op)"
    is_one = reasons.need(isinstance(problem, Problem), "problem", shown(problem), needs)
    for machine in machines:
        needs = "a Machine, from machine_named or this_machine"
        reasons.need(isinstance(machine, Machine), "machine", shown(machine), needs)
    if not is_one:
        reasons.raise_if_any()
    for name, known in (("op", OPS), ("q_dtype", DTYPE_NAMES), ("kv_format", FORMAT_NAMES)):
        check_name(reasons, name, getattr(problem, name), known)
    for name, least in COUNTS.items():
        check_count(reasons, name, getattr(problem, name), least)
    named = isinstance(problem.features, frozenset) and all(isinstance(f, Feature) for f in problem.features)
    reasons.need(named, "features", repr(problem.features), "a frozenset of Feature")
    reasons.raise_if_any()


def _verdict(name: str, problem: Problem, machine: Machine, tp_heads: TPHeads) -> Verdict:
    rows = [row for row in BACKENDS if row.name == name]
    row = min(rows, key=lambda row: _remoteness(row, problem, machine))
    reasons = _reasons(row, problem, machine)
    said = weighed(row, problem, machine)
    quirks = _quirks(row, problem, machine) + said.quirks
    heads = problem.num_heads
    padding = (heads, row.num_heads.padded(heads)) if row.num_heads.accepts(heads) else None
    return Verdict(
        backend=row,
        accepted=not reasons,
        reasons=reasons,
        quirks=quirks,
        knobs={quirk.knob: quirk.setting(problem) for quirk in quirks if quirk.knob},
        padding=(heads, said.lanes) if said.lanes else padding,
        nearest=_nearest(row, problem, machine, tp_heads) if reasons else "",
    )


def _facts_and_rules(row: Backend, problem: Problem, machine: Machine) -> Iterator[tuple[str, object, Rule]]:
    """Every fact with the rule of the same name."""
    yield "arch", machine.arch, row.arch
    for fact in fields(Problem):
        yield fact.name, getattr(problem, fact.name), getattr(row, fact.name)


def _whole_backend(row: Backend, name: str, rule: Rule) -> Rule:
    """A row's rule; for the operation that of all rows of its name, since a backend is refused as a whole."""
    rows = [other for other in BACKENDS if other.name == row.name]
    return (
        rule if name != "op" else one_of(*(op for op in OPS if any(other.op.accepts(op) for other in rows)))
    )


def _refused(row: Backend, problem: Problem, machine: Machine) -> list[tuple[str, object, Rule]]:
    return [one for one in _facts_and_rules(row, problem, machine) if not one[2].accepts(one[1])]


def _missing(row: Backend, machine: Machine) -> list[str]:
    return [package for package in row.packages if package not in dict(machine.packages)]


def _quirks(row: Backend, problem: Problem, machine: Machine) -> tuple[Quirk, ...]:
    packages = dict(machine.packages)
    return tuple(quirk for quirk in QUIRKS if quirk.applies(problem, row.name, machine.arch, packages))


def _reasons(row: Backend, problem: Problem, machine: Machine) -> tuple[str, ...]:
    reasons = [] if row.built else ["not built yet"]
    reasons += [f"package {package} is not installed" for package in _missing(row, machine)]
    reasons += [
        f"{name} {_whole_backend(row, name, rule).refusal(value)}"
        for name, value, rule in _refused(row, problem, machine)
    ]
    reasons += [quirk.refuse for quirk in _refusing(row, problem, machine)]
    return (*reasons, *weighed(row, problem, machine).reasons)


def weighed(row: Backend, problem: Problem, machine: Machine) -> Weighed:
    """What the manifest of a row says of a call that its rules let pass; nothing where it has none."""
    if not row.manifest or _missing(row, machine) or _refused(row, problem, machine):
        return Weighed(())
    said: Weighed = import_module(row.manifest).weigh(problem, machine)
    return said


def _remoteness(row: Backend, problem: Problem, machine: Machine) -> tuple[bool, bool, int, float, int]:
    """How far a row is from taking a problem: operation, chip, reasons, size of the change, padding."""
    refused = _refused(row, problem, machine)
    change = sum(_distance(value, rule.nearest(value)) for _, value, rule in refused)
    heads = row.num_heads.padded(problem.num_heads) if row.num_heads.accepts(problem.num_heads) else 0
    wrong_op, wrong_arch = not row.op.accepts(problem.op), not row.arch.accepts(machine.arch)
    # What a manifest says is one objection, however many words it takes.
    words = len(weighed(row, problem, machine).reasons)
    objections = len(_reasons(row, problem, machine)) - max(words - 1, 0)
    return wrong_op, wrong_arch, objections, change, heads


def _distance(value: object, other: object) -> float:
    if isinstance(value, frozenset) and isinstance(other, frozenset):
        return len(value - other)
    return 0.5 if likeness(value, other) else 1.0


def _nearest(row: Backend, problem: Problem, machine: Machine, tp_heads: TPHeads) -> str:
    """The nearest change that makes a row pass, in words; "" if there is none."""
    if not row.op.accepts(problem.op):
        return ""
    nearby = {name: rule.nearest(value) for name, value, rule in _refused(row, problem, machine)}
    arch = nearby.pop("arch", machine.arch)
    if arch is None or None in nearby.values():
        return ""
    missing = _missing(row, machine)
    packages = machine.packages + tuple((package, NEWEST) for package in missing)
    there = replace(machine, arch=str(arch), packages=packages)
    for place, changed in _candidates(row, _changed(problem, nearby), there, machine, tp_heads):
        if not any(objects(row, changed, place) for objects in (_refused, _refusing, _unlisted)):
            words = [] if place.arch == machine.arch else [f"on {place.arch}"]
            words += [f"after {PACKAGES[package].install}" for package in missing]
            words += _change_in_words(problem, changed, tp_heads)
            words += ["once it is built"] if words and not row.built else []
            return f"would pass {', '.join(words)}" if words else ""
    return ""


def _candidates(
    row: Backend, problem: Problem, there: Machine, here: Machine, tp_heads: TPHeads
) -> Iterator[tuple[Machine, Problem]]:
    """A changed problem; then, should a quirk refuse it, the same elsewhere, or with one more change."""
    yield there, problem
    if there.arch != here.arch:
        yield from ((replace(there, arch=arch), problem) for arch in ARCHES if row.arch.accepts(arch))
    looked_at = {name for quirk in _refusing(row, problem, there) for name in quirk.when}
    if _unlisted(row, problem, there):
        looked_at |= {"num_heads", "kv_format", "features"}
    if "num_heads" in looked_at:
        for _, heads in sorted(tp_heads, key=lambda pair: abs(pair[1] - problem.num_heads)):
            yield there, replace(problem, num_heads=heads)
    if "kv_format" in looked_at:
        for name in KV_FORMAT_NAMES:
            yield there, replace(problem, kv_format=name)
    if "features" in looked_at:
        yield there, replace(problem, features=frozenset())


def _refusing(row: Backend, problem: Problem, machine: Machine) -> list[Quirk]:
    return [quirk for quirk in _quirks(row, problem, machine) if quirk.refuse]


def _unlisted(row: Backend, problem: Problem, machine: Machine) -> tuple[str, ...]:
    return weighed(row, problem, machine).reasons


def _changed(problem: Problem, change: Mapping[str, Any]) -> Problem:
    return replace(problem, **change)


def _change_in_words(problem: Problem, changed: Problem, tp_heads: TPHeads) -> list[str]:
    sizes = {heads: tp for tp, heads in tp_heads}
    changes = []
    for name in (fact.name for fact in fields(Problem) if fact.name != "features"):
        value = getattr(changed, name)
        if value != getattr(problem, name):
            is_tp = name == "num_heads" and value in sizes
            changes.append(
                f"tensor parallel size {sizes[value]} ({value} heads)" if is_tp else f"{name} {value}"
            )
    words = [f"with {listed(changes, 'and')}"] if changes else []
    dropped = problem.features - changed.features
    return words + ([f"without {listed(sorted(map(str, dropped)), 'or')}"] if dropped else [])
