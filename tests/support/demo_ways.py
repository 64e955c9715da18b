"""Ways of the demo, small, one after the other in one process: python -m tests.support.demo_ways FOLDER WAY..."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import train_gpt

from wholestep import comm


def train_ways(out: Path | str, *ways: str) -> None:
    """Trains a one-layer model for four steps in each way."""
    for way in ways:
        with mock.patch("sys.argv", ["", "--job", way, "--steps", "4", "--layers", "1", "--out", str(out)]):
            train_gpt.main()
        if comm.is_initialized():
            comm.destroy_process_group()


if __name__ == "__main__":
    train_ways(*sys.argv[1:])
