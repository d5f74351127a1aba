"""Python processes of one JAX program: several that run it together on the loopback interface, or one that is killed.

A program is a function of a module, named as "package.module:function"; each process calls it with the given strings,
where there are several after `jax.distributed.initialize`, and prints what it finds behind the word `found`.
"""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count"


class Result(NamedTuple):
    """How a process ended."""

    returncode: int  # negative: the signal that ended it
    output: str  # stdout and stderr


class Processes:
    """Processes that run until they are done, killed, or the `with` block ends.

    `heartbeat`: after so many seconds without a sign of life of one process, JAX ends the others.
    """

    def __init__(
        self, program: str, num_processes: int, devices_per_process: int = 2, args: Any = (), heartbeat: int = 100
    ) -> None:
        """Start them, as of this process, with its compiler settings, other devices, and no proxies between them."""
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        flags = re.sub(rf"{DEVICES}=\d+", "", kept.get("XLA_FLAGS", ""))
        own = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        own["XLA_FLAGS"] = f"{flags} {DEVICES}={devices_per_process}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._directory, self._processes = TemporaryDirectory(), []
        for i in range(num_processes):
            words = [program, address, str(num_processes), str(i), str(heartbeat), *map(str, args)]
            command = [sys.executable, "-m", "tests.hosts.processes", *words]
            with self._file(i).open("wb") as out:
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
                self._processes.append(subprocess.Popen(command, cwd=ROOT, env=kept | own, **streams))

    def _file(self, i: int) -> Path:
        """What a process has printed so far."""
        return Path(self._directory.name) / str(i)

    def kill(self, i: int = 0) -> None:
        """Send SIGKILL to one process."""
        self._processes[i].kill()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until this holds, or a process has ended; two minutes at most."""
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline and all(p.poll() is None for p in self._processes):
            time.sleep(0.002)

    def wait(self, timeout: float = 120) -> list[Result]:
        """Wait until all have ended; an error, with what they printed, where they do not."""
        deadline = time.monotonic() + timeout
        for i, process in enumerate(self._processes):
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                printed = [self._file(j).read_text(errors="replace") for j in range(len(self._processes))]
                raise TimeoutError(f"process {i} has not ended in {timeout} s. Printed so far:\n{printed}") from None
        outputs = (self._file(i).read_text(errors="replace") for i in range(len(self._processes)))
        return [Result(process.returncode, text) for process, text in zip(self._processes, outputs, strict=True)]

    def found(self) -> list[Any]:
        """What the processes have found, when all have ended well."""
        results = self.wait()
        assert [result.returncode for result in results] == [0] * len(results), results
        lines = [line for result in results for line in result.output.splitlines() if line.startswith("found ")]
        return [json.loads(line.removeprefix("found ")) for line in lines]

    def __enter__(self) -> "Processes":
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()


def main(program: str, address: str, number: str, process: str, heartbeat: str, *args: str) -> None:
    """One process: join the others, and call the program."""
    import jax

    if int(number) > 1:
        jax.distributed.initialize(address, int(number), int(process), heartbeat_timeout_seconds=int(heartbeat))
    module, _, function = program.partition(":")
    print("found", json.dumps(getattr(importlib.import_module(module), function)(*args)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
    main(*sys.argv[1:])
