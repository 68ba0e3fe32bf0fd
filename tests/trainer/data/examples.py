"""One property, two tests: a few examples in the default suite, many in the slow one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings


def property_test(*strategies: Any, few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a hypothesis test. The slow test is added to the same module, with `_many` behind its name."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def with_examples(count: int) -> Callable[..., None]:
            test: Callable[..., None] = settings(max_examples=count, deadline=None)(given(*strategies)(check))
            return test

        slow = pytest.mark.slow(with_examples(many))
        slow.__name__ = f"{check.__name__}_many"
        check.__globals__[slow.__name__] = slow
        return with_examples(few)

    return decorate
