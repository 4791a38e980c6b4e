"""
How long prompts and answers are: distributions of whole, positive numbers of tokens.
"""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002  as the others
        """The length of one."""
        return self.tokens

    @property
    def mean(self) -> float:
        """The mean length."""
        return float(self.tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any length between two, both included, equally often."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """The length of one."""
        return rng.randint(self.low, self.high)

    @property
    def mean(self) -> float:
        """The mean length."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class LogNormal:
    """
    Many short ones and a long tail, as real prompts are.

    Attributes:
        median: half of them are at most this long.
        sigma: of the logarithm; 1 makes one in six more than 2.7 times as long as the median.
        most: longer ones are cut to this.
    """

    median: int
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """The length of one."""
        drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return max(1, min(drawn, self.most))

    @property
    def mean(self) -> float:
        """The mean length, of the uncut distribution."""
        return self.median * math.exp(self.sigma**2 / 2)


Lengths = Fixed | Uniform | LogNormal
