"""Bodies of the HTTP APIs as msgspec structs: one file per API, and their common parts."""
