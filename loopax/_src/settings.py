"""What loopax chooses by: the memory that a gradient may take, and what basic operations cost.

Settings are a part of the key of each trace and of each cache here, so what is traced later follows them.
"""

from functools import cache
from typing import Any, NamedTuple

import jax

DEFAULT_MEMORY = 256 * 2**20  # bytes

# The constants of a device, from which `core/jaxpr/cost.py` tells what a step costs.


class Costs(NamedTuple):
    """In nanoseconds: of a CPU, for which they were fitted (docs/benchmark-details.md)."""

    near_byte: float = 0.025  # stored and read again, if all that is stored fits in the cache of a core
    cached_byte: float = 0.17  # if it fits in a cache
    memory_byte: float = 0.9  # if it does not
    product: float = 0.019  # a multiplication or an addition of a matrix product
    convolution: float = 0.19
    elementwise: float = 0.22  # an element of a cheap operation
    function: float = 0.6  # of one that takes some instructions, such as `exp` and `tanh`
    narrow_function: float = 6.2  # and on top of it in rows of few elements, for which there are no vector instructions
    slow_function: float = 3.8  # of one that takes many, such as `sin` and `pow`
    comparison: float = 8.5  # of a sort
    call: float = 200.0  # an operation that is not fused with others, on top of its arithmetic
    step: float = 100.0  # of a loop, on top of its body


class Calibration(NamedTuple):
    """What is known of a device."""

    platform: str = "cpu"  # or "gpu" or "tpu": how XLA compiles for it
    costs: Costs = Costs()
    near_bytes: int = 3 * 2**18  # in the cache of one core
    cache_bytes: int = 24 * 2**20
    look: float = 0.0  # nanoseconds of a step, besides, in a loop whose length XLA does not know: the host asks for it
    stored: float = 0.0  # nanoseconds of a step, besides its bytes, for each array that it stores

    def begins_late(self, num_bytes: float) -> bool:
        """Whether a loop, to begin, takes longer than steps that also read and write so many bytes.

        For where the host looks at the condition of a loop: it does so before the first step, too.
        """
        return self.storing(2 * num_bytes, num_bytes) < self.look / 10

    def storing(self, num_bytes: float, in_all: float) -> float:
        """Storing so many bytes per step and reading them again, if there are so many in all."""
        if in_all <= self.near_bytes:
            return num_bytes * self.costs.near_byte
        return num_bytes * (self.costs.cached_byte if in_all <= self.cache_bytes else self.costs.memory_byte)


# Bytes and arithmetic are estimates from what the makers publish. Kernels, steps and looks of a GPU were fitted to 137
# times of an H200 (docs/accelerators.md). On a TPU, nothing was ever measured.

H100 = Calibration(
    "gpu",
    Costs(
        near_byte=0.0004,  # a byte written and one read, at the 5.5 TB/s of its second cache
        cached_byte=0.0004,
        memory_byte=0.0006,  # at 3.35 TB/s
        product=0.000004,  # TF32 at half of its 495 Tflop/s
        convolution=0.000004,
        elementwise=0.0006,  # an element of 4 bytes in and out of a kernel, for four operations in it
        function=0.0006,
        narrow_function=1e-9,
        slow_function=0.002,
        comparison=0.005,
        call=600.0,  # a kernel
        step=5000.0,
    ),
    near_bytes=50 * 2**20,
    cache_bytes=50 * 2**20,
    look=15_500.0,
    stored=600.0,
)
TPU_V5E = Calibration(
    "tpu",
    Costs(
        near_byte=0.0025,  # a byte written and one read, at 819 GB/s
        cached_byte=0.0025,
        memory_byte=0.0025,
        product=0.00001,  # bfloat16 at half of its 197 Tflop/s
        convolution=0.00001,
        elementwise=0.0025,
        function=0.0025,
        narrow_function=1e-9,
        slow_function=0.01,
        comparison=0.02,
        call=1000.0,  # this, a step and a stored array: fitted to the cycles that XLA expects, at 1.5 GHz
        step=3400.0,
    ),
    near_bytes=0,
    cache_bytes=0,
    stored=100.0,
)
CALIBRATIONS = {"cpu": Calibration(), "h100": H100, "tpu-v5e": TPU_V5E}
OF_PLATFORM = {"cpu": CALIBRATIONS["cpu"], "gpu": H100, "tpu": TPU_V5E}


class Settings(NamedTuple):
    """What is set by `loopax.configure`."""

    memory: int = DEFAULT_MEMORY  # of `Auto()`
    calibration: Calibration | None = None  # None: that of the platform


# What holds from the start: `loopax._src.configuration` replaces it by what the environment says.
default = Settings()


@cache
def context() -> Any:
    """What JAX knows of the settings: it compiles a function again under others.

    It is made when a program sets something. A new context is itself another setting, and loopax may be imported while
    a function is traced: the function would be compiled again when it is called again.
    """
    return jax.make_user_context(default)


def settings() -> Settings:
    """The settings that are in use here."""
    return context().value if context.cache_info().currsize else default


def calibration() -> Calibration:
    """What is known of the device for which a program is traced here."""
    return settings().calibration or OF_PLATFORM[platform()]


def costs() -> Costs:
    """The constants that are in use here."""
    return calibration().costs


def platform() -> str:
    """Where JAX puts what is computed: "cpu", "gpu" or "tpu". It is a part of the key of each trace."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = jax.default_backend() if device is None else getattr(device, "platform", device)
    return name if name in OF_PLATFORM else "gpu"  # such as "cuda"
