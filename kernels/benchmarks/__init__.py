"""One table a kernel family, with its peers measured in the same run."""
