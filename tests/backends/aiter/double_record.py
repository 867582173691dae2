"""The record of a release, as its double and the calls of the adapter ask for it, with all that was asked.

A run against the double depends on a release only through these answers, so a release that answers all of
them alike would run alike.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any

from anymla.backends.aiter_mla import bindings, facts
from anymla.backends.aiter_mla.bindings import Binding, Parameter
from anymla.backends.aiter_mla.facts import Kernel, Lookup
from anymla.errors import InvalidInput

Asked = dict[tuple[str, tuple[object, ...]], object]
"""Name and arguments of a question to its answer."""
_arguments_of = Binding.arguments
_TENSOR = SimpleNamespace(shape=())
"""What is known of an argument that is a tensor."""


def _question(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note what is answered."""

    @wraps(method)
    def noted(self: "Record", *what: object) -> Any:
        answer = self.asked[method.__name__, what] = method(self, *what)
        return answer

    return noted


class Record:
    """One release on one chip.

    Attributes:
        asked: What was asked of it so far.
    """

    def __init__(self, release: str, arch: str) -> None:
        self.release, self.arch = release, arch
        self.asked: Asked = {}
        self._dispatch = facts.recorded_dispatch(release)

    @_question
    def since(self, release: str) -> bool:
        """Whether this is that release or one that is listed later."""
        return _place(self.release) >= _place(facts.canonical_release(release))

    def parameters(self, function: str) -> str:
        """Parameters of a function as Python writes them; what they decide is asked below."""
        text = facts.recorded_parameters(function, self.release)
        assert text is not None
        return text

    @_question
    def accepts(self, function: str, *names: str) -> bool:
        """Whether a function can be called with arguments of these names and no others."""
        offered = _offered(function, self.release)
        required = {parameter.name for parameter in offered if parameter.required}
        return required <= set(names) <= {parameter.name for parameter in offered}

    @_question
    def takes(self, function: str, name: str) -> bool:
        """Whether the adapter finds a parameter of that meaning."""
        return name in self._binding(function).names

    @_question
    def arguments(self, function: str, *ours: tuple[str, object]) -> tuple[tuple[str, str], ...] | str:
        """What the adapter makes of arguments: each value's name, "..." for a tensor, by its name there."""
        binding = self._binding(function)
        try:
            values = {name: _TENSOR if value == "..." else value for name, value in ours}
            given = _arguments_of(binding, **values)
        except InvalidInput as refusal:
            return str(refusal)
        return tuple((ours, theirs) for ours, theirs in binding.names.items() if theirs in given)

    def _binding(self, function: str) -> Binding:
        return _bound(function, self.release)

    @_question
    def look_up(self, q: str, kv: str, persistent: bool, heads: int, q_len: int) -> Lookup | None:
        """What a call looks up."""
        assert self._dispatch is not None
        return self._dispatch.look_up(self.arch, q, kv, persistent=persistent, heads=heads, q_len=q_len)

    @_question
    def lse_from(self, persistent: bool) -> str:
        """Where an lse comes from."""
        assert self._dispatch is not None
        return self._dispatch.lse_from[facts.mode(persistent)]

    @_question
    def causal_rows(self) -> bool:
        """Whether a causal decode looks for rows of causal 1."""
        assert self._dispatch is not None
        return self._dispatch.causal_rows

    @_question
    def tokens_fold_in_order(self) -> bool:
        """Whether heads folded into rows keep the order of several query tokens."""
        assert self._dispatch is not None
        return self._dispatch.tokens_fold_in_order

    @_question
    def whole_tails(self) -> bool:
        """Whether a plan never cuts off fewer keys than there are query tokens."""
        assert self._dispatch is not None
        return self._dispatch.whole_tails

    @_question
    def is_among(self, code_object: str, *digests: str) -> bool:
        """Whether the bytes of a code object are some of these."""
        return facts.recorded_digest(self.release, self.arch, code_object) in digests

    @_question
    def code_objects(self, *key: str | int) -> tuple[str, ...]:
        """Code objects of the rows with a key."""
        return tuple(kernel.code_object for kernel in _kernels(self.release, self.arch) if kernel[:-1] == key)

    @_question
    def reduces(self, heads: int) -> bool:
        """Whether the reducer has so many heads."""
        return heads in facts.recorded_reducers(self.release, 512)

    def answers_like(self, asked: Asked) -> bool:
        """Whether this release gives the same answers."""
        return all(getattr(self, name)(*what) == answer for (name, what), answer in asked.items())


@lru_cache(maxsize=512)
def _offered(function: str, release: str) -> tuple[Parameter, ...]:
    return bindings.recorded(function, release) or ()


@lru_cache(maxsize=512)
def _bound(function: str, release: str) -> Binding:
    found = bindings.bind(function, _offered(function, release), "this AITER")
    assert isinstance(found, Binding), found
    return found


@lru_cache(maxsize=256)
def _kernels(release: str, arch: str) -> tuple[Kernel, ...]:
    return facts.recorded_kernels(release, arch)


@lru_cache(maxsize=256)
def _place(release: str) -> int:
    return facts.releases().index(release)
