"""The memory plan: liveness, buffer reuse, arena offsets, and the facts about operators and values behind them."""
