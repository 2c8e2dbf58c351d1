"""One page about runs: what is read, what is drawn, how it is written."""
