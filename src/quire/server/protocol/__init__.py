"""Bodies of the HTTP APIs as msgspec structs: one file per API, and what they share."""
