"""Preflight: plans are executed once all ranks have agreed on what they are about to run."""
