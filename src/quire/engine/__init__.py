"""The engine process: the step loop, the executors under it, and the process around it."""
