"""What a gradient stores and evaluates again, and which derivative it is.

May import: core, core/buffer_versions, core/ir, core/jaxpr, core/row_buffers, jax_internals, pytrees, schedule,
settings.
"""

from loopax._src.core import Derivative, Kind
from loopax._src.kinds.auto import Auto
from loopax._src.kinds.implicit import Implicit
from loopax._src.kinds.named import DerivativeLike, KindLike, to_derivative, to_kind
from loopax._src.kinds.reversible import Reversible
from loopax._src.kinds.storing import Bounded, Checkpointed, Lax, Residuals
from loopax._src.kinds.truncated import Truncated
from loopax._src.kinds.tuned import Asked, Tuned
