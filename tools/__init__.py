"""Programs that `make` runs in a clone: generators of pages and lists, checks, and runners of tests."""
