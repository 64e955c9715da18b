"""From the graph of one device to the graph of one rank: strategies, redistribution, local calls."""
