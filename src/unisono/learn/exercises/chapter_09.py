"""9. DDP, ZeRO and FSDP by hand"""

from torch import Tensor

from unisono import Communicator


def sharded_step(
    comm: Communicator, parameters: Tensor, gradients: Tensor, momentum: Tensor, lr: float
) -> None:
    """Make one step of SGD with momentum 0.9 on the mean of all gradients: ZeRO, stage 1.

    `parameters` and `gradients` have all elements, a multiple of comm.size; `momentum` has this
    rank's part alone. Update that part of the momentum and of the parameters, then give every rank
    every part. Use comm.reduce_scatter and comm.all_gather.
    """
    raise NotImplementedError
