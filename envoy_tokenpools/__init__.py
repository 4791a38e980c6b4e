"""
Token pools: fair, class-aware admission control for shared LLM backends, as an Envoy ext_proc server.
"""

from importlib.metadata import version

__version__ = version("envoy-tokenpools")
