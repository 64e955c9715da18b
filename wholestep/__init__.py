"""Wholestep: an ordinary PyTorch training step, captured whole, as one readable graph."""
