"""
How tasks that run beside something are ended.
"""

import asyncio
from collections.abc import Iterable


async def cancel_all(tasks: Iterable["asyncio.Task[None]"]) -> list[Exception]:
    """Cancel what still runs, wait until all have ended, and return what they failed with, in their order."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    outcomes = await asyncio.gather(*ending, return_exceptions=True)
    return [outcome for outcome in outcomes if isinstance(outcome, Exception)]
