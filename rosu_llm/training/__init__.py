"""Configuration and trainer: thin glue between transformers.Trainer and the step engine."""
