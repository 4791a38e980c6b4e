"""
`python -m envoy_tokenpools`.
"""

import sys

from envoy_tokenpools.cli import main

sys.exit(main())
