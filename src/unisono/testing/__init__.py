"""Tests on several ranks: what stands behind `@pytest.mark.ranks`."""
