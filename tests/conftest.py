"""
How hypothesis runs: never against the clock, which is noisy, and in CI always with the same examples.
"""

import os

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")
