"""checkpoint/: a model and its optimizer -> safetensors files that any number of ranks, or anybody, reads again.

Takes live objects, of which each rank may hold parts. Gives a directory of shards with one index that is replaced
at once, so that the last complete checkpoint is there at any instant; `docs/checkpoints.md` describes it.
May import: comm, deferred_init, errors, tensor_parts.
"""

from wholestep.checkpoint.load import load, optimizer_state_dict, state_dict
from wholestep.checkpoint.save import save, save_pretrained
