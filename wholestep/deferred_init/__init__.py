"""deferred_init/: models are made without memory, and each rank computes the values of its parts alone.

Within `deferred()` a dispatch mode records the operators that make large tensors and write them; their memory is not
touched. Random operators are run once on scratch memory, so that the generator is where it would be otherwise, and
note the state in which it was. Later each tensor is made by what is recorded of it, one at a time, in any order.
May import: functional, nested, tensor_parts, torch_compat.
"""

from wholestep.deferred_init.deferred_tensors import allocated, become, deferred, fill, materialize
from wholestep.deferred_init.records import any_deferred, origin, part_values, read_from, record_of
