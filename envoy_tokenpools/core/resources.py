"""
The three resources of a token pool, as one vector of integers.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Resources:
    """
    An amount of the three resources (paper section 3.1; design words).

    Attributes:
        tokens_per_second: prompt and generated tokens, weighted equally.
        kv_bytes: bytes of KV cache.
        concurrency: sequences decoding at the same time.
    """

    tokens_per_second: int = 0
    kv_bytes: int = 0
    concurrency: int = 0

    NONE: ClassVar["Resources"]

    def __post_init__(self) -> None:
        if self.tokens_per_second < 0 or self.kv_bytes < 0 or self.concurrency < 0:
            raise ValueError(f"resources are never negative: {self}")

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            self.tokens_per_second + other.tokens_per_second,
            self.kv_bytes + other.kv_bytes,
            self.concurrency + other.concurrency,
        )

    def times(self, replicas: int) -> "Resources":
        """The same amount on each of `replicas` replicas."""
        return Resources(
            self.tokens_per_second * replicas, self.kv_bytes * replicas, self.concurrency * replicas
        )

    def within(self, other: "Resources") -> bool:
        """Whether no resource exceeds that of `other`."""
        return (
            self.tokens_per_second <= other.tokens_per_second
            and self.kv_bytes <= other.kv_bytes
            and self.concurrency <= other.concurrency
        )


Resources.NONE = Resources()
