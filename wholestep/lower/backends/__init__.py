"""What runs a graph: generated Python over ATen kernels, Inductor, a user's callable, the naive interpreter."""
