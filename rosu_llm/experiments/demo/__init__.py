"""The embedded task: a small Llama forgets fictitious people (``rosu demo``)."""
