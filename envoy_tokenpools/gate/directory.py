"""
Who asks, and for which pool: admission rules 1 and 2, from the configuration alone.
"""

from collections.abc import Sequence

from envoy_tokenpools.config import Config, EntitlementRef, credential_digest
from envoy_tokenpools.core.pool import Entitlement, Pool
from envoy_tokenpools.errors import RequestError

Rights = Sequence[EntitlementRef]
"""What one credential entitles to: at most one entitlement in each pool."""


class Directory:
    """Looks up callers and pools in one configuration; a reload makes a new one."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def identify(self, credential: str | None) -> Rights:
        """
        The rights of whoever sent `credential` (a bearer token or API key).

        Raises:
            RequestError: 401, if there is none or it is unknown.
        """
        if not credential:
            raise RequestError(
                401,
                "invalid_api_key",
                "No API key was sent. Put it into the header: Authorization: Bearer YOUR_KEY",
            )
        digest = credential_digest(credential)
        rights = self._config.keys.get(digest)
        if rights is None:
            raise RequestError(
                401, "invalid_api_key", "The API key that was sent is not known here."
            )
        return rights

    def resolve(self, rights: Rights, model: str | None) -> tuple[Pool, Entitlement]:
        """
        The pool that serves `model` and the caller's entitlement in it.

        A request without a model, or with one that no pool names, goes to the default pool if there is one.

        Raises:
            RequestError: 404, if no pool serves the model or the caller is not entitled to it: one answer for both, as
                OpenAI gives, so that names cannot be probed; 400, if no model was named and there is no default.
        """
        pool_name = self._config.pool_of_model.get(model) if model is not None else None
        if pool_name is None:
            pool_name = self._config.default_pool
        if pool_name is None and model is None:
            raise RequestError(
                400, "missing_required_parameter", "The request names no model.", "model"
            )
        for right in rights:
            if right.pool == pool_name:
                pool = self._config.pools[right.pool]
                return pool, pool.entitlements[right.entitlement]
        raise RequestError(
            404,
            "model_not_found",
            f"The model {_shown(model)} does not exist or you do not have access to it.",
            "model",
        )


def _shown(model: str | None) -> str:
    """A client's model name, safe and short enough to be quoted."""
    return "of the default pool" if model is None else f"`{model[:64]}`"
