"""What ranks run for the test of the examples: each one's `main`, with the environment that `wholestep run` gives."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import ddp_loop
import fsdp_from_meta
import lightning_fit
import trainer_fit
import transformers

from tests.support.accelerate_ranks import begin
from wholestep import comm


def examples(ports: list[int], folder: str) -> dict[str, list[float]]:
    """The losses of each; the frameworks' process group stays, as it does in their scripts."""
    begin(ports[0])
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {"ddp": ddp_loop.main()}
    os.environ["MASTER_PORT"] = str(ports[1])
    fsdp_from_meta.main(f"{folder}/fsdp")
    assert Path(folder, "fsdp", "step-30").exists()
    os.environ["MASTER_PORT"] = str(ports[2])
    found["lightning"] = [lightning_fit.main()]
    comm.destroy_process_group()
    return found | {"trainer": trainer_fit.main(f"{folder}/trainer")}
