"""The mathematics of SORL as pure functions: tensors and floats in, tensors out.

Each is differentiable where it should be, reduces in float32 or better, and ignores the values at masked positions,
even NaN and infinity.
"""

from . import advantages, clip_norm, credit, importance, losses, masking
from .advantages import *
from .clip_norm import *
from .credit import *
from .importance import *
from .losses import *
from .masking import *

__all__ = [
    *advantages.__all__,
    *clip_norm.__all__,
    *credit.__all__,
    *importance.__all__,
    *losses.__all__,
    *masking.__all__,
]
