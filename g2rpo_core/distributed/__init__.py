"""Several processes: their group, checkpoints that any number of them reads, and SIGTERM."""

import warnings

# torch.distributed.checkpoint's, of one process alone; for good, as it warns from threads of its own, too
warnings.filterwarnings("ignore", "torch.distributed is disabled")
