"""
Who asks, and for which pool: admission rules 1 and 2, from the configuration alone.
"""

from collections.abc import Sequence

from envoy_tokenpools.config import (
    ClaimSource,
    Config,
    EntitlementRef,
    Trusted,
    credential_digest,
    trusted_digest,
)
from envoy_tokenpools.core.pool import Entitlement, Pool
from envoy_tokenpools.errors import RequestError

Rights = Sequence[EntitlementRef]
"""What one credential entitles to: at most one entitlement in each pool."""


class Directory:
    """Looks up callers and pools in one configuration; a reload makes a new one."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def claim(self) -> ClaimSource | None:
        """Where the claim that names a tenant is found; None if none is used."""
        return self._config.claim

    def identify(
        self, credential: str | None, *, claim: str | None = None, principals: Sequence[str] = ()
    ) -> Rights:
        """
        The rights of a caller: by a verified claim, a verified certificate, its key, or as nobody in particular.

        The first of them that is known here decides. Anonymous rights are only for callers that sent no key.

        Args:
            credential: bearer token or API key.
            claim: what a filter before us verified.
            principals: names of the client certificate that Envoy verified.

        Raises:
            RequestError: 401, if nothing is known.
        """
        keys = self._config.keys
        trusted = [trusted_digest(Trusted.PRINCIPAL, principal) for principal in principals]
        if claim:
            trusted.insert(0, trusted_digest(Trusted.CLAIM, claim))
        trusted.append(
            credential_digest(credential) if credential else trusted_digest(Trusted.ANONYMOUS, "")
        )
        for digest in trusted:
            rights = keys.get(digest)
            if rights is not None:
                return rights
        if credential:
            raise RequestError(
                401, "invalid_api_key", "The API key that was sent is not known here."
            )
        raise RequestError(
            401,
            "invalid_api_key",
            "No API key was sent. Put it into the header: Authorization: Bearer YOUR_KEY",
        )

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
                return self._named(right)
        raise RequestError(
            404,
            "model_not_found",
            f"The model {_shown(model)} does not exist or you do not have access to it.",
            "model",
        )

    def resolve_alone(self, rights: Rights) -> tuple[Pool, Entitlement]:
        """
        The pool of a request whose model is not read: the caller's only one, or else the default pool.

        Raises:
            RequestError: 404, if the caller has several, and the default pool is none of them.
        """
        for right in rights:
            if len(rights) == 1 or right.pool == self._config.default_pool:
                return self._named(right)
        raise RequestError(
            404,
            "model_not_found",
            "This key is entitled to several pools, and the model is not read at this path.",
        )

    def _named(self, right: EntitlementRef) -> tuple[Pool, Entitlement]:
        pool = self._config.pools[right.pool]
        return pool, pool.entitlements[right.entitlement]


def _shown(model: str | None) -> str:
    """A client's model name, safe and short enough to be quoted."""
    return "of the default pool" if model is None else f"`{model[:64]}`"
