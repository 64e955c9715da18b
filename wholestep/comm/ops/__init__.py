"""Collectives as pure operators `wholestep::…`, their gradients and their blocking forms."""
