"""Operators that need more than a node: tables of variants, kernels' own checks, formulas chosen by data."""
