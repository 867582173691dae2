"""The public names: complete, sorted, documented."""

import inspect
import pkgutil

import pytest

import anymla


def test_all_names_exist_and_are_sorted() -> None:
    assert sorted(anymla.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) == anymla.__all__
    assert all(hasattr(anymla, name) for name in anymla.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'decoed'"):
        anymla.decoed  # noqa: B018


@pytest.mark.parametrize("name", [n for n in anymla.__all__ if callable(getattr(anymla, n))])
def test_a_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(anymla, name)
    assert thing.__doc__ and not thing.__doc__.startswith(name + "("), f"{name} has no docstring of its own"
    if inspect.isfunction(thing):
        parameters = list(inspect.signature(thing).parameters)
        assert "Args:" in thing.__doc__ or not parameters, name
        missing = [p for p in parameters if f"\n        {p}: " not in thing.__doc__]
        assert not missing, f"{name} does not document {missing}"
        returns = inspect.signature(thing).return_annotation
        assert "Returns:" in thing.__doc__ or returns is None, name


def test_no_public_name_is_a_modules() -> None:
    """Whoever imports the module would find it in the place of the name."""
    modules = {module.name for module in pkgutil.iter_modules(anymla.__path__)}
    assert modules.isdisjoint(anymla.__all__)
