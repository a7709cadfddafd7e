"""For imports by older names; see communicator.py."""

from typing import Literal

from unisono.comm.communicator import *  # noqa: F403
from unisono.comm.communicator import Algorithm, Communicator, Group, Message, check_messages  # noqa: F401
from unisono.comm.reductions import *  # noqa: F403
from unisono.comm.reductions import NamedReduction as Reduction
from unisono.comm.tensors import Tensor, Tensors, count, dtype_name, name_of_dtype  # noqa: F401
from unisono.comm.transport import DEFAULT_TIMEOUT_S  # noqa: F401
from unisono.comm.work import Work  # noqa: F401

Op = Reduction
No = Literal[False]
Yes = Literal[True]
