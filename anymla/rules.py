"""Rules: what a backend accepts of one fact, and the words in which it refuses the rest."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile


class Rule:
    """A condition on one fact. `needs` completes the sentence "<name> got <value>; needs ..."."""

    needs: str = "anything"

    def accepts(self, value: object) -> bool:
        """Whether the fact may have this value."""
        return True

    def refusal(self, value: object) -> str | None:
        """Why the value is refused, or None if it is not."""
        return None if self.accepts(value) else f"got {shown(value)}; needs {self.needs}"

    def nearest(self, value: object) -> object | None:
        """The accepted value that changes least, or None if the rule knows none."""
        return value if self.accepts(value) else None

    def padded(self, value: int) -> int:
        """What an accepted count is padded to: itself, unless the rule says more."""
        return value


ANY = Rule()
"""Accepts every value; says that the backend does not care."""


@dataclass(frozen=True)
class OneOf(Rule):
    """A closed list of values, the preferred one first."""

    values: tuple[object, ...]

    @property
    def needs(self) -> str:  # type: ignore[override]
        return listed(self.values)

    def accepts(self, value: object) -> bool:
        return value in self.values

    def nearest(self, value: object) -> object | None:
        if value in self.values:
            return value
        if isinstance(value, int):
            return min(
                (v for v in self.values if isinstance(v, int)), key=lambda v: abs(v - value), default=None
            )
        return max(self.values, key=lambda v: likeness(v, value), default=None)


@dataclass(frozen=True)
class MultipleOf(Rule):
    """Positive multiples of a number."""

    divisor: int

    @property
    def needs(self) -> str:  # type: ignore[override]
        return f"a multiple of {self.divisor}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, int) and value > 0 and value % self.divisor == 0

    def nearest(self, value: object) -> object | None:
        return max(self.divisor, -(-value // self.divisor) * self.divisor) if isinstance(value, int) else None


@dataclass(frozen=True)
class Between(Rule):
    """Numbers from low to high, both included."""

    low: int
    high: int

    @property
    def needs(self) -> str:  # type: ignore[override]
        return f"{self.low} to {self.high}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    def nearest(self, value: object) -> object | None:
        return min(max(value, self.low), self.high) if isinstance(value, int) else None


@dataclass(frozen=True)
class PadsTo(Rule):
    """Counts up to the largest bucket; a count between buckets is padded to the next one."""

    buckets: tuple[int, ...]

    @property
    def needs(self) -> str:  # type: ignore[override]
        return f"1 to {self.buckets[-1]}, padded to {listed(self.buckets)}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, int) and 1 <= value <= self.buckets[-1]

    def padded(self, value: int) -> int:
        """The bucket that holds `value`."""
        return next(bucket for bucket in self.buckets if bucket >= value)

    def nearest(self, value: object) -> object | None:
        return min(max(value, 1), self.buckets[-1]) if isinstance(value, int) else None


@dataclass(frozen=True)
class Offers(Rule):
    """The features that a backend has; a call may ask for any subset."""

    offered: frozenset[object]

    @property
    def needs(self) -> str:  # type: ignore[override]
        return f"no more than {listed(sorted(map(str, self.offered)))}" if self.offered else "none"

    def accepts(self, value: object) -> bool:
        return isinstance(value, frozenset) and value <= self.offered

    def refusal(self, value: object) -> str | None:
        if self.accepts(value):
            return None
        assert isinstance(value, frozenset)
        return f"lacks {listed(sorted(map(str, value - self.offered)), 'and')}"

    def nearest(self, value: object) -> object | None:
        return value & self.offered if isinstance(value, frozenset) else None


@dataclass(frozen=True)
class Asks(Rule):
    """Calls that ask for at least one of some features; for conditions, not for offers."""

    features: frozenset[object]

    @property
    def needs(self) -> str:  # type: ignore[override]
        return f"one of {listed(sorted(map(str, self.features)))}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, frozenset) and bool(value & self.features)


def one_of(*values: object) -> OneOf:
    """Accept exactly these values, the preferred one first."""
    return OneOf(values)


def pads_to(*buckets: int) -> PadsTo:
    """Accept counts up to the last bucket, padding to the next."""
    return PadsTo(buckets)


def offers(*features: object) -> Offers:
    """Offer exactly these features."""
    return Offers(frozenset(features))


def asks(*features: object) -> Asks:
    """Accept calls that ask for any of these features."""
    return Asks(frozenset(features))


def likeness(one: object, other: object) -> int:
    """How long two names begin alike, if that is long enough to mean the same family of chips or formats."""
    pairs = zip(str(one), str(other), strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return length if length >= 3 else 0


def shown(value: object) -> str:
    """A value as a refusal prints it."""
    return listed(sorted(map(str, value)), "and") if isinstance(value, frozenset) else str(value)


def listed(values: Iterable[object], last: str = "or") -> str:
    """`a, b or c`."""
    words = [str(v) for v in values]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
