"""
What there is to fuzz: by name, the function that takes any bytes, and the one that makes bytes worth taking.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.fuzz.encoded_bodies import encoded_body, fuzz_encoded
from tests.fuzz.event_streams import fuzz_stream, response
from tests.fuzz.exchanges import fuzz_exchange
from tests.fuzz.request_bodies import fuzz_request_body, request_body
from tests.fuzz.scripts import exchange_script


@dataclass(frozen=True, slots=True)
class Target:
    """
    One thing to fuzz.

    Attributes:
        fuzz: raises whatever it finds; returns what there was to see, as counts.
        generate: makes an input that reaches far.
    """

    fuzz: Callable[[bytes], Mapping[str, int]]
    generate: Callable[[random.Random], bytes]


TARGETS: Mapping[str, Target] = {
    "request_body": Target(fuzz_request_body, request_body),
    "stream": Target(fuzz_stream, response),
    "encoded": Target(fuzz_encoded, encoded_body),
    "exchange": Target(fuzz_exchange, exchange_script),
}
