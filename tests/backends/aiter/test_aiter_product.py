"""A sample of the whole product: against AITER's double the adapter is right, or refuses with a reason."""

import pytest
from cases import Case, run, sample

COUNT, GROUPS = 5000, 50


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_adapter_is_right_or_refuses_and_never_ends_the_process(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: dict[str, int] = {}
    for case in sample(COUNT)[group::GROUPS]:
        with monkeypatch.context() as patch:
            try:
                outcome = run(case, patch)
            except BaseException as error:
                raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        outcomes[outcome if outcome == "right" else "refused"] = outcomes.get(outcome, 0) + 1
    assert outcomes.get("right", 0) > 10, outcomes


def test_the_sample_has_no_case_twice() -> None:
    cases: list[Case] = sample(COUNT)
    assert len(set(cases)) == len(cases) == COUNT
