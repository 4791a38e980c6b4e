"""Every store in turn."""

from collections.abc import AsyncIterator

import pytest

from tests.store.books import STORES, Books, Opener


@pytest.fixture(params=list(STORES))
def open_books(request: pytest.FixtureRequest) -> Opener:
    """Opens the books of each store in turn."""
    return STORES[request.param]


@pytest.fixture
async def books(open_books: Opener) -> AsyncIterator[Books]:
    """Empty books."""
    async with open_books() as opened:
        yield opened
