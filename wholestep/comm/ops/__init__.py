"""Collectives as pure operators `wholestep::…`, their gradients and blocking forms, and c10d calls while tracing."""
