"""
The entry point, also as `python -m envoy_tokenpools`.
"""

import os
import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    # gRPC reads this when it is imported. Envoy is started by fork and exec, so it need not get ready for children that
    # use gRPC, nor warn about them.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from envoy_tokenpools.cli import main as run  # noqa: PLC0415

    return run()


if __name__ == "__main__":
    sys.exit(main())
