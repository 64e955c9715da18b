"""The public names of `torch.distributed`: groups, collectives, messages, objects, and how a call is issued."""
