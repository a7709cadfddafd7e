"""torch's own tests of its distributed backends, on ours: `make conformance`."""
