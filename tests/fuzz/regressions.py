"""
Inputs that found a fault once, as short as they could be made, by target.
"""

from collections.abc import Mapping

REGRESSIONS: Mapping[str, Mapping[str, bytes]] = {
    "request_body": {
        "a fault that lies deep is told briefly": b"\0" + b'{"a":' * 600 + b"1e999",
    },
    "stream": {
        "counts of several choices add up to more than is believed": (
            b'\x00data: {"choices":[{"index":9}],"usage":{"output_tokens":1}}\n\n'
            b'data: {"choices":[{}],"usage":{"output_tokens":9007199254740992}}\n\n'
        ),
    },
    "encoded": {
        "a br body that shrank a lot comes out whole at every cut": (
            b"\x02\r\xab\xb7\x98\x00\x00\x02\x84\r\xe0\xc05\x9c\xd4f\x03\xb8\x00\x87\xe5\x93\x84\x00"
        ),
    },
    "exchange": {},
}
