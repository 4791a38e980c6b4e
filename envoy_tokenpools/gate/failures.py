"""
How a failing store is told: counted for the metrics, and said in the log.
"""

import logging

from envoy_tokenpools.errors import StoreError
from envoy_tokenpools.observer import Observer

log = logging.getLogger(__name__)


def tell_store_failure(observer: Observer, operation: str, error: StoreError) -> None:
    """`operation` (reserve, settle, ...) failed with `error`."""
    observer.store_failed(operation)
    log.warning("store failed", extra={"operation": operation, "error": str(error)})
