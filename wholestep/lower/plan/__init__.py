"""Where each value lives: liveness, in-place reuse, arena offsets, and the facts about operators behind them."""
