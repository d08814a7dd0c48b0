"""What every network shares: attention over spans, the block, its cache, its head."""
