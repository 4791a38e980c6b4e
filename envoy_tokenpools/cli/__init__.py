"""
The command line: reads arguments, calls what they name, and turns errors into one clear line and an exit status.
"""

from envoy_tokenpools.cli.main import main
from envoy_tokenpools.cli.parser import build_parser

__all__ = ["build_parser", "main"]
