"""The loops of loopax for long runs: they save their state to disk, and the same call resumes the run."""

from loopax._src.durable.gradient import GradientInfo, Gradients, value_and_grad
from loopax._src.durable.loops import fori_loop, scan, while_loop
from loopax._src.durable.options import AnotherProgramWarning, DamagedSaveWarning, SaveError
from loopax._src.durable.outputs import Rows, outputs, steps_saved
from loopax._src.durable.streams import StreamOutputs, lanes_stream

__all__ = [
    "AnotherProgramWarning",
    "DamagedSaveWarning",
    "GradientInfo",
    "Gradients",
    "Rows",
    "SaveError",
    "StreamOutputs",
    "fori_loop",
    "lanes_stream",
    "outputs",
    "scan",
    "steps_saved",
    "value_and_grad",
    "while_loop",
]
