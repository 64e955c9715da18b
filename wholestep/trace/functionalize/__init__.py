"""From writes and views to values: aliases, in-place calls, storages, and what autograd says of a tensor."""
