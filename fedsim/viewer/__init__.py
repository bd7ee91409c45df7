"""`fedsim view`: runs, their clients and the decisions of their models, in a browser."""
