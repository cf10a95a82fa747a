"""The sources of drafts: the proposers of scheduler/proposer.py, one file for each method. No torch."""
