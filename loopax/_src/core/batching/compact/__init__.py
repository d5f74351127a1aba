"""Batches that finished lanes leave."""
