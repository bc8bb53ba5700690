"""The demo: plain replay against LPR on bundled data."""
