"""Lightning with our wrapper: the strategy is the one line that changes.

wholestep run -n 2 examples/lightning_fit.py
"""

from __future__ import annotations

import lightning
import torch
from torch import nn

from wholestep.parallel.integrations.lightning import DDPStrategy


class Classifier(lightning.LightningModule):
    """Says which of three numbers is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 3))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a rank's batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As anywhere."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> float:
    """Trains, and gives the mean loss of the last epoch."""
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy=DDPStrategy(), accumulate_grad_batches=2, **quiet
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 32, shuffle=True))
    loss = float(trainer.callback_metrics["loss"])
    if trainer.is_global_zero:
        print(f"loss {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
