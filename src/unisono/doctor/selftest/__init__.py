"""The self-test: every primitive once on the group at hand, its results checked."""
