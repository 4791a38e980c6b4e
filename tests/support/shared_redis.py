"""One real Redis for all tests of a run that do not harm it, started when the first of them asks."""

import atexit
import functools
import shutil
import socket
import subprocess
import tempfile
import time


@functools.cache
def shared_server() -> str:
    """Its URL; it ends with this process."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("these tests need a real Redis: apt-get install redis-server")
    folder = tempfile.mkdtemp()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)

    def stop() -> None:
        child.kill()
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return f"redis://127.0.0.1:{port}/0"
    raise RuntimeError("redis-server does not answer")
