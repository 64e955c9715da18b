"""The Trainer of transformers with our wrapper: the import is the one line that changes.

wholestep run -n 2 examples/trainer_fit.py trainer-out
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from wholestep.parallel.integrations.transformers import Trainer


def main(folder: str) -> list[float]:
    """Trains, and gives the losses that were logged."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    ids = torch.randint(0, 32, (256, 8))
    arguments = TrainingArguments(
        folder, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=4,
        save_steps=8, ddp_find_unused_parameters=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": one, "labels": int(one[0] > 15)} for one in ids]
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(sys.argv[1])
