"""What most ranks import: the server that they are forked from does so once, which saves each of them a second."""

import torch._dynamo  # noqa: F401 - an optimizer's first step imports it

import tests.support.spmd_equal  # noqa: F401 - with transformers
