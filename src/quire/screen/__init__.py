"""What people see: the first screen, progress, and what `quire explain` says."""
