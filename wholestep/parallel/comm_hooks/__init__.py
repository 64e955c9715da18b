"""Functions that reduce a bucket of gradients in the place of an all-reduce."""
