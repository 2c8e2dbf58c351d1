"""How strongly forgetting and retaining pull on the same weights (``rosu diagnose``)."""
