"""Where drafts come from: the proposers of scheduler/proposer.py, one file a method. No torch."""
