"""The benchmark of loopax against its peers: `make bench`."""
