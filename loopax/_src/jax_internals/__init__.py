"""Every use of private or version-dependent JAX, each with its reason: one file for each question.

The rest of loopax imports these names from here, and the folder as `jaxi` where they are many. So a new JAX version is
a change to this folder alone. Tested on JAX 0.10.0 and 0.10.2 (Python 3.11) and JAX 0.12.0.1 (Python 3.12 to 3.14) by
`make test-all`, also with JAX's flags that are to become defaults.

May import: nothing of loopax.
"""

from jax.extend.core import ClosedJaxpr, JaxprTypeError, Literal, Primitive, jaxpr_as_fun, mapped_aval, unmapped_aval
from jax.interpreters import ad

# The names without an underscore are what the rest of loopax may use: each file has its own.
from loopax._src.jax_internals.few_numbers import MOST_WRITES
from loopax._src.jax_internals.jaxprs import *
from loopax._src.jax_internals.lowered import calls_of_operations
from loopax._src.jax_internals.not_yet_made import *
from loopax._src.jax_internals.one_function import can_be_function
from loopax._src.jax_internals.operations import *
from loopax._src.jax_internals.primitives import *
from loopax._src.jax_internals.processes import told_by_first
from loopax._src.jax_internals.recognise import recognised
from loopax._src.jax_internals.rules import *
from loopax._src.jax_internals.tracing import *
from loopax._src.jax_internals.types import *
