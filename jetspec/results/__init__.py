"""A page of results from the records of evaluations: `python -m jetspec results`."""
