"""A rule accepts, pads, refuses in its own words, and knows the nearest value that it would accept."""

import pytest

from anymla.rules import (
    ANY,
    Between,
    MultipleOf,
    PadsTo,
    Rule,
    asks,
    likeness,
    listed,
    offers,
    one_of,
    pads_to,
    shown,
)

REFUSALS = [
    (one_of("bf16", "fp16"), "fp32", "got fp32; needs bf16 or fp16", "bf16"),
    (one_of("gfx90a", "gfx942"), "gfx950", "got gfx950; needs gfx90a or gfx942", "gfx90a"),
    (
        one_of("bf16", "fp8_e4m3fnuz"),
        "fp8_e4m3fn",
        "got fp8_e4m3fn; needs bf16 or fp8_e4m3fnuz",
        "fp8_e4m3fnuz",
    ),
    (one_of(16, 64, 128), 32, "got 32; needs 16, 64 or 128", 16),
    (one_of(512), 256, "got 256; needs 512", 512),
    (MultipleOf(16), 24, "got 24; needs a multiple of 16", 32),
    (MultipleOf(16), 0, "got 0; needs a multiple of 16", 16),
    (Between(1, 4), 8, "got 8; needs 1 to 4", 4),
    (pads_to(16, 32, 64, 128), 129, "got 129; needs 1 to 128, padded to 16, 32, 64 or 128", 128),
    (pads_to(16, 128), 0, "got 0; needs 1 to 128, padded to 16 or 128", 1),
    (offers("lse"), frozenset({"lse", "sinks"}), "lacks sinks", frozenset({"lse"})),
    (offers(), frozenset({"lse", "sinks"}), "lacks lse and sinks", frozenset()),
]


@pytest.mark.parametrize(("rule", "value", "words", "nearest"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_a_rule_writes_its_own_refusal_and_names_the_nearest_value(
    rule: Rule, value: object, words: str, nearest: object
) -> None:
    assert not rule.accepts(value)
    assert rule.refusal(value) == words
    assert rule.nearest(value) == nearest
    assert rule.accepts(nearest)


ACCEPTED = [
    (ANY, object),
    (one_of("bf16"), "bf16"),
    (MultipleOf(16), 48),
    (Between(1, 4), 4),
    (PadsTo((16, 128)), 17),
    (offers("lse", "sinks"), frozenset({"sinks"})),
    (offers(), frozenset()),
]


@pytest.mark.parametrize(("rule", "value"), ACCEPTED, ids=[type(rule).__name__ for rule, _ in ACCEPTED])
def test_an_accepted_value_has_no_refusal_and_is_its_own_nearest(rule: Rule, value: object) -> None:
    assert rule.accepts(value)
    assert rule.refusal(value) is None
    assert rule.nearest(value) == value


@pytest.mark.parametrize(("heads", "padded"), [(1, 16), (16, 16), (17, 128), (128, 128)])
def test_a_count_between_buckets_is_padded_to_the_next(heads: int, padded: int) -> None:
    assert pads_to(16, 128).padded(heads) == padded


def test_a_rule_without_buckets_pads_nothing() -> None:
    assert Between(1, 128).padded(12) == 12


def test_a_condition_on_features_holds_when_any_is_asked_for() -> None:
    needs_lse = asks("lse", "sinks")
    assert needs_lse.accepts(frozenset({"sinks", "graph"}))
    assert not needs_lse.accepts(frozenset({"graph"}))
    assert needs_lse.refusal(frozenset()) == "got nothing; needs one of lse or sinks"


NUMERIC = [MultipleOf(16), Between(1, 4), pads_to(16), offers("lse")]


@pytest.mark.parametrize("rule", NUMERIC, ids=[type(rule).__name__ for rule in NUMERIC])
def test_a_value_of_another_kind_is_refused_without_a_suggestion(rule: Rule) -> None:
    assert not rule.accepts("many")
    assert rule.nearest("many") is None


def test_names_are_alike_only_from_three_letters_on() -> None:
    assert likeness("fp8_e4m3fn", "fp8_e4m3fnuz") == 10
    assert likeness("fp32", "fp16") == 0


def test_lists_read_like_sentences() -> None:
    assert listed([]) == "nothing"
    assert listed(["a"]) == "a"
    assert listed("abc") == "a, b or c"
    assert shown(frozenset({"b", "a"})) == "a and b"
