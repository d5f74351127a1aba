"""Several Python processes that run one JAX program together, on the loopback interface of this machine.

`run` starts them and waits; `Processes` also kills one of them. A program is a function of a module, named as
"package.module:function"; each process calls it with the given strings, after `jax.distributed.initialize`.
"""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICES = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Result:
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
        """Start them."""
        self._directory = TemporaryDirectory()
        address = f"127.0.0.1:{_free_port()}"
        self._processes = []
        for i in range(num_processes):
            own = [program, address, str(num_processes), str(i), str(heartbeat), *map(str, args)]
            with self._file(i).open("wb") as out:
                started = subprocess.Popen(
                    [sys.executable, "-m", "tests.hosts.processes", *own],
                    cwd=ROOT,
                    env=_environment(devices_per_process),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            self._processes.append(started)

    def _file(self, i: int) -> Path:
        return Path(self._directory.name) / str(i)

    def output(self, i: int) -> str:
        """What a process has printed so far."""
        return self._file(i).read_text(errors="replace")

    def kill(self, i: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process."""
        self._processes[i].send_signal(how)

    def wait(self, timeout: float = 60) -> list[Result]:
        """Wait until all have ended; TimeoutError, with what they printed, where they do not."""
        deadline = time.monotonic() + timeout
        for i, process in enumerate(self._processes):
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                printed = "\n".join(f"-- process {j}\n{self.output(j)}" for j in range(len(self._processes)))
                raise TimeoutError(f"process {i} has not ended in {timeout} s. Printed so far:\n{printed}") from None
        return [Result(process.returncode, self.output(i)) for i, process in enumerate(self._processes)]

    def __enter__(self) -> "Processes":
        """Nothing more to do."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()


def run(
    program: str, num_processes: int, devices_per_process: int = 2, args: Any = (), timeout: float = 60
) -> list[Result]:
    """Run a program to its end in all processes."""
    with Processes(program, num_processes, devices_per_process, args) as processes:
        return processes.wait(timeout)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment(devices: int) -> dict[str, str]:
    """As of this process, with its compiler settings, other devices, and no proxies between processes."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    flags = re.sub(rf"{DEVICES}=\d+", "", kept.get("XLA_FLAGS", ""))
    return kept | {
        "XLA_FLAGS": f"{flags} {DEVICES}={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "PYTHONUNBUFFERED": "1",
    }


def main() -> None:
    """One process: join the others, and call the program."""
    import jax

    program, address, number, process, heartbeat, *args = sys.argv[1:]
    jax.distributed.initialize(address, int(number), int(process), heartbeat_timeout_seconds=int(heartbeat))
    module, _, function = program.partition(":")
    getattr(importlib.import_module(module), function)(*args)


if __name__ == "__main__":
    main()
