"""
The stack that the files of cases on the wire share, one for each file.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cases_wire import ANSWER, Rig, rigged
from tests.support.replay import always


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_rig() -> AsyncIterator[Rig]:
    """One stack for all tests of this file."""
    async with rigged() as rig:
        yield rig


@pytest.fixture
def rig(module_rig: Rig) -> Rig:
    """The shared stack, with a backend as if new."""
    module_rig.backend.respond = always(ANSWER)
    module_rig.backend.received.clear()
    return module_rig
