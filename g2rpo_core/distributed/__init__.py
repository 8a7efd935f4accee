"""Several processes: their group, checkpoints that any number of them reads, and SIGTERM."""

import warnings

# torch.distributed.checkpoint warns so with one process; silenced for good, because it also warns
# from its own threads
warnings.filterwarnings("ignore", "torch.distributed is disabled")
