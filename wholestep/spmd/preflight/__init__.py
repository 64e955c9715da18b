"""One start for all ranks: plans are put to work, and what ranks are about to run is compared."""
