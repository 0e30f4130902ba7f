"""Training over several ranks: the model learned is the one that a single process would learn."""

from rowhaul.train.distributed.evaluation import evaluate
from rowhaul.train.distributed.own_loop import find_checkpoint, save_checkpoint
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.training import DistributedTraining

__all__ = ["DistributedTraining", "distribute", "evaluate", "find_checkpoint", "save_checkpoint"]
